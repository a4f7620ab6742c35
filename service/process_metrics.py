"""Memory, processor time and open files of the process, under the names that `prometheus_client` gives them.

Its own collector lists all open files to count them, which takes 2 ms with 2,000 connections. Linux 6.2 and later know
their number. Other systems than Linux have no such metrics.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if sys.platform == "linux":
    import resource

PROCESS = Path("/proc/self")
OPEN_FILES = PROCESS / "fd"


class ProcessMetrics(Collector):
    def __init__(self) -> None:
        library = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
        self._start_time = library.get("process_start_time_seconds")  # None without /proc

    def collect(self) -> Iterator[Metric]:
        if sys.platform != "linux" or self._start_time is None:
            return
        virtual, resident = memory_bytes()
        used = resource.getrusage(resource.RUSAGE_SELF)
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield GaugeMetricFamily("process_virtual_memory_bytes", "Virtual memory size in bytes.", virtual)
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory size in bytes.", resident)
        yield self._start_time
        yield CounterMetricFamily(
            "process_cpu_seconds_total",
            "Total user and system CPU time spent in seconds.",
            used.ru_utime + used.ru_stime,
        )
        yield GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", num_open_files())
        yield GaugeMetricFamily("process_max_fds", "Maximum number of open file descriptors.", max_files)


def memory_bytes() -> tuple[int, int]:
    """The virtual and the resident memory of this process."""
    virtual, resident = map(int, (PROCESS / "statm").read_bytes().split()[:2])
    return virtual * resource.getpagesize(), resident * resource.getpagesize()


def num_open_files() -> int:
    """The number of open files of this process."""
    return os.stat(OPEN_FILES).st_size or len(os.listdir(OPEN_FILES))  # Linux before 6.2 gives the size 0
