"""Compare our engine with its peers, with the same weights, threads and prompts: their speed and their perplexity.

    python -m tests.benchmarks.peers [--model FILE.gguf|DIRECTORY] [--text FILE...] [--second-model FILE.gguf]
        [--only NAME...] [--scenarios S1 S3] [--rounds 3] [--threads 2] [--skip-prefill] [--work DIRECTORY]
        [--peers-python PYTHON] [--vllm-python PYTHON] [--llama-cpp DIRECTORY] [--ik-llama-cpp DIRECTORY]

Without `--model`, the weights are random, with the 123.6M Llama shape of articles/001. A model must be of the Llama
family. Of a GGUF file, everyone gets the dequantized weights, and quantizes these again; only `ours-source` and
`llama.cpp-source` run the file as it is. `ours-q8_0`, `ours-q4_0` and `ours-q4_k_m` run the files that llama.cpp has
quantized. A directory gives llama.cpp no tokenizer, so its perplexity needs a GGUF file.

The servers of all peers run until the end (they need memory for all of them), but only one has work at a time. In every
round, each scenario is measured with one peer after the other, so that what disturbs the machine for a minute disturbs
all of them. Requests come over HTTP. Decoding is greedy and continues after an end of sequence. Every prompt is
different and prompt caches are off, so that the same work is compared. Prompts alone (prefill) are measured in process.
A missing peer is reported. Our engine uses drafts only if the name ends in `-drafts`: texts of random weights repeat
themselves, so drafts are right far more often than in real text. With `-target`, its steps with prompts may take 150
milliseconds (`--target-itl-ms`), which is nearer to those of the peers. `agrees` counts the greedy tokens, of 16,
before the first one that differs from our float32 network.

Perplexity is measured of each `--text`, and of the first one also for `--second-model`, which may be the same model
with its weights off the 4-bit grid. It is defined as in llama-perplexity, which measures llama.cpp and ik_llama.cpp:
the text is divided into windows of `--window` tokens, and the second half of each window is scored, each token with all
tokens of its window before it as context. peer_perplexity.py computes the same for the others, in process. The first
`--text-bytes` bytes are used. The percentage is the increase over the same engine with float32 weights, in this run.

Percentages of speeds are relative to the highest speed that the machine allows. Its limits are measured in the same
run. A decoding step must read the weights once at the bandwidth of the memory, and multiply for all sequences at the
rate of the dtype; whichever takes longer is the limit. Prompts are limited by multiplication. For int8 and int4
weights, the rate of int8 is used. Keys and values are not counted, so long contexts have lower percentages.

Peers are optional: tests/benchmarks/README.md says how to install them. llama.cpp and OpenVINO keep their own defaults
(such as keys and values of 16 and 8 bits). ik_llama.cpp reads the files that llama.cpp has quantized. Engines without a
server are served by peer_servers.py. The bfloat16 of OpenVINO is its precision hint on float32 weights.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from model.checkpoints.load import load_checkpoint
from tests.benchmarks.client import summarize
from tests.benchmarks.machine_limits import Shape, cpu_model, measure_machine
from tests.benchmarks.peer_bench import Bench, Installed
from tests.benchmarks.peer_catalog import PEERS, SCENARIOS, MissingError, Peer, reference_of
from tests.benchmarks.peer_formats import write_dummy_tokenizer, write_windows
from tests.benchmarks.peer_report import NUM_AGREE, TIMES, WITH_PROMPTS, figures, row, write_table
from tests.benchmarks.peer_servers import PREFILLS
from tests.benchmarks.serve import end_as_a_whole, write_random_checkpoint

WARM_UP = 4  # tokens that each stream generates before a scenario is measured
CHECK_IDS = list(range(100, 116))  # a prompt after which the random weights do not repeat one token forever
CHECK_TEXT = "The ship left the harbour at dawn, and the captain counted the men on deck. He was"  # for a model


@dataclass(frozen=True)
class Running:
    """The server of a peer, and what was found when it started."""

    peer: Peer
    port: int
    found: dict[str, Any]


@contextmanager
def reported(missing: dict[str, str], name: str) -> Iterator[None]:
    """Go on without a peer that fails, and say why."""
    try:
        yield
    except (MissingError, OSError, asyncio.IncompleteReadError) as error:
        missing[name] = f"{error}"
        sys.stderr.write(f"{name}: missing: {error}\n")


def start(stack: ExitStack, bench: Bench, peer: Peer, prompt: list[int], expected: list[int]) -> Running:
    """Start the server of a peer, which ends with `stack`, and check its tokens. Raises `MissingError`."""
    bench.export(peer)
    port, seconds = stack.enter_context(bench.serving(peer))
    found: dict[str, Any] = {"ready_seconds": seconds}
    ids = bench.drive(peer, port, [{**bench.prompts.body(16, NUM_AGREE), "prompt": prompt}])[0].ids
    if ids:
        found["agrees"] = next((n for n in range(NUM_AGREE) if ids[n : n + 1] != expected[n : n + 1]), NUM_AGREE)
    return Running(peer, port, found)


def measure(bench: Bench, running: Running, scenario: str) -> dict[str, float]:
    """Measure a scenario once. Raises `MissingError` if the server does not answer as it should."""
    count, num_in, num_out = SCENARIOS[scenario]
    bench.drive(running.peer, running.port, [bench.prompts.body(num_in, WARM_UP) for _ in range(count)])
    timed = bench.drive(running.peer, running.port, [bench.prompts.body(num_in, num_out) for _ in range(count)])
    return {what: summarize(timed)[what] for what in ("tokens_per_second", *TIMES)}


def measure_all(
    bench: Bench, servers: dict[str, Running], arguments: argparse.Namespace, missing: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Measure all peers once, one after the other in each scenario. Those that fail become `missing`."""
    found: dict[str, dict[str, Any]] = {name: dict(running.found) for name, running in servers.items()}
    for scenario in [*arguments.scenarios, *(["prefill"] if not arguments.skip_prefill else [])]:
        for name, running in servers.items():
            if name in missing or (scenario == "prefill" and running.peer.kind == "vllm"):
                continue
            with reported(missing, name):
                if scenario == "prefill":
                    found[name][scenario] = bench.prefills(running.peer)
                else:
                    found[name][scenario] = measure(bench, running, scenario)
    return found


