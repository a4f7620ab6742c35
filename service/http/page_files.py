"""The files of the web page, with the headers that keep a browser from loading or running anything else.

Files are compressed once and kept in memory, so that a page of many small modules loads fast. A browser asks for each
file again, and gets 304 as long as the file has not changed.
"""

import asyncio
import gzip
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

WEB = Path(__file__).parents[1] / "web"
INDEX = "index.html"
# Named here, because the types that Python knows depend on the operating system, and browsers refuse wrong ones.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
COMPRESSED = frozenset({".html", ".css", ".js", ".json", ".svg"})
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser may keep the file, but asks whether it has changed
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent. `changed` is its size and the time of its last change."""

    changed: tuple[int, int]
    media_type: str
    content: bytes
    compressed: bytes | None
    tag: str  # of the content, in quotes: an ETag


class PageFiles(StaticFiles):
    """ASGI application that serves the files below a directory."""

    def __init__(self, directory: Path = WEB) -> None:
        super().__init__(directory=directory)
        self._files: dict[str, PageFile] = {}
        self._reading = asyncio.Lock()

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return await self.get_response(INDEX, request.scope)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        headers = Headers(scope=scope)
        file = await self._find(path)
        is_compressed = file.compressed is not None and accepts_gzip(headers.get("accept-encoding", ""))
        tag = f"W/{file.tag}" if is_compressed else file.tag  # weak: the bytes are not those of the file
        answer = HEADERS | {"ETag": tag}
        if has_tag(headers.get("if-none-match", ""), file.tag):
            return Response(status_code=304, headers=answer)
        if not is_compressed or file.compressed is None:
            return Response(file.content, headers=answer, media_type=file.media_type)
        return Response(file.compressed, headers=answer | {"Content-Encoding": "gzip"}, media_type=file.media_type)

    async def _find(self, path: str) -> PageFile:
        """The file at a path, which is read again only if it has changed. Raises 404 if there is none.

        Files are read on another thread, one at a time: compressing a large one takes a tenth of a second.
        """
        try:
            full_path, status = self.lookup_path(path)
        except (OSError, ValueError):  # a name that is too long or has a NUL character
            raise HTTPException(404) from None
        suffix = os.path.splitext(full_path)[1]
        if status is None or not stat.S_ISREG(status.st_mode) or suffix not in MEDIA_TYPES:
            raise HTTPException(404)
        changed = status.st_size, status.st_mtime_ns
        file = self._files.get(full_path)
        if file is None or file.changed != changed:
            async with self._reading:
                file = self._files.get(full_path)
                if file is None or file.changed != changed:  # no other request has read it meanwhile
                    file = self._files[full_path] = await run_in_threadpool(read_file, Path(full_path), changed)
        return file


def read_file(path: Path, changed: tuple[int, int]) -> PageFile:
    content = path.read_bytes()
    return PageFile(
        changed=changed,
        media_type=MEDIA_TYPES[path.suffix],
        content=content,
        compressed=gzip.compress(content, mtime=0) if path.suffix in COMPRESSED else None,
        tag=f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"',
    )


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header names gzip, or everything, with a weight above 0."""
    for name in ("gzip", "*"):
        for entry in header.lower().split(","):
            coding, _, weight = (part.strip() for part in entry.partition(";"))
            if coding == name:
                return weight.replace(" ", "").removeprefix("q=").strip("0.") != "" or not weight
    return False


def has_tag(header: str, tag: str) -> bool:
    """Whether an If-None-Match header names a tag, weak or not (RFC 9110, section 13.1.2)."""
    return any(each.strip().removeprefix("W/") in (tag, "*") for each in header.split(","))
