"""Compiles a C++ file of this folder for the CPU at hand, once, and loads it. Knows nothing of what it computes."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("g++", "c++")
Kernel = Callable[..., None]


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.cpp; None, and one line of log that says why, where it cannot be had here."""
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        return ctypes.CDLL(str(compile_source(source)))
    except OSError as error:
        logger.info("PyTorch's kernels instead of %s: %s", source.name, error)
        return None


def kernel(name: str, dtype: torch.dtype, arguments: Sequence[type]) -> Kernel | None:
    """The function `name`_`dtype` of `name`.cpp, of these ctypes; None where there is none for this CPU."""
    found = getattr(load(name), f"{name}_{str(dtype).removeprefix('torch.')}", None)
    if found is not None:
        found.argtypes, found.restype = arguments, None
    return found


def compile_source(source: Path) -> Path:
    """The library; kept, and found again by the same compiler for the same CPU. Raises `OSError` where that fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr
    about = (source.read_text(), version, *FLAGS, cpu())
    key = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    library = cache_directory() / f"{source.stem}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        unfinished = Path(directory) / library.name
        made = subprocess.run([compiler, *FLAGS, str(source), "-o", str(unfinished)], capture_output=True, text=True)
        if made.returncode != 0:
            lines = made.stderr.splitlines()
            raise OSError(next((line for line in lines if "error" in line), f"{compiler} failed"))
        unfinished.replace(library)
    return library


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/forwardscope`; where that cannot be written, a new temporary folder."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(home) / "forwardscope"
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # the latter where the user has no home
        return Path(tempfile.mkdtemp(prefix="forwardscope-"))
    return directory


def cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
