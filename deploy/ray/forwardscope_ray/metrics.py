"""The metrics of all replicas as one page for Prometheus, with the label `replica`."""

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Merged(Collector):
    """The metrics of several replicas. Samples of the same metric follow each other, as the format demands."""

    def __init__(self, replicas: Iterable[tuple[str, list[Metric]]]) -> None:
        """`replicas` are the ids of the replicas and their metrics."""
        self._replicas = sorted(replicas, key=lambda replica: replica[0])

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, metrics in self._replicas:
            for metric in metrics:
                family = merged.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                family.samples += [
                    sample._replace(labels={"replica": replica, **sample.labels}) for sample in metric.samples
                ]
        yield from merged.values()


def metrics_page(replicas: Iterable[tuple[str, list[Metric]]]) -> bytes:
    """The text of `GET /metrics`."""
    return generate_latest(Merged(replicas))
