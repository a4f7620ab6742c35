"""A Ray cluster of one machine, started with the commands of deploy/ray/README.md, in processes of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = Path(sys.executable).parent  # where pip has installed `ray` and `serve`
PATIENCE_SECONDS = 120.0


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition: Callable[[], bool], description: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"this did not happen in time: {description}"
        time.sleep(0.2)


class Cluster:
    """A running cluster. `port` is that of Ray's HTTP proxy."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.port, self._head, self._dashboard, agent = free_ports(4)
        self._directory = directory
        self._deployed_before = 0.0  # when the application was deployed before the last `deploy`
        self._token = uuid.uuid4().hex * 2
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "deploy" / "ray"))),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # A busy machine must not make Ray pass over the replica that a router prefers.
            "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
        }
        self._environment |= environment
        command = ["ray", "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
        ports = [f"--port={self._head}", f"--dashboard-port={self._dashboard}"]
        ports += [f"--dashboard-agent-listen-port={agent}", f"--temp-dir={directory}"]
        self._log = (directory / "ray.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [COMMANDS / command[0], *command[1:], *ports],
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until(self._is_up, "the start of the Ray cluster")

    def stop(self) -> None:
        """End all processes of the cluster."""
        self._process.terminate()  # `ray start --block` ends the others
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def deploy(self, **arguments: Any) -> None:
        """Deploy the application, or update it, with these arguments. It may not be ready yet."""
        config = yaml.safe_load((ROOT / "deploy" / "ray" / "config.yaml").read_text(encoding="utf-8"))
        config["http_options"]["port"] = self.port
        config["applications"][0]["args"] = arguments
        self._deployed_before = self.application().get("last_deployed_time_s", 0.0)
        path = self._directory / "config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command: list[str | Path] = [
            COMMANDS / "serve",
            "deploy",
            "--address",
            f"http://127.0.0.1:{self._dashboard}",
            path,
        ]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_until_deployed(self) -> None:
        """Wait until every replica of the last deployment runs, and no other one."""

        def is_deployed() -> bool:
            application = self.application()
            assert application.get("status") != "DEPLOY_FAILED", application
            is_new = application.get("last_deployed_time_s", 0.0) > self._deployed_before
            deployments = application.get("deployments", {}).values()
            states = {replica["state"] for deployment in deployments for replica in deployment["replicas"]}
            return is_new and application["status"] == "RUNNING" and states == {"RUNNING"}

        wait_until(is_deployed, "the deployment of the application")

    def application(self) -> dict[str, Any]:
        """Ask Ray for the status of the application."""
        found = self._ask("/api/serve/applications/").json()["applications"]
        return dict(found.get("forwardscope", {}))

    def replicas(self, deployment: str = "Replica") -> dict[str, int]:
        """The running replicas: id -> process id."""
        found = self.application()["deployments"][deployment]["replicas"]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == "RUNNING"}

    def client(self, **headers: str) -> httpx.Client:
        """A client of the application."""
        address = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=address, headers=headers, timeout=PATIENCE_SECONDS, trust_env=False)

    def actors(self, class_name: str) -> list[int]:
        """The process ids of the living actors of a class."""
        answer = self._ask("/api/v0/actors?detail=1").json()["data"]["result"]
        return [
            each["pid"] for each in answer["result"] if each["class_name"] == class_name and each["state"] == "ALIVE"
        ]

    def _ask(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._token}"}
        return httpx.get(
            f"http://127.0.0.1:{self._dashboard}{path}", headers=headers, timeout=PATIENCE_SECONDS, trust_env=False
        )

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self._directory / "ray.log").read_text(encoding="utf-8")
        try:
            return self._ask("/api/serve/applications/").status_code == 200
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def cluster(**environment: str) -> Iterator[Cluster]:
    """Start a cluster, with variables of Ray, and stop it at the end."""
    # The paths of sockets must be short, which those of pytest's own directories are not.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        running = Cluster(Path(directory), environment)
        try:
            yield running
        finally:
            running.stop()
