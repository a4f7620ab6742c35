"""Metrics that keep their values in a list until Prometheus asks."""

import math
import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from service.buffered_metrics import MAX_PENDING, BufferedHistogram, PlainCounter

BOUNDS = (0.001, 1.0, 2.5, 8.0)


def lines(registry: CollectorRegistry) -> dict[str, float]:
    """The values of all lines, without the times at which `prometheus_client` created its metrics."""
    text = generate_latest(registry).decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "_created" not in name}


@pytest.mark.parametrize("num_values", [0, 1, 100, 2 * MAX_PENDING + 1])
def test_a_buffered_histogram_reports_what_one_of_prometheus_reports(num_values: int) -> None:
    own, reference = CollectorRegistry(), CollectorRegistry()
    buffered = BufferedHistogram("step_seconds", "seconds", BOUNDS, own)
    expected = Histogram("step_seconds", "seconds", registry=reference, buckets=BOUNDS)
    draw = random.Random(0)
    for _ in range(num_values):
        value = draw.choice([*BOUNDS, 10 * draw.random(), math.inf if num_values == 1 else 0.0])
        buffered.observe(value)
        expected.observe(value)
    assert lines(own) == pytest.approx(lines(reference))
    assert lines(own) == pytest.approx(lines(reference)), "a second look counts nothing twice"


def test_a_buffered_histogram_holds_few_values() -> None:
    histogram = BufferedHistogram("step_seconds", "seconds", BOUNDS, CollectorRegistry())
    for _ in range(3 * MAX_PENDING):
        histogram.observe(1.0)
        assert len(histogram._pending) < MAX_PENDING


def test_a_plain_counter_reports_what_one_of_prometheus_reports() -> None:
    own, reference = CollectorRegistry(), CollectorRegistry()
    PlainCounter("tokens", "tokens", own).value += 3
    Counter("tokens_total", "tokens", registry=reference).inc(3)
    assert lines(own) == lines(reference)
