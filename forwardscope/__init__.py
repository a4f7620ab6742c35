"""Look inside decoder-only transformers from Python.

`load` runs a model in this process. `Client` and `AsyncClient` do the same over HTTP, with numpy arrays and without
PyTorch. docs/python.md shows how.
"""

from typing import TYPE_CHECKING, Any

from forwardscope.async_client import AsyncClient
from forwardscope.client import Client
from forwardscope.errors import (
    ApiError,
    ConnectionFailed,
    ForwardscopeError,
    InvalidArgument,
    RequestTimeout,
    UnknownStage,
    UnknownWeight,
)
from model import __version__

if TYPE_CHECKING:
    from forwardscope.local import LocalModel, load
    from forwardscope.local_harvest import Harvest

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "ConnectionFailed",
    "ForwardscopeError",
    "Harvest",
    "InvalidArgument",
    "LocalModel",
    "RequestTimeout",
    "UnknownStage",
    "UnknownWeight",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import PyTorch only when `load` or `Harvest` is used: it takes seconds, and clients do not need it."""
    if name in ("load", "LocalModel"):
        from forwardscope import local

        return getattr(local, name)
    if name == "Harvest":
        from forwardscope.local_harvest import Harvest

        return Harvest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
