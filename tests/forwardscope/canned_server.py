"""A server that gives prepared answers, for behaviour that a real service shows only under load or in a failure."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Canned:
    """One answer. Its pieces are sent one by one, `pause` seconds apart; then the connection is closed."""

    pieces: Sequence[bytes] = (b"{}",)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0


@dataclass
class CannedServer:
    """`requests` are the (path, JSON body) that arrived. The last answer is repeated."""

    url: str
    answers: list[Canned]
    requests: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)


def answer(content: Any, **options: Any) -> Canned:
    return Canned((json.dumps(content).encode(),), **options)


def error(status: int, message: str, retry_after: str | None = None) -> Canned:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    content = {"error": {"message": message, "type": "t", "param": None, "code": "busy"}}
    return answer(content, status=status, headers=headers)


def events(*contents: Any, pause: float = 0.0, done: bool = True) -> Canned:
    """A stream of Server-Sent Events."""
    pieces = [b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents]
    return Canned([*pieces, b"data: [DONE]\n\n"] if done else pieces, pause=pause)


def chat_chunks(*texts: str, pause: float = 0.0, reasoning: Sequence[str] = ()) -> Canned:
    """A streamed answer of OpenAI's chat completions, after some `reasoning`."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "created": 1, "choices": [choice]}

    usage = {"prompt_tokens": 3, "completion_tokens": len(texts), "total_tokens": 3 + len(texts)}
    last = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [], "usage": usage}
    pieces = [chunk({"reasoning_content": text}) for text in reasoning] + [chunk({"content": text}) for text in texts]
    return events(chunk({"role": "assistant", "content": ""}), *pieces, chunk({}, "stop"), last, pause=pause)


@contextmanager
def canned(*answers: Canned) -> Iterator[CannedServer]:
    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            found.requests.append((self.path, json.loads(self.rfile.read(length)) if length else None))
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            content = found.answers.pop(0) if len(found.answers) > 1 else found.answers[0]
            self.send_response(content.status)
            for name, value in content.headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in content.pieces:
                    self.wfile.write(piece)
                    time.sleep(content.pause)
            except OSError:
                found.disconnected.set()

        do_GET = do_POST = handle_request

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = CannedServer(f"http://127.0.0.1:{server.server_port}", list(answers))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
