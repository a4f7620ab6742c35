"""Compile the C++ files in `csrc` for the instructions of this CPU, once, and load them as libraries.

Flags in the environment variable `CXXFLAGS` follow our own.

`python -m model.ops.cpu.build --all DIRECTORY` compiles all files for all instruction levels into a directory. If the
environment variable `KERNEL_LIBRARIES` names that directory, its libraries are used, and no compiler is needed.

Libraries are otherwise kept in a cache directory. If that directory cannot be written, each library is compiled into a
temporary directory, which is removed as soon as the library is loaded. A process that is killed while it compiles
leaves a directory behind; a later start removes that directory. This module does not know what the libraries compute.
"""

import argparse
import atexit
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from model.ops.cpu.instruction_levels import LEVELS, InstructionLevel, chosen_level

logger = logging.getLogger(__name__)

# -fno-tree-pre: otherwise GCC 12 keeps some of the sums of a product in memory instead of registers.
# -ffp-contract=off: otherwise the compiler fuses products and sums in some places and not in others, and bits differ.
FLAGS = ("-O3", "-fno-tree-pre", "-ffp-contract=off", "-std=c++20", "-pthread", "-shared", "-fPIC")
COMPILERS = ("g++", "c++")
LIBRARIES = "KERNEL_LIBRARIES"  # environment variable: a directory of libraries that were compiled before
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
    """Compile a C++ file, unless it was compiled before, and return the path of the library.

    A library in the directory of `KERNEL_LIBRARIES` is used if source, headers and flags are the same; one in the
    cache, if the compiler is the same, too. Without a cache, the library lies in a temporary directory of its own.
    `load` removes that directory after loading, or else the end of the process does. Raises `OSError` if this CPU has
    no instruction level, if there is no compiler, or if it fails.
    """
    level = chosen_level()
    if level is None:
        raise OSError("this CPU has neither AVX-512 nor AVX2 (with FMA and F16C)")
    compiled_before = os.environ.get(LIBRARIES)
    if compiled_before and is_whole(library := Path(compiled_before, library_name(source, level))):
        return library
    compiler = find_compiler()
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr
    name = library_name(source, level, version)
    cache_path = prepare_cache()
    if cache_path is not None and is_whole(cache_path / name):
        return cache_path / name
    directory = Path(tempfile.mkdtemp(prefix=COMPILING, dir=cache_path))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    often = "once" if cache_path is not None else "at each start, because no cache directory can be written"
    logger.info("compiling %s for %s (up to about %d seconds, %s)", source.name, level.name, COMPILE_SECONDS, often)
    try:
        run_compiler(compiler, source, level, directory / name)
        if cache_path is None:
            return directory / name
        (directory / name).replace(cache_path / name)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return cache_path / name


def compile_all(directory: Path) -> None:
    """Compile all files for all levels into a directory. Raises `OSError` if there is no compiler, or it fails.

    A library gets its name only when it is complete, so an interrupted run leaves no broken library with a right name.
    """
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=COMPILING, dir=directory) as unfinished,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):

        def compile_one(source: Path, level: InstructionLevel) -> None:
            name = library_name(source, level)
            run_compiler(compiler, source, level, Path(unfinished, name))
            Path(unfinished, name).replace(directory / name)

        sources = sorted(CSRC.glob("*.cpp"))
        tasks = [threads.submit(compile_one, source, level) for level in LEVELS for source in sources]
        try:
            for task in tasks:
                task.result()
        except OSError:
            threads.shutdown(cancel_futures=True)
            raise


def find_compiler() -> str:
    """The path of a C++ compiler. Raises `OSError` if there is none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    return compiler


def library_name(source: Path, level: InstructionLevel, compiler_version: str = "") -> str:
    """The name of a library's file. It depends on everything that its content depends on."""
    headers = [header.read_text() for header in sorted(CSRC.glob("*.h"))]
    inputs = (source.read_text(), *headers, compiler_version, *compiler_flags(level))
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    return f"{source.stem}-{level.name}-{key}.so"


def compiler_flags(level: InstructionLevel) -> list[str]:
    return [*FLAGS, *level.compiler_flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def run_compiler(compiler: str, source: Path, level: InstructionLevel, library: Path) -> None:
    """Compile a file. The compiler's temporary files lie next to the library, so that none is left elsewhere."""
    command = [compiler, *compiler_flags(level), f"-I{CSRC}", str(source), "-o", str(library)]
    environment = os.environ | {"TMPDIR": str(library.parent)}
    start = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        raise OSError(next((line for line in lines if "error" in line), f"{compiler} failed"))
    seal(library)
    logger.info("compiled %s for %s in %.1f seconds", source.name, level.name, time.monotonic() - start)


def seal(library: Path) -> None:
    """Append the hash of a library to its file, and write it to the disk. When it is loaded, the hash is ignored."""
    with library.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def is_whole(library: Path) -> bool:
    """Whether a library has been written completely. Loading a part of one would end the process.

    Logs that a file is damaged. There is no log line if there is no file that can be read.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = len(content) - hashlib.sha256().digest_size
    if size > 0 and hashlib.sha256(content[:size]).digest() == content[size:]:
        return True
    logger.warning("%s is damaged, or of an earlier version; it is compiled again", library)
    return False


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: compile all files for all instruction levels."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--all", type=Path, required=True, metavar="DIRECTORY", help="where the libraries are written")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        compile_all(parser.parse_args(arguments).all)
    except OSError as error:
        parser.exit(1, f"the kernels could not be compiled: {error}\n")


if __name__ == "__main__":
    main()
