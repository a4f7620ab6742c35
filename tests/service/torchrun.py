"""Run a service of several processes, which torchrun starts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx

from tests.service.running import LOADING_SECONDS, PATIENCE_SECONDS, ROOT, wait_until


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def wait_for(service: httpx.Client, processes: list[subprocess.Popen[str]]) -> None:
    """Wait until the service is ready. Fails if one of its processes ends."""

    def is_ready() -> bool:
        assert all(process.poll() is None for process in processes), "a process has ended"
        with contextlib.suppress(httpx.TransportError):
            return service.get("/ready").status_code == 200
        return False

    wait_until(is_ready, "/ready", LOADING_SECONDS)


def launch(model: str, size: int, *options: str) -> subprocess.Popen[str]:
    """Start torchrun with `size` processes of the service. Their logs are on `stderr`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["-m", "service", "serve", model, "--tensor-parallel", str(size), "--threads", "1", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def torchrun(model: str, size: int, *options: str) -> Iterator[httpx.Client]:
    """A service of `size` processes. At the end all must end without an error when torchrun is told to."""
    port = free_port()
    launcher = launch(model, size, "--port", str(port), *options)
    log: list[str] = []
    assert launcher.stderr is not None
    reader = threading.Thread(target=log.extend, args=(launcher.stderr,))
    reader.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, trust_env=False) as client:
            wait_for(client, [launcher])
            yield client
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(PATIENCE_SECONDS)
        reader.join(PATIENCE_SECONDS)
        assert not [line for line in log if " ERROR " in line]
    finally:
        launcher.terminate()  # SIGKILL would leave the processes of torchrun
        launcher.wait(LOADING_SECONDS)
        reader.join()
        launcher.stderr.close()
