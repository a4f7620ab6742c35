"""Suggest the route that was probably meant by the path of a request that no route answers."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

METHOD_WEIGHT = 0.3
METHODS = ("get", "post", "put", "delete")


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
