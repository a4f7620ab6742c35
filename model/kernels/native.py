"""Compiles the C++ files of this folder for the CPU at hand, once, and loads them: whatever they compute. `CXXFLAGS` of
the environment come after its own flags (`-mno-avx512f`: for AVX2)."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# -fno-tree-pre: else GCC 12 keeps half of the int8 product's sums in memory, and it takes twice as long.
# -ffp-contract=off: else it joins products and sums in one place and not in another, and bits differ.
FLAGS = ("-O3", "-march=native", "-fno-tree-pre", "-ffp-contract=off", "-std=c++20", "-pthread", "-shared", "-fPIC")
COMPILERS = ("g++", "c++")
FOLDER = Path(__file__).parent


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.cpp; None, and one line of log that says why, where it cannot be had here."""
    source = FOLDER / f"{name}.cpp"
    try:
        return ctypes.CDLL(str(compile_source(source)))
    except OSError as error:
        logger.info("PyTorch's kernels instead of %s: %s", source.name, error)
        return None


def kernel(library: str, name: str, dtype: torch.dtype) -> int | None:
    """The address of the kernel `name` for this dtype, in `library`.cpp; None where there is none for this CPU."""
    found = getattr(load(library), f"{name}_{str(dtype).removeprefix('torch.')}", None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def compile_source(source: Path) -> Path:
    """The library; kept, and found again by the same compiler for the same CPU. Raises `OSError` where that fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr
    headers = [header.read_text() for header in sorted(FOLDER.glob("*.h"))]
    about = (source.read_text(), *headers, version, *flags, cpu())
    key = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    library = cache_directory() / f"{source.stem}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        unfinished = Path(directory) / library.name
        command = [compiler, *flags, f"-I{FOLDER}", str(source), "-o", str(unfinished)]
        made = subprocess.run(command, capture_output=True, text=True)
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
