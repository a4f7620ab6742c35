"""Buildah builds the image, and containers of it serve as users without rights, on a root that they cannot change.

This takes minutes, downloads PyTorch, and needs 8 GB of disk (20 GB where Buildah cannot use overlayfs), so it runs
only if FORWARDSCOPE_TEST_IMAGE is set: to 1, or to further arguments of `buildah build`, such as
`--build-arg TORCH_INDEX=...`. The base is a Debian of debootstrap, which is kept in pytest's cache.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.ops.cpu.build import CSRC, SHIPPED
from model.ops.cpu.instruction_levels import LEVELS
from tests.conftest import source_tree
from tests.engine.other_rank import free_port

ROOT = source_tree()
VARIABLE = "FORWARDSCOPE_TEST_IMAGE"
PROGRAMS = ("buildah", "debootstrap")
DEBIAN = "bookworm"
PACKAGES = "ca-certificates,python3-venv,python-is-python3"
MAX_BYTES = 1_400_000_000
READY_SECONDS = 6.0  # of CPU time
REBUILD_SECONDS = 30.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE}=1 builds the image, in minutes and 8 GB"),
    pytest.mark.skipif(
        os.name == "nt" or os.geteuid() != 0 or None in map(shutil.which, PROGRAMS),
        reason=f"needs {' and '.join(PROGRAMS)} (apt-get install), and to be root",
    ),
]
# Mounts the image read-only at its own place, with the folders that a container gets, and starts a program in it.
CONTAINER = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t tmpfs -o mode=1777 tmp "$1/tmp"
mount -t tmpfs -o mode=0775,gid=0 cache "$1/cache"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot --userspec="$2" "$1" "${@:3}"
"""


class Builder:
    """Buildah with a storage of its own, and a copy of the files from which the image is built."""

    def __init__(self, folder: Path) -> None:
        self.storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self.context = folder / "context"
        files = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for name in files.strip("\0").split("\0"):
            (self.context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.context / name)

    def run(self, *arguments: str) -> str:
        command = ["buildah", *self.storage, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout.strip()

    def add_base(self, archive: Path) -> None:
        container = self.run("from", "scratch")
        self.run("add", container, str(archive), "/")
        self.run("commit", "--rm", container, "localhost/base")

    def build(self) -> float:
        """Build the image `localhost/forwardscope`. Returns the seconds that this took."""
        wanted = os.environ[VARIABLE]
        options = ["--isolation", "chroot", "--layers", "--format", "docker", "--build-arg", "BASE=localhost/base"]
        options += [] if wanted == "1" else shlex.split(wanted)
        began = time.monotonic()
        self.run("build", *options, "--tag", "localhost/forwardscope", str(self.context))
        return time.monotonic() - began


@pytest.fixture(scope="module")
def builder(pytestconfig: pytest.Config) -> Iterator[Builder]:
    assert pytestconfig.cache is not None
    archive = pytestconfig.cache.mkdir("images") / f"{DEBIAN}.tar"
    folder = Path(tempfile.mkdtemp(prefix="forwardscope-images-", dir="/var/tmp"))  # /tmp may be in memory
    builder = Builder(folder)
    try:
        if not archive.exists():
            base, finished = folder / "base", folder / "base.tar"
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(base)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            subprocess.run(["tar", "-C", str(base), "-cf", str(finished), "."], check=True)
            shutil.move(finished, archive)
        builder.add_base(archive)
        yield builder
    finally:
        builder.run("rm", "--all")  # unmounts their files
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(builder: Builder) -> tuple[Path, dict[str, Any]]:
    """The files of the image, and its configuration."""
    sys.stdout.write(f"built in {builder.build():.0f} s\n")
    container = builder.run("from", "localhost/forwardscope")
    return Path(builder.run("mount", container)), json.loads(builder.run("inspect", container))["Docker"]["config"]


def test_the_image_has_the_kernels_of_all_levels_and_neither_a_compiler_nor_much_else(
    image: tuple[Path, dict[str, Any]],
) -> None:
    files, config = image
    assert config["User"] == "10001:0"
    (libraries,) = files.glob(f"opt/forwardscope/lib/python*/site-packages/{SHIPPED.relative_to(ROOT)}")
    assert len(list(libraries.iterdir())) == len(LEVELS) * len(list(CSRC.glob("*.cpp")))
    assert not [name for name in ("gcc", "g++", "c++", "clang", "zig") if list(files.glob(f"**/bin/{name}"))]
    cache = (files / "cache").stat()
    assert (cache.st_gid, cache.st_mode & 0o070) == (0, 0o070)
    size = sum(path.lstat().st_size for path in files.rglob("*"))
    sys.stdout.write(f"{size / 1e9:.2f} GB\n")
    assert size < MAX_BYTES


@pytest.mark.parametrize("user", ["10001:0", "1000650000:0"])
def test_any_user_of_group_0_serves_soon_on_a_read_only_root(image: tuple[Path, dict[str, Any]], user: str) -> None:
    files, config = image
    port = free_port()
    environment = [*config["Env"], f"FORWARDSCOPE_PORT={port}", "FORWARDSCOPE_HOST=127.0.0.1"]
    start = ["unshare", "--mount", "bash", "-c", CONTAINER, "container", str(files), user, "env", "-i", *environment]
    began = time.monotonic()
    with subprocess.Popen([*start, *config["Entrypoint"]], stderr=subprocess.PIPE, text=True) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
                while not is_ready(client):
                    assert server.poll() is None, server.communicate()[1]
                    assert time.monotonic() - began < 60
                    time.sleep(0.05)
                seconds = cpu_seconds(server.pid)
                body = {"prompt": "Once upon a time", "max_tokens": 20, "stream": True}
                assert client.post("/generate", json=body).text.endswith("data: [DONE]\n\n")
        finally:
            server.send_signal(signal.SIGTERM)
            log = server.communicate(timeout=60)[1]
    sys.stdout.write(f"ready after {seconds:.1f} CPU seconds\n")
    assert "WARNING" not in log
    assert seconds < READY_SECONDS


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process until now. Unlike the time by the clock, it does not depend on other processes."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_after_a_change_of_the_service_the_image_is_soon_built_again(
    builder: Builder, image: tuple[Path, dict[str, Any]]
) -> None:
    with (builder.context / "service" / "app.py").open("a") as file:
        file.write("# changed\n")
    seconds = builder.build()
    sys.stdout.write(f"built again in {seconds:.1f} s\n")
    assert seconds < REBUILD_SECONDS
