"""The limits that Linux sets for groups of processes, such as containers and services of systemd.

Other systems have no such files, and then there are no limits.
"""

from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def read_limits(file: str, controller: str = "") -> list[str]:
    """The texts of a file in the control groups of this process: in its own group, and in those around it.

    `controller` is the name of a folder of version 1, or "" for version 2.
    """
    try:
        groups = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return []
    own = next((group[2] for group in groups if controller in group[1].split(",")), "/").strip("/")
    root = GROUPS / controller
    place = root / own
    paths = [folder / file for folder in (place, *place.parents) if folder.is_relative_to(root)]
    return [path.read_text().strip() for path in paths if path.exists()]  # a container may have mounted the root alone
