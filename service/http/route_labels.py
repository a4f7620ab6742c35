"""The names of routes and methods in metrics, logs and spans. Clients cannot create new ones."""

from collections.abc import Collection

from starlette.types import Scope

PAGE_PATH = "/page"  # of the files of the web page, which all count as one route


def route_label(scope: Scope, paths: Collection[str]) -> str:
    """The path of a request if it is one of `paths`, such as `/v1/models/{model}`, otherwise `unmatched`."""
    if is_page_file(scope):
        return PAGE_PATH if PAGE_PATH in paths else "unmatched"
    path = getattr(scope.get("route"), "path_format", None) or scope["path"]  # FastAPI sets the route
    return str(path) if path in paths else "unmatched"


def is_page_file(scope: Scope) -> bool:
    """Whether a request is for a file of the web page."""
    return bool(scope["path"].startswith(f"{PAGE_PATH}/"))


def method_label(scope: Scope) -> str:
    """The method of a request if it is a common one, otherwise `other`."""
    return scope["method"] if scope["method"] in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS") else "other"
