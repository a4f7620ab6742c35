"""Compare our engine with its peers, with the same random weights of the 123.6M Llama shape, threads and prompts.

    python -m tests.benchmarks.peers [--only NAME...] [--scenarios S1 S3] [--rounds 3] [--threads 2] [--skip-prefill]
        [--work DIRECTORY] [--peers-python PYTHON] [--llama-cpp DIRECTORY]

Every round starts one server after the other, sends it requests over HTTP, and stops it. Decoding is greedy and
continues after an end of sequence. Every prompt is different and prompt caches are off, so that the same work is
compared. Prompts alone (prefill) are measured in process. A missing peer is reported. Our engine uses drafts only if
the name ends in `-drafts`: texts of random weights repeat themselves, so drafts are right far more often than in real
text. `agrees` counts the greedy tokens, of 16, before the first one that differs from our float32 network.

Percentages are speeds relative to the highest speed that the machine allows. Its limits are measured in the same run.
A decoding step must read the weights once at the bandwidth of the memory, and multiply for all sequences at the rate of
the dtype; whichever takes longer is the limit. Prompts are limited by multiplication. For int8 and int4 weights, the
rate of int8 is used. Keys and values are not counted, so long contexts have lower percentages.

Peers are optional. transformers comes with the extra `dev`. The others are best installed in an environment of their
own, because optimum-intel needs an older transformers (and the torchvision that was built with the same torch):

    python -m venv peers && peers/bin/pip install '.[peers]' cmake ninja    # --peers-python peers/bin/python
    export PATH=$PWD/peers/bin:$PATH
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build build --target llama-server llama-bench llama-quantize    # --llama-cpp build/bin

On a CPU with AMX, llama.cpp built with GCC 12 fails with an illegal instruction: set CC=clang CXX=clang++ for cmake.
llama.cpp and OpenVINO keep their own defaults (such as keys and values of 16 and 8 bits). Engines without a server are
served by peer_servers.py. The bfloat16 of OpenVINO is its precision hint on float32 weights.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import uvloop

from model.checkpoints.load import load_checkpoint
from tests.benchmarks.client import Dialect, Timed, generate, summarize
from tests.benchmarks.peer_formats import write_dummy_tokenizer
from tests.benchmarks.peer_servers import PREFILLS, versions
from tests.benchmarks.serve import ROOT, SHAPE, Prompts, end_as_a_whole, write_random_checkpoint

LLAMA = Dialect("/completion", re.compile(rb'"tokens":\[(\d+)\]'), b'"stop":true')
SCENARIOS = {
    "S1": (1, 16, 128),
    "S2": (8, 16, 128),
    "S3": (8, 512, 64),
    "S4": (32, 64, 64),
}  # streams, tokens in, tokens out
WARM_UP = 4  # tokens that each stream generates before a scenario is measured
START_SECONDS = 300
NUM_AGREE = 16
BLOCKS = 12 * (4 * 768**2 + 3 * 768 * 2048)  # parameters that are multiplied with every token
HEAD = 50257 * 768  # parameters of the head, which are only used to predict a next token


class MissingError(Exception):
    """The peer is not installed, or does not work as it should. The message says why."""


@dataclass(frozen=True)
class Peer:
    """An engine in one precision.

    `variant` is the precision as the engine names it. `weight_bits` is the size of a weight on disk. `rate` is the
    dtype in which the engine multiplies.
    """

    kind: str
    variant: str
    weight_bits: float
    rate: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.variant}"

    @property
    def format(self) -> str:
        """The name of the file or directory that the engine reads, in the working directory."""
        if self.kind == "llama.cpp":
            return f"{self.variant}.gguf"
        if self.kind == "openvino":
            return "openvino-int8" if self.variant == "int8" else "openvino"
        return "ctranslate2" if self.kind == "ctranslate2" else "checkpoint"


OURS = [
    Peer("ours", "float32", 32, "float32", ("--dtype", "float32")),
    Peer("ours", "bfloat16", 16, "bfloat16", ("--dtype", "bfloat16")),
    Peer("ours", "int8", 8, "int8", ("--dtype", "bfloat16", "--quantize", "int8")),
    Peer("ours", "int4", 4, "int8", ("--dtype", "bfloat16", "--quantize", "int4")),
]
PEERS = {
    peer.name: peer
    for peer in (
        *(replace(peer, options=(*peer.options, "--no-speculate")) for peer in OURS),
        *(replace(peer, variant=f"{peer.variant}-drafts") for peer in OURS),
        Peer("llama.cpp", "f32", 32, "float32"),
        Peer("llama.cpp", "bf16", 16, "bfloat16"),
        Peer("llama.cpp", "q8_0", 8.5, "int8"),
        Peer("llama.cpp", "q4_0", 5.2, "int8"),  # 4.5 bits, but 6.6 for the embeddings
        Peer("openvino", "float32", 32, "float32"),
        Peer("openvino", "bfloat16", 16, "bfloat16"),
        Peer("openvino", "int8", 8, "int8"),
        Peer("ctranslate2", "float32", 32, "float32"),
        Peer("ctranslate2", "int8", 8, "int8"),
        Peer("transformers", "float32", 32, "float32"),
        Peer("transformers", "bfloat16", 16, "bfloat16"),
        Peer("transformers", "float32-compiled", 32, "float32"),
        Peer("transformers", "bfloat16-compiled", 16, "bfloat16"),
    )
}


class Bench:
    """Finds the peers, converts the checkpoint for them, and measures each of them in one round."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self._threads = arguments.threads
        python = shutil.which(arguments.peers_python) or arguments.peers_python
        self._python = os.path.abspath(python)  # not resolved: the path of the link determines the environment
        self._llama_cpp = None if arguments.llama_cpp is None else str(arguments.llama_cpp.absolute())
        self._scenarios = arguments.scenarios
        self._work = work
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self._threads)}
        self._prompts = Prompts(SHAPE["vocab_size"])
        self._check = {
            **self._prompts.body(16, NUM_AGREE),
            "prompt": list(range(100, 116)),
        }  # does not repeat one token forever
        checkpoint = work / "checkpoint"
        if not checkpoint.exists():
            checkpoint.mkdir()
            write_random_checkpoint(checkpoint)
            write_dummy_tokenizer(checkpoint)
        self._expected = greedy_tokens(checkpoint, self._check["prompt"])

    def run(self, peer: Peer, *, with_prefill: bool) -> dict[str, Any]:
        """Measure a peer in one round. Raises `MissingError` if that is not possible."""
        self._export(peer)
        found: dict[str, Any] = {}
        if with_prefill:
            found |= self._llama_bench(peer) if peer.kind == "llama.cpp" else self._measure(peer)
        with self._serving(peer) as (port, seconds):
            found["ready_seconds"] = seconds
            found["agrees"] = self._count_agreeing(peer, port)
            for name in self._scenarios:
                uvloop.run(self._drive(peer, port, *SCENARIOS[name][:2], WARM_UP))
                timed = uvloop.run(self._drive(peer, port, *SCENARIOS[name]))
                found[name] = {what: summarize(timed)[what] for what in ("tokens_per_second", "ttft_p50_ms")}
        return found

    async def _drive(self, peer: Peer, port: int, count: int, num_in: int, num_out: int) -> list[Timed]:
        bodies = [self._prompts.body(num_in, num_out) for _ in range(count)]
        timed = await asyncio.gather(*(self._generate(peer, port, body) for body in bodies))
        for one in timed:
            if one.error is not None or len(one.tokens) != num_out:
                raise MissingError(one.error or f"{len(one.tokens)} tokens instead of {num_out}")
        return timed

    async def _generate(self, peer: Peer, port: int, body: dict[str, Any]) -> Timed:
        if peer.kind != "llama.cpp":
            return await generate(port, body)
        own = {"n_predict": body["max_tokens"], "cache_prompt": False, "return_tokens": True}
        greedy = {
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
        }  # only these, instead of the default samplers
        return await generate(port, {"prompt": body["prompt"], **own, **greedy}, dialect=LLAMA)

    def _count_agreeing(self, peer: Peer, port: int) -> int:
        ids = uvloop.run(self._generate(peer, port, self._check)).ids
        return next((n for n in range(NUM_AGREE) if ids[n : n + 1] != self._expected[n : n + 1]), NUM_AGREE)

    @contextmanager
    def _serving(self, peer: Peer) -> Iterator[tuple[int, float]]:
        """Start the server of a peer; yield its port, and the seconds from the start until it was ready."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}/{'health' if peer.kind == 'llama.cpp' else 'ready'}"
        start = time.perf_counter()
        with tempfile.TemporaryFile() as log, self._started(self._server(peer, port), log) as process:
            try:
                while not answers(url):
                    if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                        raise MissingError(last_line(log))
                    time.sleep(0.02)
                yield port, time.perf_counter() - start
            finally:
                process.terminate()

    def _server(self, peer: Peer, port: int) -> list[str]:
        model = str(self._work / peer.format)
        if peer.kind == "ours":
            return self._own(peer, "-m", "service", "--model", model, "--port", str(port), *peer.options)
        if peer.kind != "llama.cpp":
            return self._own(peer, *self._peer_server("serve", peer), "--port", str(port))
        slots = max(SCENARIOS[name][0] for name in self._scenarios)
        context = slots * max(num_in + num_out for _, num_in, num_out in SCENARIOS.values())
        size = ["-np", str(slots), "-c", str(context), "-t", str(self._threads), "-tb", str(self._threads)]
        no_cache = ["--no-cache-prompt", "--cache-ram", "0", "-sps", "0"]
        return [self._binary("llama-server"), "-m", model, "--port", str(port), *size, *no_cache]

    def _peer_server(self, command: str, peer: Peer) -> list[str]:
        model = str(self._work / peer.format)
        return ["-m", "tests.benchmarks.peer_servers", command, peer.kind, model, "--variant", peer.variant]

    def _own(self, peer: Peer, *arguments: str) -> list[str]:
        """A command line for the interpreter that has the peer."""
        python = sys.executable if peer.kind in ("ours", "transformers") else self._python
        return [python, *arguments, "--threads", str(self._threads)]

    def _measure(self, peer: Peer) -> dict[str, Any]:
        return dict(json.loads(self._output(self._own(peer, *self._peer_server("measure", peer), *peer.options))))

    def _llama_bench(self, peer: Peer) -> dict[str, Any]:
        lengths = ",".join(map(str, PREFILLS))
        command = ["-m", str(self._work / peer.format), "-p", lengths, "-n", "0", "-r", "2", "-t", str(self._threads)]
        found = json.loads(self._output([self._binary("llama-bench"), *command, "-o", "json"], whole=True))
        return {"prefill": {str(run["n_prompt"]): max(run["samples_ts"]) for run in found}}

    def _export(self, peer: Peer) -> None:
        """Convert the checkpoint to the format of the peer, unless an earlier run did."""
        out = self._work / peer.format
        if out.exists():
            return
        partial = out.with_name(f"partial-{out.name}")
        if peer.kind == "llama.cpp" and peer.variant != "f32":
            self._export(PEERS["llama.cpp-f32"])
            command = [self._binary("llama-quantize"), str(self._work / "f32.gguf"), str(partial), peer.variant]
        else:
            kind = "gguf" if peer.kind == "llama.cpp" else peer.format
            paths = [str(self._work / "checkpoint"), str(partial)]
            command = [self._python, "-m", "tests.benchmarks.peer_formats", kind, *paths]
        self._output(command)
        partial.rename(out)

    def versions(self) -> dict[str, Any]:
        """The versions of the packages of this interpreter, of those of the peers, and of llama.cpp."""

        def of(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except MissingError as error:
                return f"missing: {error}"

        command = [self._python, "-m", "tests.benchmarks.peer_servers", "versions"]
        own, peers = versions(), of(lambda: json.loads(self._output(command)))
        return {"own": own, "peers": peers, "llama.cpp": of(self._llama_version)}

    def _llama_version(self) -> str:
        with self._started([self._binary("llama-server"), "--version"], subprocess.PIPE) as process:
            return process.communicate()[1].decode().split("\n")[0].removeprefix("version: ")

    def _binary(self, name: str) -> str:
        found = shutil.which(name, path=self._llama_cpp)
        if found is None:
            raise MissingError(f"no {name} in {self._llama_cpp or 'PATH'}")
        return found

    def _started(self, command: list[str], log: Any, out: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(command, stdout=out, stderr=log, cwd=ROOT, env=self._environment)
        except OSError as error:
            raise MissingError(str(error)) from error

    def _output(self, command: list[str], *, whole: bool = False) -> str:
        """The last line of the output of a command, or with `whole` all of it."""
        with tempfile.TemporaryFile() as log, self._started(command, log, subprocess.PIPE) as process:
            out = process.communicate()[0].decode()
            if process.returncode:
                raise MissingError(last_line(log))
        return out if whole else (out.splitlines() or [""])[-1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def last_line(log: Any) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it ended without a message"


@torch.inference_mode()
def greedy_tokens(checkpoint: Path, prompt: list[int]) -> list[int]:
    """The tokens that our network chooses in float32, with the kernels of PyTorch."""
    network = load_checkpoint(str(checkpoint), dtype="float32").model
    ids = list(prompt)
    for _ in range(NUM_AGREE):
        ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def measure_machine() -> dict[str, float]:
    """Measure the bandwidth of memory (bytes per second), and for each dtype the operations per second of square
    matrices."""

    def best(work: Callable[[], Any], times: int = 10) -> float:
        work()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    large = torch.ones(1 << 28)  # 1 GiB
    found = {"bandwidth": large.nbytes / best(large.sum)}
    size = 2048
    square = torch.randn(size, size)
    dense = square.to_mkldnn()  # uses oneDNN, which is up to twice as fast as the library behind `@`
    half, ints = square.bfloat16(), torch.randint(-128, 127, (size, size), dtype=torch.int8)
    found["float32"] = 2 * size**3 / best(lambda: F.linear(dense, dense))
    # A CPU without products of bfloat16 can still convert the numbers to float32.
    found["bfloat16"] = max(found["float32"], 2 * size**3 / best(lambda: half @ half.T))
    found["int8"] = 2 * size**3 / best(lambda: torch._int_mm(ints, ints.T))
    return found


def prompt_seconds(peer: Peer, machine: dict[str, float], num_in: int) -> float:
    """The shortest possible time for one prompt, with its attention, at the limits of the machine."""
    attention = 12 * 2 * 768 * num_in**2  # scores and weighted sums, for the half below the diagonal
    return (2 * (BLOCKS * num_in + HEAD) + attention) / machine[peer.rate]


def scenario_seconds(peer: Peer, machine: dict[str, float], streams: int, num_in: int, num_out: int) -> float:
    """The shortest possible time for a scenario: its prompts, then its steps, limited by memory or multiplication."""
    read = (BLOCKS + HEAD) * peer.weight_bits / 8 / machine["bandwidth"]
    step = max(read, streams * 2 * (BLOCKS + HEAD) / machine[peer.rate])
    return max(streams * prompt_seconds(peer, machine, num_in), read) + (num_out - 1) * step


def summary(rounds: list[dict[str, Any]], *path: str) -> dict[str, float] | None:
    """Median, minimum and maximum of one figure over all rounds; None if it was not measured."""
    values: list[Any] = list(rounds)
    for key in path:
        values = [value.get(key) for value in values if value is not None]
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures(peer: Peer, rounds: list[dict[str, Any]], machine: dict[str, float]) -> dict[str, Any]:
    """Summarize the figures of all rounds; speeds also as a share of the limit of the machine."""
    found: dict[str, Any] = {name: summary(rounds, name) for name in ("ready_seconds", "agrees")}
    for name, (streams, num_in, num_out) in SCENARIOS.items():
        if (speed := summary(rounds, name, "tokens_per_second")) is not None:
            limit = streams * num_out / scenario_seconds(peer, machine, streams, num_in, num_out)
            found[name] = {
                **speed,
                "share": speed["median"] / limit,
                "ttft_p50_ms": summary(rounds, name, "ttft_p50_ms"),
            }
    for num_in in PREFILLS:
        if (speed := summary(rounds, "prefill", str(num_in))) is not None:
            limit = num_in / prompt_seconds(peer, machine, num_in)
            found[f"prefill_{num_in}"] = {**speed, "share": speed["median"] / limit}
    return found


def row(name: str, found: dict[str, Any], scenarios: list[str]) -> list[str]:
    def cell(value: dict[str, Any] | None) -> str:
        return f"{value['median']:.0f} ({value['min']:.0f}-{value['max']:.0f}) {value['share']:.0%}" if value else "-"

    ttft = [f"{found['S3']['ttft_p50_ms']['median']:.0f}"] if "S3" in scenarios else []
    speeds = [cell(found.get(key)) for key in (*scenarios, *(f"prefill_{num_in}" for num_in in PREFILLS))]
    start = [f"{found['ready_seconds']['median']:.1f}", f"{found['agrees']['min']:.0f} of {NUM_AGREE}"]
    return [name, *start, *speeds, *ttft]


def write_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(PEERS)
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME", help=names)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each engine")
    parser.add_argument("--skip-prefill", action="store_true", help="do not measure prompts alone")
    parser.add_argument("--work", type=Path, help="directory that keeps the converted checkpoints for the next run")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has the packages of the peers")
    parser.add_argument("--llama-cpp", type=Path, help="directory of the binaries of llama.cpp; default: PATH")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        run(arguments, Bench(arguments, work))


def run(arguments: argparse.Namespace, bench: Bench) -> None:
    machines: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    missing: dict[str, str] = {}
    for _ in range(arguments.rounds):
        machines.append(measure_machine())
        for name in arguments.only:
            if name in missing:
                continue
            try:
                rounds[name].append(bench.run(PEERS[name], with_prefill=not arguments.skip_prefill))
                sys.stderr.write(f"{name}: {rounds[name][-1]}\n")
            except (MissingError, OSError, asyncio.IncompleteReadError) as error:
                missing[name] = f"{error}"
                sys.stderr.write(f"{name}: missing: {error}\n")
    machine = {what: max(one[what] for one in machines) for what in machines[0]}
    peers = {name: figures(PEERS[name], rounds[name], machine) for name in arguments.only if rounds[name]}
    speeds = [*arguments.scenarios, *(f"prefill {num_in}" for num_in in PREFILLS)]
    times = ["S3 TTFT ms"] if "S3" in arguments.scenarios else []
    rows = [["tokens/s", "start s", "agrees", *speeds, *times]]
    write_table(rows + [row(name, found, arguments.scenarios) for name, found in peers.items()])
    for name, reason in missing.items():
        sys.stdout.write(f"{name}: missing: {reason}\n")
    result = {
        "benchmark": "peers",
        "cpu": cpu_model(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "versions": bench.versions(),
        "machine": machine,
        "peers": peers,
        "missing": missing,
    }
    limits = ", ".join(f"{what} {value / 1e9:.0f}" for what, value in machine.items())
    sys.stdout.write(f"limits of the machine, 1e9 bytes or operations per second: {limits}\n")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
