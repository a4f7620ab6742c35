"""Say what to do about a path that no route answers: a route of another API, or a spelling of a known one."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any

METHOD_WEIGHT = 0.3
METHODS = ("get", "post", "put", "delete")
TEXT_ONLY = "the model reads and writes only text; use another server for this"
STORES_NOTHING = "this server stores no such objects; send everything in the request that needs it"
ONE_BY_ONE = "send the requests one by one; the server computes those that arrive together in one batch"
# Routes of other APIs that are not here, and all paths below them, with what to do instead.
ABSENT = {
    "/v1/responses/compact": "the server does not shorten conversations; send a shorter input to POST /v1/responses",
    "/v1/responses/*/cancel": "no response runs in the background; to cancel a request, close its connection",
    "/v1/conversations": "continue a response with previous_response_id, or send all items in input",
    "/v1/messages/batches": ONE_BY_ONE,
    "/v1/batches": ONE_BY_ONE,
    "/v1/audio": TEXT_ONLY,
    "/v1/images": TEXT_ONLY,
    "/v1/videos": TEXT_ONLY,
    "/v1/realtime": "send POST /v1/responses or POST /v1/chat/completions with stream",
    "/v1/moderations": "this server judges no texts; ask a model with POST /v1/chat/completions",
    "/v1/files": STORES_NOTHING,
    "/v1/uploads": STORES_NOTHING,
    "/v1/vector_stores": STORES_NOTHING,
    "/v1/containers": STORES_NOTHING,
    "/v1/assistants": "send POST /v1/responses or POST /v1/chat/completions, with tools",
    "/v1/threads": "send POST /v1/responses or POST /v1/chat/completions, with all messages",
    "/v1/rerank": "POST /v1/embeddings returns vectors that you can compare",
    "/rerank": "POST /v1/embeddings returns vectors that you can compare",
    "/api/tags": "Ollama's API is not implemented; GET /v1/models lists the models",
    "/api/show": "Ollama's API is not implemented; GET /model describes the model",
    "/api/version": "Ollama's API is not implemented; use the routes below /v1",
    "/api/ps": "Ollama's API is not implemented; GET /v1/models lists the models",
    "/props": "GET /model describes the model",
    "/version": "GET /status has the version",
    "/ping": "GET /health says whether the server runs",
    "/v1/fine_tuning": "the command `forwardscope train` trains small models, and --adapter serves LoRA adapters",
}


def absent_route(path: str) -> str | None:
    """Advice for a route of another API that is not here; None if the path is no such route."""
    return next((advice for absent, advice in ABSENT.items() if fnmatchcase(f"{path}/", f"{absent}/*")), None)


def allowed_methods(path: str, paths: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The methods of all routes with this path. `paths` are those of the OpenAPI description."""
    parts = path.split("/")

    def is_path(route: str) -> bool:
        own = route.split("/")
        return len(own) == len(parts) and all(
            name.startswith("{") or name == part for name, part in zip(own, parts, strict=True)
        )

    return [method for method, route in routes_of(paths) if is_path(route)]


def nearest_route(method: str, path: str, paths: Mapping[str, Mapping[str, Any]]) -> str:
    """The method and path of the known route that is most like a path.

    `paths` are those of the OpenAPI description: path -> method in lower case -> operation. A part that is missing at
    the beginning or end of the path, or surplus, counts less than another spelling: clients often add `/v1` twice, or
    not at all. Then the number of common segments counts, and then the spelling and the method.
    """
    segments = set(path.split("/"))

    def likeness(route: tuple[str, str]) -> tuple[bool, int, float]:
        known_method, known = route
        is_part = known.endswith(path) or path.endswith(known) or known.startswith(path)
        num_common = len(segments & set(known.split("/")))
        spelling = SequenceMatcher(None, known, path, autojunk=False).ratio()
        return is_part, num_common, spelling + (METHOD_WEIGHT if known_method == method else 0.0)

    nearest = max(routes_of(paths), key=likeness)
    return " ".join(nearest)


def routes_of(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The method and path of each route."""
    for path, operations in paths.items():
        yield from ((method.upper(), path) for method in METHODS if method in operations)
