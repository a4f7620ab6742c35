"""Run a mixed load for a long time, to see whether the memory of the service grows and whether requests are lost.

    python -m tests.benchmarks.mixed_load [--seconds 3600] [--model DIRECTORY] [--seed 0]

The load consists of generations, traced generations, passes, texts, invalid bodies, clients that do not read their
responses, and clients that disconnect. Every 10 seconds a line shows the resident memory (MB), and the number of
requests for each outcome. No result is a failure. The last line is JSON: the highest memory in the first sixth of the
time and in the rest, and the growth between them.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.benchmarks.hostile import Service, memory, serving

NUM_CLIENTS = 24
TRACE = {"stages": ["*.resid_post", "*.pattern"], "detail": "values", "encoding": "base64", "logit_lens": True}
KINDS = ("whole", "streamed", "traced", "forward", "logits", "tokenize", "invalid", "stops", "several")
INVALID = [
    b"{",
    b'{"prompt":[1],"top_k":1' + b"0" * 300 + b"}",
    b'{"prompt":[' + b",".join([b"-1"] * 100_000) + b"]}",
    b"{" + b",".join(b'"k%d":1' % i for i in range(50_000)) + b"}",
    b'{"prompt":[1],"stop":[' + b",".join([b"1"] * 400_000) + b"]}",
    b'{"prompt":"' + b"a" * 3_000_000 + b'"}',
]


def request(chance: random.Random) -> tuple[str, str, bytes]:
    """Draw the kind, path and body of one request."""
    prompt = [chance.randrange(1, 4000) for _ in range(chance.choice([3, 10, 60, 200]))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.randrange(1, 48), "ignore_eos": True}
    kind = chance.choice(KINDS)
    if kind == "invalid":
        return kind, "/generate", chance.choice(INVALID)
    if kind == "tokenize":
        text = " ".join(chance.choices(["the", "cat", "sat", "ünï", "42", "\n"], k=chance.choice([5, 500, 50_000])))
        return kind, "/tokenize", json.dumps({"text": text}).encode()
    if kind == "forward":
        stages = chance.choice([["*.resid_post"], ["*.pattern"], ["*"]])
        detail = chance.choice(["summary", "values"])
        return kind, "/forward", json.dumps({"prompt": prompt, "stages": stages, "detail": detail, "top_k": 3}).encode()
    if kind == "logits":
        return kind, "/logits", json.dumps({"prompt": prompt, "top_k": 5, "positions": "all"}).encode()
    if kind == "streamed":
        body |= {"stream": True, "temperature": 0.8, "seed": chance.randrange(1 << 60)}
    elif kind == "traced":
        body |= {"stream": True, "trace": TRACE, "max_tokens": 8}
    elif kind == "stops":
        body |= {"stop": ["".join(chance.choices("abcde ", k=30)) for _ in range(100)], "logprobs": 3, "echo": True}
    elif kind == "several":
        body |= {"n": 4, "stream": chance.random() < 0.5}
    return kind, "/generate", json.dumps(body).encode()


async def client(service: Service, chance: random.Random, end: float, outcomes: Counter[str]) -> None:
    while time.monotonic() < end:
        kind, path, body = request(chance)
        behaviour = chance.choices(["reads", "leaves", "reads nothing"], [20, 3, 1])[0]
        if behaviour == "reads":
            status, content = await service.ask(path, body)
            is_whole = b"event: error" not in content and (b'"stream": true' not in body or b"data: [DONE]" in content)
            outcomes[f"{kind} {status}" + ("" if is_whole or status != 200 else " cut")] += 1
        elif behaviour == "leaves":
            await service.ask(path, body, seconds=chance.random())
            outcomes["left"] += 1
        else:
            outcomes["read nothing"] += 1
            await unread(service, path, body, chance.uniform(0, 40))


async def unread(service: Service, path: str, body: bytes, seconds: float) -> None:
    """Send a request, read nothing for a while, and then close the connection."""
    with contextlib.suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await writer.drain()
                await asyncio.sleep(seconds)
        writer.transport.abort()


async def load(service: Service, seconds: float, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    tasks = [
        asyncio.create_task(client(service, random.Random(seed * 1000 + index), began + seconds, outcomes))
        for index in range(NUM_CLIENTS)
    ]
    samples: list[tuple[float, float]] = []
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=10)
        samples.append((time.monotonic() - began, memory(service.process.pid)))
        sys.stdout.write(f"{samples[-1][0]:6.0f} s {samples[-1][1]:6.0f} MB {dict(sorted(outcomes.items()))}\n")
        sys.stdout.flush()
    await asyncio.gather(*tasks)
    await asyncio.sleep(3)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "buffered_bytes")
    early = [size for at, size in samples if at <= seconds / 6]
    late = [size for at, size in samples if at > seconds / 6]
    return {
        "outcomes": dict(outcomes),
        "memory_mb_early_most": round(max(early)),
        "memory_mb_late_most": round(max(late)),
        "growth": round(max(late) / max(early) - 1, 4),
        "gauges": {name: await service.metric(name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="duration of the load")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--model", default="bundled", help="checkpoint of the service")
    arguments = parser.parse_args()
    with serving(arguments.model) as service:
        result = asyncio.run(load(service, arguments.seconds, arguments.seed))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
