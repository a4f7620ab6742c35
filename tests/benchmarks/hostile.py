"""Attack a service in a process of its own, and measure what each attack costs other clients and how much memory.

    python -m tests.benchmarks.hostile [--only NAME ...] [--model DIRECTORY]

While an attack runs, another client requests `/health` every 20 ms, each time on a new connection. For each attack, a
line shows the latency of these requests (ms, median and 99th percentile), the largest growth of the service's memory
(MB), and the answers that the attackers got. The rows of `hostile_requests.py` also have a neighbour, who streams a
greedy generation again and again; the line shows the longest time before its first token and between two tokens, and
names each target that was missed (`TARGETS`). The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.benchmarks.client import percentile
from tests.benchmarks.hostile_requests import ROWS, HostileRequest, Row

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BODY_BYTES = 4 * MIB - 64
PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 20
NEIGHBOUR = json.dumps(
    {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
).encode()
# The most of each measured value of a row.
TARGETS = {
    "neighbour_first_token_seconds": 0.3,
    "neighbour_gap_seconds": 0.1,
    "neighbour_different": 0,
    "neighbour_failed": 0,
    "health_ms_p99": 100.0,
    "memory_mb_after_30_seconds": 100,  # recordings of steps with other numbers of sequences are kept
    "gauges": 0,
    "sigterm_seconds": GRACE_SECONDS + 2,
}


class Client:
    """A client of a service at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)

    async def ask(
        self,
        path: str,
        body: bytes = b"",
        *,
        method: str = "POST",
        headers: str = "",
        content_type: str = "application/json",
        seconds: float = PATIENCE_SECONDS,
    ) -> tuple[int | str, bytes]:
        """Send one request. Returns its status and body; instead of the status, a word if there was no answer."""
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await self.connect()
                try:
                    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                    head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
                    with contextlib.suppress(ConnectionError):
                        writer.write(head.encode() + body)
                        await writer.drain()
                    answer = await reader.read()
                    head_of_answer, _, content = answer.partition(b"\r\n\r\n")
                    return (int(head_of_answer.split()[1]) if head_of_answer else "closed"), content
                finally:
                    writer.close()
        except TimeoutError:
            return "no answer", b""
        except ConnectionError:
            return "reset", b""

    async def metric(self, name: str) -> float:
        _, content = await self.ask("/metrics", method="GET")
        for line in content.decode().splitlines():
            if line.startswith(f"forwardscope_{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0


class Service(Client):
    """A running service, started for one attack."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        super().__init__(port)
        self.process = process


@contextlib.contextmanager
def serving(model: str, *options: str, max_files: int | None = None) -> Iterator[Service]:
    """Start a service, and yield it when it is ready."""
    command = [sys.executable, "-m", "service", "--model", model, "--port", "0", *options]

    def limit_files() -> None:
        if max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, preexec_fn=limit_files
    ) as process:
        assert process.stderr is not None
        log: list[str] = []
        try:
            port = None
            for line in process.stderr:
                log.append(line)
                if found := re.search(r"ready: http://\S+:(\d+)", line):
                    port = int(found[1])
                    break
            assert port is not None, "".join(log)
            threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
            yield Service(process, port)
        finally:
            began = time.monotonic()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
            seconds = time.monotonic() - began
            errors = [line for line in log if "Traceback" in line or " ERROR " in line]
            if errors or seconds > 5:
                sys.stdout.write(f"  ended after {seconds:.1f} s; log: {errors[:3]}\n")


class Neighbour(threading.Thread):
    """Streams the same greedy generation again and again, until `stopped`."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.headers = {"Content-Type": "application/json"} | headers
        self.stopped = threading.Event()
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.texts: Counter[tuple[int, ...]] = Counter()
        self.num_failed = 0

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._stream()
            except (OSError, http.client.HTTPException):
                self.num_failed += not self.stopped.is_set()
                time.sleep(0.1)

    def _stream(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        before = time.perf_counter()
        try:
            connection.request("POST", "/generate", NEIGHBOUR, self.headers)
            answer, ids = connection.getresponse(), list[int]()
            if answer.status != 200:
                self.num_failed += 1
                return
            for line in answer:
                if self.stopped.is_set():
                    return
                if line.startswith(b"data: {") and (token := json.loads(line[6:]).get("token")) is not None:
                    now = time.perf_counter()
                    (self.gaps if ids else self.firsts).append(now - before)
                    before = now
                    ids.append(token["id"])
            self.texts[tuple(ids)] += 1
        finally:
            connection.close()

    def report(self) -> dict[str, Any]:
        return {
            "neighbour_first_token_seconds": round(max(self.firsts, default=0.0), 3),
            "neighbour_gap_seconds": round(max(self.gaps, default=0.0), 3),
            "neighbour_streams": sum(self.texts.values()),
            "neighbour_different": len(self.texts) - 1 if self.texts else 0,
            "neighbour_failed": self.num_failed,
        }


def watch(port: int, pid: int, stopped: Event, report: Connection, neighbour_headers: dict[str, str] | None) -> None:
    """Request `/health` and read the memory of the service every 20 ms, until `stopped`; with headers, as a neighbour.

    This runs in a process of its own, which no attack slows down.
    """
    neighbour = None if neighbour_headers is None else Neighbour(port, neighbour_headers)
    if neighbour is not None:
        neighbour.start()
    seconds: list[float] = []
    failures: Counter[str] = Counter()
    before = highest = memory(pid)
    while not stopped.is_set():
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
            if status == 200:
                seconds.append(time.perf_counter() - began)
            else:
                failures[str(status)] += 1
        except OSError as error:
            failures[type(error).__name__] += 1
        finally:
            connection.close()
        highest = max(highest, memory(pid))
        time.sleep(0.02)
    if neighbour is not None:
        neighbour.stopped.set()
    report.send(
        (neighbour.report() if neighbour is not None else {})
        | {
            "health_ms_median": round(1000 * percentile(seconds, 50), 1) if seconds else None,
            "health_ms_p99": round(1000 * percentile(seconds, 99), 1) if seconds else None,
            "health_ms_most": round(1000 * max(seconds, default=0), 1),
            "health_failed": dict(failures),
            "memory_mb": round(highest - before),
        }
    )


def memory(pid: int) -> float:
    """Resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / MIB


@contextlib.contextmanager
def watching(
    service: Service, result: dict[str, Any], neighbour_headers: dict[str, str] | None = None
) -> Iterator[None]:
    """Run `watch` inside a `with` block; `result` gets its report at the end."""
    context = multiprocessing.get_context("spawn")
    stopped = context.Event()
    receiver, sender = context.Pipe(duplex=False)
    arguments = (service.port, service.process.pid, stopped, sender, neighbour_headers)
    watcher = context.Process(target=watch, args=arguments, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        time.sleep(0.5)
        stopped.set()
        result |= receiver.recv()
        watcher.join()


def repeated(before: str, item: str, after: str) -> bytes:
    """A body with as many items as fit into it."""
    count = (BODY_BYTES - len(before) - len(after)) // (len(item) + 1)
    return f"{before}{','.join([item] * count)}{after}".encode()


BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "stop": ("/generate", repeated('{"prompt":[1],"stop":[', "1", "]}")),
    "prompt": ("/generate", repeated('{"prompt":[', "-1", "]}")),
    "targets": ("/forward", repeated('{"prompt":[1],"targets":[', "{}", "]}")),
    "keys": ("/generate", ("{" + ",".join(f'"k{i}":1' for i in range(340_000)) + "}").encode()[:-1] + b"}"),
    "bias": (
        "/generate",
        ('{"prompt":[1],"logit_bias":{' + ",".join(f'"a{i}":1' for i in range(290_000)) + "}}").encode(),
    ),
    "nested": ("/logits", b'{"prompt":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}"),
    "strings": ("/forward", repeated('{"prompt":[1],"stages":[', '"*a*a*"', "]}")),
    "floats": ("/generate", repeated('{"prompt":[', "1.2345678901234567e-300", "]}")),
    "digits": ("/generate", repeated('{"prompt":[', "9" * 4000, "]}")),
    "escapes": ("/tokenize", b'{"text":"' + b"\\u0001" * 600_000 + b'"}'),
}


async def bad_bodies(service: Service) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for name, (path, body) in BAD_BODIES.items():
        answers = await asyncio.gather(*(service.ask(path, body) for _ in range(50)))
        outcomes.update(f"{name} {status}" for status, _ in answers)
        assert all(len(content) < 10_000 for _, content in answers if name != "escapes")
    return {"answers": dict(outcomes)}


async def long_texts(service: Service) -> dict[str, Any]:
    """Send 200 long prompts, and then measure the time of a short one."""
    text = " ".join(random.Random(1).choices(["the", "cat", "sat", "over", "there", "42", "ünï"], k=200_000))[
        : MIB - 99
    ]
    body = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
    crowd = [asyncio.create_task(service.ask("/generate", body)) for _ in range(200)]
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    status, _ = await service.ask("/generate", b'{"prompt":"hi","max_tokens":1}')
    short_seconds = time.perf_counter() - began
    answers = Counter(status for status, _ in await asyncio.gather(*crowd))
    return {"short_prompt_seconds": round(short_seconds, 3), "short_status": status, "answers": dict(answers)}


async def long_tokenize(service: Service) -> dict[str, Any]:
    chance = random.Random(2)
    text = "".join(chr(chance.randrange(0x20, 0x2FF)) for _ in range(2_000_000)).encode()[: BODY_BYTES - 50]
    body = json.dumps({"text": text.decode("utf-8", "ignore").replace('"', "'")}, ensure_ascii=False).encode()
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(service.ask("/tokenize", b'{"text":"' + b"word " * 800_000 + b'"}') for _ in range(4))
    )
    answers += await asyncio.gather(*(service.ask("/tokenize", body) for _ in range(4)))
    sizes = [round(len(content) / MIB) for _, content in answers]
    return {"seconds": round(time.perf_counter() - began, 1), "answers": [s for s, _ in answers], "response_mb": sizes}


async def unread_responses(service: Service) -> dict[str, Any]:
    body = json.dumps(
        {"prompt": [5] * 350, "detail": "values", "top_k": 0, "stages": ["*.pattern", "*.scores"]}
    ).encode()
    head = f"POST /forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connections = []
    for _ in range(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1)
        writer.write(f"{head}\r\n\r\n".encode() + body)
        connections.append((reader, writer))
    peak, began = 0.0, time.monotonic()
    while time.monotonic() < began + 40:
        held = await service.metric("buffered_bytes")
        peak = max(peak, held)
        await asyncio.sleep(0.5)
    after = memory(service.process.pid)
    heads = await asyncio.gather(*(reader.read(12) for reader, _ in connections), return_exceptions=True)
    statuses = Counter(head[9:].decode() if isinstance(head, bytes) else type(head).__name__ for head in heads)
    for _, writer in connections:
        writer.transport.abort()
    return {
        "buffered_mb_most": round(peak / MIB),
        "buffered_mb_after_deadline": round(held / MIB),
        "memory_mb_after_deadline": round(after),
        "answers": dict(statuses),
    }


async def bodies_without_key(service: Service) -> dict[str, Any]:
    """Send PUT requests without an API key, whose bodies lack the last byte."""
    head = f"PUT /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()

    async def attack() -> str:
        reader, writer = await service.connect()
        try:
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    writer.write(head + b"a" * (BODY_BYTES - 1))
                    await writer.drain()
                return (await reader.read(12))[9:].decode() or "closed"
        except (TimeoutError, ConnectionError) as error:
            return type(error).__name__
        finally:
            writer.transport.abort()

    return {"answers": dict(Counter(await asyncio.gather(*(attack() for _ in range(300)))))}


async def silent_connections(service: Service, count: int = 2000) -> dict[str, Any]:
    connections = []
    refused = 0
    for _ in range(count):
        try:
            connections.append(await asyncio.open_connection("127.0.0.1", service.port))
        except OSError:
            refused += 1
    open_at_once = await service.metric("http_connections")
    began = time.monotonic()
    ends = await asyncio.gather(*(reader.read() for reader, _ in connections), return_exceptions=True)
    for _, writer in connections:
        writer.transport.abort()
    return {
        "connected": len(connections),
        "refused": refused,
        "open_at_once": open_at_once,
        "all_closed_after_seconds": round(time.monotonic() - began, 1),
        "errors": dict(Counter(type(end).__name__ for end in ends if isinstance(end, BaseException))),
    }


async def one_byte_chunks(service: Service) -> dict[str, Any]:
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt":"' + b"a" * 1_000_000)

    async def attack() -> str:
        reader, writer = await service.connect()
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(head + chunks)
                await writer.drain()
            return (await reader.read(12))[9:].decode() or "closed"
        except ConnectionError:
            return "reset"
        finally:
            writer.transport.abort()

    return {"answers": dict(Counter(await asyncio.gather(*(attack() for _ in range(20)))))}


async def many_clients(service: Service, count: int = 2000) -> dict[str, Any]:
    """Three rounds of many clients; a third of them disconnects before the end."""
    rounds = []
    for seed in range(3):
        chance = random.Random(seed)

        async def client(index: int, chance: random.Random = chance) -> str:
            stream = chance.random() < 0.5
            body = {"prompt": [index % 4000 + 1, 7], "max_tokens": 16, "ignore_eos": True, "stream": stream}
            await asyncio.sleep(chance.random())
            if index % 3:
                status, content = await service.ask("/generate", json.dumps(body).encode())
                whole = content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else content.endswith(b"}")
                return f"{status}" if whole or status == 429 else f"{status} cut"
            with contextlib.suppress(TimeoutError):
                await service.ask("/generate", json.dumps(body).encode(), seconds=chance.random())
            return "left"

        outcomes = Counter(await asyncio.gather(*(client(index) for index in range(count))))
        await asyncio.sleep(2)
        gauges = {name: await service.metric(name) for name in ("num_requests_running", "num_requests_waiting")}
        gauges |= {name: await service.metric(name) for name in ("kv_cache_usage_perc", "buffered_bytes")}
        rounds.append({"outcomes": dict(outcomes), "gauges": gauges})
    return {"rounds": rounds}


Attack = Callable[[Service], Coroutine[Any, Any, dict[str, Any]]]
# Each attack, with the options of the service and its limit of open files.
ATTACKS: dict[str, tuple[Attack, tuple[str, ...], int | None]] = {
    "bad bodies": (bad_bodies, (), None),
    "long texts": (long_texts, ("--request-timeout-seconds", "5"), None),
    "long tokenize": (long_tokenize, (), None),
    "unread responses": (unread_responses, (), None),
    "bodies without key": (bodies_without_key, ("--api-key", "secret"), None),
    "silent connections": (silent_connections, (), None),
    "few files": (lambda service: silent_connections(service, 300), (), 256),
    "one-byte chunks": (one_byte_chunks, (), None),
    "many clients": (many_clients, (), None),
}


def run_attack(service: Service, attack: Attack) -> dict[str, Any]:
    """Attack the service, and check afterwards that it still generates."""
    short = b'{"prompt":[1,2],"max_tokens":8}'
    asyncio.run(service.ask("/generate", short))
    result: dict[str, Any] = {}
    with watching(service, result):
        result |= asyncio.run(attack(service))
    result["afterwards"], _ = asyncio.run(service.ask("/generate", short))
    return result


async def send(service: Client, request: HostileRequest, headers: str) -> list[int | str]:
    """The statuses of the answers. An unread answer counts as "unread"."""

    async def leave_unread() -> tuple[str, asyncio.StreamWriter | None]:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1)
            writer.write(f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return "unread", writer
        except OSError as error:
            return type(error).__name__, None

    if request.is_unread:
        found = [await leave_unread() for _ in range(request.count)]
        await asyncio.sleep(5)
        for _, writer in found:
            if writer is not None:
                writer.transport.abort()
        return [status for status, _ in found]
    ask = partial(service.ask, request.path, request.body, method=request.method, headers=headers)
    answers = await asyncio.gather(*(ask(content_type=request.content_type) for _ in range(request.count)))
    return [status for status, _ in answers]


async def attack_with(
    service: Client, requests: Sequence[HostileRequest], headers: str, seconds: float
) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for request in requests:
                statuses = await send(service, request, headers)
                answers.update(f"{request.path} {status}" for status in statuses)
    return {"answers": dict(answers)}


async def gauges(service: Service) -> float:
    """The requests that run and wait, and the bytes that are held, a while after the attack."""
    names = ("num_requests_running", "num_requests_waiting", "buffered_bytes", "kv_cache_usage_perc")
    return sum([await service.metric(name) for name in names])


def run_row(row: Row, model: str) -> dict[str, Any]:
    """Attack a service with the requests of a row, beside a neighbour, and compare what it sees with the targets."""
    with tempfile.TemporaryDirectory() as name:
        requests = row.make(Path(name))
        options = [name if option == "DIRECTORY" else option for option in row.options]
        key = options[options.index("--api-key") + 1] if "--api-key" in options else None
        headers = f"Authorization: Bearer {key}\r\n" if key else ""
        grace = ("--shutdown-grace-seconds", str(GRACE_SECONDS))
        result: dict[str, Any] = {}
        with serving(model, *options, *grace) as service:
            asyncio.run(service.ask("/generate", NEIGHBOUR, headers=headers))
            before = memory(service.process.pid)
            with watching(service, result, {"Authorization": f"Bearer {key}"} if key else {}):
                time.sleep(2)
                result |= asyncio.run(attack_with(service, requests, headers, row.seconds))
                time.sleep(1)
            time.sleep(30)
            result["memory_mb_after_30_seconds"] = round(memory(service.process.pid) - before)
            result["gauges"] = asyncio.run(gauges(service))
            background = threading.Thread(
                target=lambda: asyncio.run(attack_with(service, requests, headers, row.seconds)), daemon=True
            )
            background.start()
            time.sleep(1)
            began = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(PATIENCE_SECONDS)
            result["sigterm_seconds"] = round(time.monotonic() - began, 1)
    targets = TARGETS | {"memory_mb": row.max_memory_mb}
    result["missed"] = {name: result[name] for name, most in targets.items() if (result[name] or 0) > most}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*ATTACKS, *ROWS], default=[*ATTACKS, *ROWS], help="attacks to run"
    )
    parser.add_argument("--model", default="bundled", help="checkpoint of the service")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only:
        if name in ROWS:
            results[name] = run_row(ROWS[name], arguments.model)
            sys.stdout.write(f"{name}: {results[name]}\n")
            sys.stdout.flush()
            continue
        attack, options, max_files = ATTACKS[name]
        with serving(arguments.model, *options, max_files=max_files) as service:
            results[name] = run_attack(service, attack)
        sys.stdout.write(f"{name}: {results[name]}\n")
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
