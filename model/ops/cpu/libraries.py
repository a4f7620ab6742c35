"""The libraries of kernels that this process has loaded, and where they come from."""

import ctypes
import logging
import shutil
from dataclasses import dataclass
from functools import cache
from typing import Literal

from model.ops.cpu import build
from model.ops.cpu.instruction_levels import chosen_level

logger = logging.getLogger(__name__)

Origin = Literal["package", "compiled"]


@dataclass(frozen=True)
class KernelStatus:
    """The kernels that this process runs, or the reason why PyTorch computes in their place."""

    level: str | None
    """The instruction level of the kernels; None if there are none."""
    origin: Origin | None
    """`package`: all came with the installation; `compiled`: at least one was compiled on this machine."""
    problem: str | None
    """Why a library could not be loaded, and what to do; None if all were loaded."""


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL
    origin: Origin


def kernel_status() -> KernelStatus:
    """Say which kernels this process runs. Loads all libraries, and compiles missing ones, if that is still to do."""
    if isinstance(first := _load("thread_pool"), str):  # without it, no kernel runs
        return KernelStatus(None, None, first)
    found = [_load(source.stem) for source in sorted(build.CSRC.glob("*.cpp"))]
    origins = {each.origin for each in found if isinstance(each, _Loaded)}
    level = chosen_level()
    assert level is not None, "a library was loaded"
    problem = next((each for each in found if isinstance(each, str)), None)
    return KernelStatus(level.name, "package" if origins == {"package"} else "compiled", problem)


def load(name: str) -> ctypes.CDLL | None:
    """Load the library of `name`.cpp, compiled if necessary. If that fails, log one warning and return None."""
    return loaded.library if isinstance(loaded := _load(name), _Loaded) else None


@cache
def _load(name: str) -> _Loaded | str:
    """The library of `name`.cpp, or the reason why it cannot be loaded."""
    source = build.CSRC / f"{name}.cpp"
    try:
        path = build.compile_source(source)
        try:
            library = ctypes.CDLL(str(path))
        finally:
            if path.parent.name.startswith(build.COMPILING):
                shutil.rmtree(path.parent, ignore_errors=True)  # a loaded library does not need its file
    except OSError as error:
        logger.warning(
            "our kernels in %s cannot be used, so PyTorch computes, with one stream up to 16 times slower: %s",
            source.name,
            error,
        )
        return str(error)
    return _Loaded(library, "package" if path.parent == build.SHIPPED else "compiled")
