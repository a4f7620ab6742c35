"""Our counters and histograms report what those of `prometheus_client` report."""

import math
import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.metric_types import MAX_PENDING, Counter, Histogram

BOUNDS = (0.001, 1.0, 2.5, 8.0)


def lines(registry: CollectorRegistry) -> dict[str, float]:
    """The values of all lines, without the times at which `prometheus_client` created its metrics."""
    text = generate_latest(registry).decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "_created" not in name}


@pytest.mark.parametrize("num_values", [0, 1, 100, 2 * MAX_PENDING + 1])
@pytest.mark.parametrize("labels", [(), ("route", "status")])
def test_a_histogram_reports_what_one_of_the_library_reports(num_values: int, labels: tuple[str, ...]) -> None:
    own, reference = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("step_seconds", "seconds", BOUNDS, own, labels)
    expected = prometheus_client.Histogram("step_seconds", "seconds", labels, registry=reference, buckets=BOUNDS)
    draw = random.Random(0)
    for _ in range(num_values):
        value = draw.choice([*BOUNDS, 10 * draw.random(), math.inf if num_values == 1 else 0.0])
        chosen = [draw.choice("abc") for _ in labels]
        histogram.labels(*chosen).observe(value)
        (expected.labels(*chosen) if labels else expected).observe(value)
        if draw.random() < 0.1:  # between two looks, only some series have changed
            assert lines(own) == pytest.approx(lines(reference))
    assert lines(own) == pytest.approx(lines(reference))
    assert lines(own) == pytest.approx(lines(reference)), "a second look counts nothing twice"


def test_a_histogram_holds_few_values() -> None:
    histogram = Histogram("step_seconds", "seconds", BOUNDS, CollectorRegistry())
    for _ in range(3 * MAX_PENDING):
        histogram.observe(1.0)
        assert len(histogram.labels()._pending) < MAX_PENDING


def test_a_counter_reports_what_one_of_the_library_reports() -> None:
    own, reference = CollectorRegistry(), CollectorRegistry()
    counter = Counter("tokens_total", "tokens", own)
    routes = Counter("requests_total", "requests", own, ("route",))
    counter.inc(3)
    routes.labels("/a").inc()
    routes.labels("/b").inc(0.5)
    prometheus_client.Counter("tokens_total", "tokens", registry=reference).inc(3)
    expected = prometheus_client.Counter("requests_total", "requests", ("route",), registry=reference)
    expected.labels("/a").inc()
    expected.labels("/b").inc(0.5)
    assert lines(own) == lines(reference)
    assert (counter.value, routes.value) == (3, 1.5)


def test_a_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Counter("requests_total", "requests", CollectorRegistry(), ("route",)).labels()
