"""The path below which a proxy serves the server, if the proxy leaves this path in its requests.

Pages and documentation have relative addresses, so nothing else needs to know the path.
"""

from urllib.parse import quote

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that takes `root`, such as `/fs`, off the paths of requests. Other paths stay as they are.

    So probes that do not come through the proxy need no root. A request for the root itself is redirected to `/fs/`,
    because addresses on the page are relative to that.
    """

    def __init__(self, app: ASGIApp, *, root: str) -> None:
        self.app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] == self._root:
                await RedirectResponse(f"{quote(self._root.rpartition('/')[2])}/", 308)(scope, receive, send)
                return
            if scope["path"].startswith(f"{self._root}/"):
                path = scope["path"].removeprefix(self._root)
                scope = {**scope, "path": path, "raw_path": quote(path).encode()}
        await self.app(scope, receive, send)
