"""A stream behind a real nginx that closes a connection on which nothing arrives: it stays open, and arrives whole."""

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.checkpoints import write_checkpoint
from tests.service.nginx import needs_nginx, nginx
from tests.service.running import PATIENCE_SECONDS, Running, read_events, running

pytestmark = needs_nginx


def read_silent_stream(service: Running, url: str, silent_seconds: float) -> bytes:
    """Read a stream whose long prompt is not computed for so many seconds, through nginx."""
    content = "the cat sat on the mat " * 300
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "ignore_eos": True}
    received = b""
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        with service.blocked(), contextlib.ExitStack() as stack:
            response = stack.enter_context(
                client.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True})
            )
            assert response.status_code == 200
            time.sleep(silent_seconds)
            kept = stack.pop_all()
        with kept:
            for piece in response.iter_raw():
                received += piece
    return received


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "silent", "keepalive"), [(2, 5.0, 1.0), (15, 32.0, 10.0)])
def test_a_stream_that_is_silent_for_longer_than_the_proxy_allows_arrives_whole(
    tmp_path: Path, limit: int, silent: float, keepalive: float
) -> None:
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=8192)
    settings: dict[str, Any] = {"model": str(directory), "max_num_seqs": 4, "sse_keepalive_seconds": keepalive}
    with running(**settings) as service, nginx(service, tmp_path, limit) as url:
        received = read_silent_stream(service, url, silent)
    events = read_events(received.replace(b":\n\n", b""))
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert received.count(b":\n\n") >= 2


@pytest.mark.slow
def test_without_comments_the_proxy_cuts_it(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=8192)
    settings: dict[str, Any] = {"model": str(directory), "max_num_seqs": 4, "sse_keepalive_seconds": 0}
    cut = pytest.raises(httpx.RemoteProtocolError)
    with running(**settings) as service, nginx(service, tmp_path, 1) as url, cut:
        read_silent_stream(service, url, 3.0)
