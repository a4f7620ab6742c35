"""Counters and histograms that cost little, both when they change and when Prometheus asks for them.

The classes of `prometheus_client` take a lock and several calls for each value, and build every line anew for each
answer of `GET /metrics`. These keep new values in a list until Prometheus asks, or until `MAX_PENDING` wait, and build
again only the samples of series that have changed. They have no `_created` series, which Prometheus does not use in
its text format. Each series is updated on one thread, so there is no lock.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

MAX_PENDING = 1024


class Series(Protocol):
    """The values of one combination of labels."""

    def samples(self) -> list[Sample]: ...


S = TypeVar("S", bound=Series)


class Family(Collector, Generic[S]):
    """All series of one metric. A metric without labels has one series from the start."""

    def __init__(
        self,
        kind: str,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        make: Callable[[dict[str, str]], S],
    ) -> None:
        self._kind, self._name, self._text, self._label_names = kind, name, text, labels
        self._make = make
        self._series: dict[tuple[str, ...], S] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> S:
        """The series with these values of the labels. It begins when it is asked for the first time."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._make(dict(zip(self._label_names, values, strict=True)))
        return series

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, self._kind)
        metric.samples = [sample for series in tuple(self._series.values()) for sample in series.samples()]
        yield metric


class CounterSeries:
    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._name, self._labels = name, labels
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def samples(self) -> list[Sample]:
        return [Sample(self._name, self._labels, self.value)]


class Counter(Family[CounterSeries]):
    """A counter. Its `name` ends in `_total`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        family = name.removesuffix("_total")
        super().__init__("counter", family, text, labels, registry, lambda values: CounterSeries(name, values))

    @property
    def value(self) -> float:
        """The sum over all series."""
        return sum(series.value for series in self._series.values())

    def inc(self, amount: float = 1) -> None:
        """Count in the series of a counter without labels."""
        self.labels().inc(amount)


class HistogramSeries:
    def __init__(self, name: str, bounds: npt.NDArray[np.float64], labels: dict[str, str]) -> None:
        self._name, self._bounds, self._labels = name, bounds, labels
        self._bound_texts = list(map(floatToGoString, bounds))
        self._counts = np.zeros(len(bounds), dtype=np.int64)
        self._sum = 0.0
        self._pending: list[float] = []
        self._samples: list[Sample] | None = None  # None if a value came after the last ones

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self._pending.append(value)
        if len(self._pending) >= MAX_PENDING:
            self._count_pending()

    def samples(self) -> list[Sample]:
        if self._pending:
            self._count_pending()
        if self._samples is None:
            totals = [float(total) for total in accumulate(self._counts.tolist())]
            self._samples = [
                *(
                    Sample(f"{self._name}_bucket", {**self._labels, "le": bound}, total)
                    for bound, total in zip(self._bound_texts, totals, strict=True)
                ),
                Sample(f"{self._name}_count", self._labels, totals[-1]),
                Sample(f"{self._name}_sum", self._labels, self._sum),
            ]
        return self._samples

    def _count_pending(self) -> None:
        indices = np.searchsorted(self._bounds, self._pending)
        counts = np.bincount(indices, minlength=len(self._bounds))
        self._counts += counts[: len(self._bounds)]  # NaN is in no bucket
        self._sum += sum(self._pending)
        self._pending.clear()
        self._samples = None


class Histogram(Family[HistogramSeries]):
    """A histogram. `buckets` are the upper bounds, in ascending order; a last bucket without bound is added."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry, labels: Sequence[str] = ()
    ) -> None:
        bounds = np.array([*buckets, np.inf])
        super().__init__(
            "histogram", name, text, labels, registry, lambda values: HistogramSeries(name, bounds, values)
        )

    def observe(self, value: float) -> None:
        """Count a value in the series of a histogram without labels."""
        self.labels().observe(value)
