"""Compare how the cost of requests grows with the length of their prompts, for our engine and its peers.

    python -m tests.benchmarks.growth --model FILE.gguf|DIRECTORY [--lengths 128 512 2000] [--streams 1] [--tokens 32]
        [--only NAME...] [--rounds 3]

The median time to the first token, and the time between two tokens of a stream, in milliseconds, over HTTP, without
drafts or prompt caches. Of several streams, only the time in which all of them generate counts, so they need enough
`--tokens`; our engine then computes whole prompts (`--max-step-stretch`) instead of holding them up beside streams.
Every round starts one server after the other and sends all lengths to it. The other options are those of
`tests.benchmarks.peers`, whose docstring describes them.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.client import Timed
from tests.benchmarks.machine_limits import cpu_model
from tests.benchmarks.peer_bench import Bench
from tests.benchmarks.peer_catalog import PEERS, MissingError
from tests.benchmarks.peer_report import write_table
from tests.benchmarks.peers import add_arguments, installed, prepare
from tests.benchmarks.serve import end_as_a_whole

LENGTHS = (128, 512, 1024, 2000, 4000, 7000)
DEFAULT = ("ours-bfloat16", "ours-int8", "openvino-bfloat16", "llama.cpp-bf16")
Measured = dict[int, tuple[float, float]]  # for each length, both times in milliseconds


def seconds_between_tokens(timed: list[Timed]) -> float:
    """Of one stream, the median; of several, the mean over the time in which all of them generate.

    Some servers send the tokens of several streams in bursts, so a median would be that within a burst.
    """
    if len(timed) == 1:
        return statistics.median(timed[0].gaps)
    begin, end = max(each.tokens[0] for each in timed), min(each.tokens[-1] for each in timed)
    if begin >= end:
        raise MissingError("one stream ended before another one began: raise --tokens")
    return (end - begin) * len(timed) / sum(begin < token <= end for each in timed for token in each.tokens)


def measure(bench: Bench, name: str, arguments: argparse.Namespace) -> Measured:
    """Measure one peer in one round."""
    peer, found = PEERS[name], {}
    if peer.kind == "ours" and arguments.streams > 1:
        peer = replace(peer, options=(*peer.options, "--max-step-stretch", "100"))
    bench.export(peer)
    with bench.serving(peer) as (port, _):
        bench.drive(peer, port, [bench.prompts.body(128, 4)])
        for length in arguments.lengths:
            bodies = [bench.prompts.body(length, arguments.tokens) for _ in range(arguments.streams)]
            timed = bench.drive(peer, port, bodies)
            first = statistics.median(each.first for each in timed)
            found[length] = (1e3 * first, 1e3 * seconds_between_tokens(timed))
    return found


def run(arguments: argparse.Namespace, work: Path) -> None:
    config = json.loads((work / "checkpoint" / "config.json").read_text())
    longest = config["max_position_embeddings"] - arguments.tokens
    if too_long := [length for length in arguments.lengths if length > longest]:
        raise SystemExit(f"the context of the model has room for prompts of {longest} tokens, not {too_long[0]}")
    slot_tokens = max(arguments.lengths) + arguments.tokens
    bench = Bench(
        installed(arguments), work, threads=arguments.threads, slots=arguments.streams, slot_tokens=slot_tokens
    )
    rounds: dict[str, list[Measured]] = {name: [] for name in arguments.only}
    missing: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for name in [name for name in arguments.only if name not in missing]:
            try:
                rounds[name].append(measure(bench, name, arguments))
                sys.stderr.write(f"{name}: {rounds[name][-1]}\n")
            except (MissingError, OSError) as error:
                missing[name] = f"{error}"
    rows = [["milliseconds", *map(str, arguments.lengths)]]
    for name, measured in rounds.items():
        for index, what in enumerate(("first token", "between tokens")):
            columns = [[one[length][index] for one in measured] for length in arguments.lengths] if measured else []
            cells = [f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" for values in columns]
            rows += [[f"{name} {what}", *cells]] if cells else []
    write_table(rows)
    for name, reason in missing.items():
        sys.stdout.write(f"{name}: missing: {reason}\n")
    given = {name: getattr(arguments, name) for name in ("threads", "streams", "tokens")}
    result = {"benchmark": "growth", "model": str(arguments.model), "cpu": cpu_model(), **given}
    sys.stdout.write(json.dumps({**result, "rounds": rounds, "missing": missing}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of the prompts")
    parser.add_argument("--streams", type=int, default=1, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each request generates")
    parser.set_defaults(only=list(DEFAULT))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        prepare(arguments.model, work)
        run(arguments, work)


if __name__ == "__main__":
    main()
