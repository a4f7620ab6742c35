"""Compare how the cost of one request grows with the length of its prompt, for our engine and its peers.

    python -m tests.benchmarks.growth --model FILE.gguf|DIRECTORY [--lengths 128 512 2000] [--only NAME...] [--rounds 3]

The time to the first token, and the median time between two tokens of the `NUM_OUT` after it, in milliseconds, over
HTTP, without drafts or prompt caches. Every round starts one server after the other and sends all lengths to it. The
other options are those of `tests.benchmarks.peers`, whose docstring describes them.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks.machine_limits import cpu_model
from tests.benchmarks.peer_bench import Bench
from tests.benchmarks.peer_catalog import PEERS, MissingError
from tests.benchmarks.peer_report import write_table
from tests.benchmarks.peers import add_arguments, installed, prepare
from tests.benchmarks.serve import end_as_a_whole

LENGTHS = (128, 512, 1024, 2000, 4000, 7000)
NUM_OUT = 32
DEFAULT = ("ours-bfloat16", "ours-int8", "openvino-bfloat16", "llama.cpp-bf16")
Measured = dict[int, tuple[float, float]]  # for each length, both times in milliseconds


def measure(bench: Bench, name: str, lengths: list[int]) -> Measured:
    """Measure one peer in one round."""
    peer, found = PEERS[name], {}
    bench.export(peer)
    with bench.serving(peer) as (port, _):
        bench.drive(peer, port, [bench.prompts.body(128, 4)])
        for length in lengths:
            (timed,) = bench.drive(peer, port, [bench.prompts.body(length, NUM_OUT)])
            found[length] = (1e3 * timed.first, 1e3 * statistics.median(timed.gaps))
    return found


def run(arguments: argparse.Namespace, work: Path) -> None:
    longest = json.loads((work / "checkpoint" / "config.json").read_text())["max_position_embeddings"] - NUM_OUT
    if too_long := [length for length in arguments.lengths if length > longest]:
        raise SystemExit(f"the context of the model has room for prompts of {longest} tokens, not {too_long[0]}")
    slot_tokens = max(arguments.lengths) + NUM_OUT
    bench = Bench(installed(arguments), work, threads=arguments.threads, slots=1, slot_tokens=slot_tokens)
    rounds: dict[str, list[Measured]] = {name: [] for name in arguments.only}
    missing: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for name in [name for name in arguments.only if name not in missing]:
            try:
                rounds[name].append(measure(bench, name, arguments.lengths))
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
    result = {"benchmark": "growth", "model": str(arguments.model), "cpu": cpu_model(), "threads": arguments.threads}
    sys.stdout.write(json.dumps({**result, "rounds": rounds, "missing": missing}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of the prompts")
    parser.set_defaults(only=list(DEFAULT))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        prepare(arguments, work)
        run(arguments, work)


if __name__ == "__main__":
    main()