def check_prompt(arguments: argparse.Namespace, checkpoint: Path) -> list[int]:
    """The prompt of `agrees`. The servers of llama.cpp skip bytes, so a model continues an English text."""
    tokenizer = checkpoint / "tokenizer.json"
    if arguments.model is None or not tokenizer.exists():
        return CHECK_IDS
    return list(Tokenizer.from_file(str(tokenizer)).encode(CHECK_TEXT).ids)


@torch.inference_mode()
def greedy_tokens(checkpoint: Path, prompt: list[int]) -> list[int]:
    """The tokens that our network chooses in float32, with the kernels of PyTorch."""
    network = load_checkpoint(str(checkpoint), dtype="float32").model
    ids = list(prompt)
    for _ in range(NUM_AGREE):
        ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def prepare(model: Path | None, work: Path) -> None:
    """Write the checkpoint that is converted for all peers, in Hugging Face layout with float32 weights."""
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint"
    if checkpoint.exists():
        return
    partial = work / "partial-checkpoint"
    shutil.rmtree(partial, ignore_errors=True)
    if model is None:
        partial.mkdir()
        write_random_checkpoint(partial)
        write_dummy_tokenizer(partial)
    elif model.is_dir():
        partial.symlink_to(model.resolve())
    else:
        paths = [str(model.resolve()), str(partial)]
        subprocess.run([sys.executable, "-m", "tests.benchmarks.peer_formats", "checkpoint", *paths], check=True)
        (work / "source.gguf").unlink(missing_ok=True)
        (work / "source.gguf").symlink_to(model.resolve())
    partial.rename(checkpoint)


