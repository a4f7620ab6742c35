"""The text of `GET /metrics` has every line of the renderer of `prometheus_client`, and no other."""

import math

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.metric_types import Counter, Histogram
from service.metrics_text import CONTENT_TYPE, MetricsText
from tests.service.running import Running


def lines_of_the_library(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


def test_the_lines_are_those_of_the_library_for_every_type_of_metric_and_odd_labels_and_values() -> None:
    registry = CollectorRegistry()
    counter = Counter("requests_total", 'a help with a \\ and\na second "line"', registry, ("zone", "area"))
    gauge = Gauge("level", "gauge", registry=registry)
    histogram = Histogram("seconds", "histogram", (0.1, 1e6, 1e7), registry, ("route",))
    Histogram("steps", "without labels", (1, 2), registry).observe(1.5)
    text = MetricsText(registry)
    for value in (0.0, 0.1, 1.0, 1e-9, 123456789.0, 1e16, 1e300, math.inf, -math.inf, math.nan):
        gauge.set(value)
        counter.labels(f'a "quoted" {value}', "back\\slash\nnext, {x}=1").inc()
        histogram.labels("/é").observe(value)
        assert text.render().decode().splitlines() == lines_of_the_library(registry)


def test_a_series_that_is_new_after_the_first_text_is_in_the_next_one() -> None:
    registry = CollectorRegistry()
    counter = Counter("requests_total", "all", registry, ("route",))
    text = MetricsText(registry)
    assert b"requests_total{" not in text.render()
    counter.labels("/new").inc(2)
    assert b'\nrequests_total{route="/new"} 2.0\n' in text.render()
    counter.labels("/new").inc()
    assert b'\nrequests_total{route="/new"} 3.0\n' in text.render()


def test_the_text_of_a_service_has_every_series_of_the_library_and_no_other(tiny: Running) -> None:
    tiny.answer("/generate", prompt=[1, 2, 3], max_tokens=3)
    tiny.get("/metrics")  # so that its own route is among the series
    answer = tiny.get("/metrics")
    registry = tiny.state.metrics.registry
    assert answer.headers["content-type"] == CONTENT_TYPE
    expected = {line.rpartition(" ")[0] for line in lines_of_the_library(registry)}
    assert {line.rpartition(" ")[0] for line in answer.text.splitlines()} == expected
    types = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
    assert types == {family.name: family.type for family in registry.collect()}
