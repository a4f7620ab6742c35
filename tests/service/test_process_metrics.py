"""The metrics of the process are those of `prometheus_client`."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import ProcessCollector

from service import process_metrics
from service.process_metrics import ProcessMetrics, num_open_files

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def test_every_metric_of_the_library_is_there_with_its_text_type_and_value() -> None:
    own = {metric.name: metric for metric in ProcessMetrics().collect()}
    library = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    assert own.keys() == library.keys()
    for name, metric in library.items():
        assert (own[name].documentation, own[name].type) == (metric.documentation, metric.type)
        (sample,), (expected,) = own[name].samples, metric.samples
        assert sample.value == pytest.approx(expected.value, rel=0.1, abs=1.0), name  # both change meanwhile


@pytest.mark.parametrize("knows_the_number", [True, False])
def test_open_files_are_counted_with_old_and_new_versions_of_linux(
    knows_the_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_the_number:
        old = SimpleNamespace(stat=lambda path: SimpleNamespace(st_size=0), listdir=os.listdir)
        monkeypatch.setattr(process_metrics, "os", old)
    before = num_open_files()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(7)]
    assert num_open_files() - before == 7
    for file in files:
        os.close(file)