def add_perplexities(
    bench: Bench, arguments: argparse.Namespace, text: Path, name: str, peers: dict[str, Any], missing: dict[str, str]
) -> None:
    """Measure the perplexity of each peer that was measured, and its increase over unquantized weights, as `name`."""
    copy, windows = bench.work / "text.txt", bench.work / "windows.json"
    content = text.read_bytes()[: arguments.text_bytes].decode(errors="ignore")
    copy.write_text(content)
    write_windows(bench.work / "checkpoint", content, arguments.window, windows)
    known: dict[str, float] = {}

    def of(peer: str) -> float:
        if peer not in known:
            bench.export(PEERS[peer])
            known[peer] = bench.perplexity(PEERS[peer], copy, windows, arguments.window)
        return known[peer]

    for peer, found in peers.items():
        own = peer.removesuffix("-drafts").removesuffix("-target").removesuffix("-compiled")
        try:
            increase = of(own) / of(reference_of(PEERS[own])) - 1
        except MissingError as error:
            missing[f"perplexity of {peer}, {name}"] = f"{error}"
            continue
        found.setdefault("perplexity", {})[name] = {"value": of(own), "increase": increase}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `peers` and `growth` share."""
    names = ", ".join(PEERS)
    parser.add_argument("--model", type=Path, help="GGUF file or directory of a Llama family; default: random weights")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME", help=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each engine")
    parser.add_argument("--work", type=Path, help="directory that keeps the converted checkpoints for the next run")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has the packages of the peers")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM's CPU build")
    parser.add_argument("--llama-cpp", type=Path, help="directory of the binaries of llama.cpp; default: PATH")
    parser.add_argument("--ik-llama-cpp", type=Path, help="directory of the binaries of ik_llama.cpp")


def installed(arguments: argparse.Namespace) -> Installed:
    return Installed(arguments.peers_python, arguments.vllm_python, arguments.llama_cpp, arguments.ik_llama_cpp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--skip-prefill", action="store_true", help="do not measure prompts alone")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="measure the perplexity of these texts")
    parser.add_argument("--second-model", type=Path, help="GGUF file whose perplexity is measured, too")
    parser.add_argument("--text-bytes", type=int, default=60_000, help="how many bytes of the text are used")
    parser.add_argument("--window", type=int, default=1024, help="tokens of one window of the text")
    arguments = parser.parse_args()
    if arguments.second_model is not None and not arguments.text:
        parser.error("--second-model is for perplexity, which needs --text")
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        prepare(arguments.model, work)
        run(arguments, work)


def run(arguments: argparse.Namespace, work: Path) -> None:
    slots = max(SCENARIOS[name][0] for name in arguments.scenarios)
    slot_tokens = max(num_in + num_out for _, num_in, num_out in SCENARIOS.values())
    open_bench = partial(Bench, installed(arguments), threads=arguments.threads, slots=slots, slot_tokens=slot_tokens)
    bench = open_bench(work)
    shape = Shape.read(work / "checkpoint")
    prompt = check_prompt(arguments, work / "checkpoint")
    expected = greedy_tokens(work / "checkpoint", prompt)
    machines: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        servers: dict[str, Running] = {}
        for name in arguments.only:
            with reported(missing, name):
                servers[name] = start(stack, bench, PEERS[name], prompt, expected)
        for _ in range(arguments.rounds):
            machines.append(measure_machine())
            one = measure_all(bench, servers, arguments, missing)
            for name, found in one.items():
                rounds[name].append(found)
            sys.stderr.write(f"{one}\n")
    machine = {what: max(one[what] for one in machines) for what in machines[0]}
    peers = {name: figures(PEERS[name], shape, rounds[name], machine) for name in arguments.only if rounds[name]}
    for text in arguments.text:
        add_perplexities(bench, arguments, text, text.stem, peers, missing)
    if arguments.second_model is not None:
        prepare(arguments.second_model, work / "second")
        add_perplexities(open_bench(work / "second"), arguments, arguments.text[0], "second model", peers, missing)
    report(arguments, bench, machine, peers, missing)


def report(
    arguments: argparse.Namespace,
    bench: Bench,
    machine: dict[str, float],
    peers: dict[str, Any],
    missing: dict[str, str],
) -> None:
    speeds = [*arguments.scenarios, *(f"prefill {num_in}" for num_in in PREFILLS)]
    times = [f"{each} {name} ms" for each in WITH_PROMPTS if each in arguments.scenarios for name in TIMES.values()]
    texts = [text.stem for text in arguments.text] + ["second model"] * (arguments.second_model is not None)
    rows = [["tokens/s", "start s", "agrees", *speeds, *times, *texts]]
    write_table(rows + [row(name, found, arguments.scenarios, texts) for name, found in peers.items()])
    for name, reason in missing.items():
        sys.stdout.write(f"{name}: missing: {reason}\n")
    result = {
        "benchmark": "peers",
        "model": str(arguments.model or "random 123.6M"),
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
