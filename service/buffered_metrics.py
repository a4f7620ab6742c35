"""Prometheus metrics that are updated with every step of the engine, at little cost to the step.

The classes of `prometheus_client` take a lock and several calls for each value. These metrics keep the values in a
list, and sort them into buckets when Prometheus asks, or when `MAX_PENDING` values wait. They are used on one thread.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MAX_PENDING = 1024


class BufferedHistogram(Collector):
    """A histogram. `buckets` are the upper bounds, in ascending order; a last bucket without bound is added."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._bounds = np.array([*buckets, np.inf])
        self._counts = np.zeros(len(self._bounds), dtype=np.int64)
        self._sum = 0.0
        self._pending: list[float] = []
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self._pending.append(value)
        if len(self._pending) >= MAX_PENDING:
            self._count_pending()

    def collect(self) -> Iterator[Metric]:
        self._count_pending()
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def _count_pending(self) -> None:
        indices = np.searchsorted(self._bounds, self._pending)
        self._counts += np.bincount(indices, minlength=len(self._bounds))
        self._sum += sum(self._pending)
        self._pending.clear()


class PlainCounter(Collector):
    """A counter: its owner adds to `value`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, self.value)
