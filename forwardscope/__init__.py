"""Look inside decoder-only transformers from Python.

`load` runs a model in this process. `Client` and `AsyncClient` do the same over HTTP, with numpy arrays and without
PyTorch. docs/python.md shows how.
"""

import importlib
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
    from forwardscope.local import HookContext, LocalModel, load
    from forwardscope.local_harvest import Harvest

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "ConnectionFailed",
    "ForwardscopeError",
    "Harvest",
    "HookContext",
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
    if name in ("Harvest", "HookContext", "LocalModel", "load"):
        return getattr(importlib.import_module("forwardscope.local"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
