"""The memory that this process may use: that of the machine, of its control group, or of a GPU.

Files of other systems than Linux are missing, and then the limit is not known.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.control_groups import read_limits

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
LIMIT_FILES = (("memory.max", ""), ("memory.limit_in_bytes", "memory"))  # of versions 2 and 1, and their folders


@dataclass(frozen=True)
class Memory:
    """`total` bytes of `owner`, such as "this machine". `used`: by this process. `available`: free at the moment."""

    owner: str
    total: int
    used: int
    available: int


def memory_of(device: torch.device) -> Memory | None:
    """The memory of a device; None if it is not known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(f"the GPU {device}", total, 0, free)
    machine = _numbers(MEMINFO)
    if "MemTotal" not in machine:
        return None
    used = _numbers(STATUS).get("RssAnon", 0)  # without files, which leave the memory if other memory is needed
    total, available = machine["MemTotal"], machine.get("MemAvailable", machine["MemTotal"])
    limit = min(group_limits(), default=total)
    if limit < total:
        return Memory("the control group (container) of this process", limit, used, min(available, limit - used))
    return Memory("this machine", total, used, available)


def group_limits() -> list[int]:
    """The limits of the control groups of this process, in bytes. "max" is no limit."""
    texts = [text for file, controller in LIMIT_FILES for text in read_limits(file, controller)]
    return [int(text) for text in texts if text.isdecimal()]


def _numbers(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes: name -> size."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
