"""Compiles the C++ files of this folder for the CPU at hand, once, and loads them: whatever they compute. `CXXFLAGS` of
the environment come after its own flags (`-mno-avx512f`: for AVX2).

Libraries are kept in a cache folder. Where that cannot be written, they are compiled into a temporary folder, which is
removed as soon as the library is loaded. A process that is killed while it compiles leaves a folder behind; a later
start removes that folder.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# -fno-tree-pre: else GCC 12 keeps half of the int8 product's sums in memory, and it takes twice as long.
# -ffp-contract=off: else it joins products and sums in one place and not in another, and bits differ.
FLAGS = ("-O3", "-march=native", "-fno-tree-pre", "-ffp-contract=off", "-std=c++20", "-pthread", "-shared", "-fPIC")
COMPILERS = ("g++", "c++")
FOLDER = Path(__file__).parent
COMPILING = "forwardscope-compiling-"  # how the names of the folders begin in which a process compiles
STALE_SECONDS = 3600.0  # far longer than a compiler takes: the process that made an older folder has ended


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.cpp; None, and one line of log that says why, where it cannot be had here."""
    source = FOLDER / f"{name}.cpp"
    try:
        library = compile_source(source)
        try:
            return ctypes.CDLL(str(library))
        finally:
            if library.parent.name.startswith(COMPILING):
                shutil.rmtree(library.parent, ignore_errors=True)  # a loaded library does not need its file
    except OSError as error:
        logger.info("PyTorch's kernels instead of %s: %s", source.name, error)
        return None


def kernel(library: str, name: str, dtype: torch.dtype) -> int | None:
    """The address of the kernel `name` for this dtype, in `library`.cpp; None where there is none for this CPU."""
    found = getattr(load(library), f"{name}_{str(dtype).removeprefix('torch.')}", None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def compile_source(source: Path) -> Path:
    """The compiled library. Raises `OSError` where there is no compiler, or it fails.

    It is in the cache, where the same compiler on the same CPU finds it again; or, where no cache can be written, alone
    in a temporary folder, which is removed when the process ends.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr
    headers = [header.read_text() for header in sorted(FOLDER.glob("*.h"))]
    about = (source.read_text(), *headers, version, *flags, cpu())
    key = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    name = f"{source.stem}-{key}.so"
    cached = cache_directory()
    if cached is not None and (cached / name).exists():
        return cached / name
    directory = Path(tempfile.mkdtemp(prefix=COMPILING, dir=cached))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    unfinished = directory / name
    command = [compiler, *flags, f"-I{FOLDER}", str(source), "-o", str(unfinished)]
    # The compiler's own temporary files are in the folder too, so none of them is left behind either.
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(directory)})
    if made.returncode != 0:
        shutil.rmtree(directory, ignore_errors=True)
        lines = made.stderr.splitlines()
        raise OSError(next((line for line in lines if "error" in line), f"{compiler} failed"))
    if cached is None:
        return unfinished
    unfinished.replace(cached / name)
    shutil.rmtree(directory, ignore_errors=True)
    return cached / name


def cache_directory() -> Path | None:
    """`$XDG_CACHE_HOME/forwardscope`; None where that cannot be written.

    Removes what processes that were killed left in it, or else in the temporary folder.
    """
    directory = None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(home) / "forwardscope"
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # the latter where the user has no home
        directory = None
    if directory is None:
        remove_stale(Path(tempfile.gettempdir()), f"{COMPILING}*")
    else:
        remove_stale(directory, "*")  # libraries are files: only processes that compile make folders here
    return directory


def remove_stale(place: Path, pattern: str) -> None:
    """Remove the folders that match and whose process must have ended while it compiled."""
    oldest = time.time() - STALE_SECONDS
    for path in place.glob(pattern):
        with suppress(OSError):  # another user's folder, or another process removes it too
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
