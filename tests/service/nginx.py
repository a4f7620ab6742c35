"""A real nginx in front of a service, for tests of what a proxy changes."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.running import Running, wait_until

NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: apt-get install nginx-light)")
CONFIG = """
daemon off; master_process off; pid {directory}/pid; error_log {directory}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location {path} {{
      proxy_pass http://127.0.0.1:{upstream}/; proxy_http_version 1.1; proxy_read_timeout {seconds}s;
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(service: Running, directory: Path, seconds: int, path: str = "/") -> Iterator[str]:
    """Run nginx in front of a service, which then has the address that this yields, without a slash at its end.

    `path`: the path below which nginx serves it. nginx closes connections to it that are silent for `seconds`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = directory / "nginx.conf"
    upstream = service.address[1]
    config.write_text(CONFIG.format(directory=directory, port=port, upstream=upstream, seconds=seconds, path=path))
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-c", str(config), "-p", str(directory)], stderr=subprocess.DEVNULL) as proxy:
        try:
            url = f"http://127.0.0.1:{port}{path}".rstrip("/")
            wait_until(lambda: is_up(url), "nginx answers")
            yield url
        finally:
            proxy.terminate()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
