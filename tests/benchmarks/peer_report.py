"""Summarize what `tests.benchmarks.peers` measured in several rounds, and print it as a table."""

import statistics
import sys
from typing import Any

from tests.benchmarks.machine_limits import Shape, prompt_seconds, scenario_seconds
from tests.benchmarks.peer_catalog import SCENARIOS, Peer
from tests.benchmarks.peer_servers import PREFILLS

NUM_AGREE = 16
TIMES = {"ttft_p50_ms": "TTFT", "itl_p99_ms": "ITL p99"}  # of a scenario, in milliseconds
WITH_PROMPTS = ("S3", "S4")  # the scenarios whose times are in the table


def summary(rounds: list[dict[str, Any]], *path: str) -> dict[str, float] | None:
    """Median, minimum and maximum of one figure over all rounds; None if it was not measured."""
    values: list[Any] = list(rounds)
    for key in path:
        values = [value.get(key) for value in values if value is not None]
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures(peer: Peer, shape: Shape, rounds: list[dict[str, Any]], machine: dict[str, float]) -> dict[str, Any]:
    """Summarize the figures of all rounds; speeds also as a share of the limit of the machine."""
    found: dict[str, Any] = {name: summary(rounds, name) for name in ("ready_seconds", "agrees")}
    rate = machine[peer.rate]
    seconds_to_read = (shape.blocks + shape.head) * peer.weight_bits / 8 / machine["bandwidth"]
    for name, (streams, num_in, num_out) in SCENARIOS.items():
        if (speed := summary(rounds, name, "tokens_per_second")) is not None:
            limit = streams * num_out / scenario_seconds(shape, rate, seconds_to_read, streams, num_in, num_out)
            found[name] = {
                **speed,
                "share": speed["median"] / limit,
                **{time: summary(rounds, name, time) for time in TIMES},
            }
    for num_in in PREFILLS:
        if (speed := summary(rounds, "prefill", str(num_in))) is not None:
            limit = num_in / prompt_seconds(shape, rate, num_in)
            found[f"prefill_{num_in}"] = {**speed, "share": speed["median"] / limit}
    return found


def row(name: str, found: dict[str, Any], scenarios: list[str], texts: list[str]) -> list[str]:
    def cell(value: dict[str, Any] | None) -> str:
        return f"{value['median']:.0f} ({value['min']:.0f}-{value['max']:.0f}) {value['share']:.0%}" if value else "-"

    timed = [found.get(scenario, {}) for scenario in WITH_PROMPTS if scenario in scenarios]
    times = [f"{each[time]['median']:.0f}" if each else "-" for each in timed for time in TIMES]
    speeds = [cell(found.get(key)) for key in (*scenarios, *(f"prefill_{num_in}" for num_in in PREFILLS))]
    agrees = "-" if found["agrees"] is None else f"{found['agrees']['min']:.0f} of {NUM_AGREE}"
    perplexities = (found.get("perplexity", {}).get(text) for text in texts)
    own = [f"{each['value']:.3f} {each['increase']:+.2%}" if each else "-" for each in perplexities]
    return [name, f"{found['ready_seconds']['median']:.1f}", agrees, *speeds, *times, *own]


def write_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
