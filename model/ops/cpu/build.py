"""Compile the C++ files in `csrc` for the CPU of this machine, once, and load them as libraries.

Flags in the environment variable `CXXFLAGS` follow our own (`-mno-avx512f`, for example, selects AVX2).

Libraries are kept in a cache directory. If that directory cannot be written, each library is compiled into a temporary
directory, which is removed as soon as the library is loaded. A process that is killed while it compiles leaves a
directory behind; a later start removes that directory. This module does not know what the libraries compute.
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

logger = logging.getLogger(__name__)

# -fno-tree-pre: otherwise GCC 12 keeps half of the sums of the int8 product in memory, and it takes twice as long.
# -ffp-contract=off: otherwise the compiler fuses products and sums in some places and not in others, and bits differ.
FLAGS = ("-O3", "-march=native", "-fno-tree-pre", "-ffp-contract=off", "-std=c++20", "-pthread", "-shared", "-fPIC")
COMPILERS = ("g++", "c++")
CSRC = Path(__file__).parent / "csrc"
COMPILE_SECONDS = 10  # about what the slowest file takes; only logged
COMPILING = "forwardscope-compiling-"  # prefix of the directories in which processes compile
STALE_SECONDS = 3600.0  # far longer than a compiler takes: the process that made an older directory has ended


@cache
def load(name: str) -> ctypes.CDLL | None:
    """Load the library of `name`.cpp, compiled if necessary. If that fails, log the reason and return None."""
    source = CSRC / f"{name}.cpp"
    try:
        library = compile_source(source)
        try:
            return ctypes.CDLL(str(library))
        finally:
            if library.parent.name.startswith(COMPILING):
                shutil.rmtree(library.parent, ignore_errors=True)  # a loaded library does not need its file
    except OSError as error:
        logger.info("%s could not be built or loaded, so PyTorch is used in its place: %s", source.name, error)
        return None


def compile_source(source: Path) -> Path:
    """Compile a C++ file, unless the cache has its library, and return the path of the library.

    A cached library is used again if source, headers, compiler, flags and CPU are the same. Without a cache, the
    library lies in a temporary directory of its own, which `load` removes after loading, or else the end of the
    process. Raises `OSError` if there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr
    headers = [header.read_text() for header in sorted(CSRC.glob("*.h"))]
    inputs = (source.read_text(), *headers, version, *flags, describe_cpu())
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    name = f"{source.stem}-{key}.so"
    cache_path = prepare_cache()
    if cache_path is not None and (cache_path / name).exists():
        return cache_path / name
    directory = Path(tempfile.mkdtemp(prefix=COMPILING, dir=cache_path))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    unfinished = directory / name
    often = "once" if cache_path is not None else "at each start, because no cache directory can be written"
    logger.info("compiling %s for this CPU (up to about %d seconds, %s)", source.name, COMPILE_SECONDS, often)
    command = [compiler, *flags, f"-I{CSRC}", str(source), "-o", str(unfinished)]
    # The compiler's temporary files go to the same directory, so that none of them is left behind either.
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(directory)})
    if result.returncode != 0:
        shutil.rmtree(directory, ignore_errors=True)
        lines = result.stderr.splitlines()
        raise OSError(next((line for line in lines if "error" in line), f"{compiler} failed"))
    if cache_path is None:
        return unfinished
    unfinished.replace(cache_path / name)
    shutil.rmtree(directory, ignore_errors=True)
    return cache_path / name


def prepare_cache() -> Path | None:
    """`$XDG_CACHE_HOME/forwardscope`, made if necessary; None if it cannot be written.

    Also removes the directories that killed processes left in it, or in the temporary directory if there is no cache.
    """
    directory = None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(home) / "forwardscope"
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        directory = None
    if directory is None:
        remove_stale(Path(tempfile.gettempdir()), f"{COMPILING}*")
    else:
        remove_stale(directory, "*")  # libraries are files: only processes that compile make directories here
    return directory


def remove_stale(parent: Path, pattern: str) -> None:
    """Remove matching directories that are so old that the process that compiled in them must have ended."""
    oldest = time.time() - STALE_SECONDS
    for path in parent.glob(pattern):
        with suppress(OSError):  # the directory is another user's, or another process removes it at the same time
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def describe_cpu() -> str:
    """A description of the CPU: everything that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
