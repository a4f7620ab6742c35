"""Compile the C++ files in `csrc` for the instructions of this CPU, unless an installed package has them compiled.

Wheels hold libraries of these files in `SHIPPED` (`wheels.py`). A file that has none there, as in an editable install
or after a change of the source, is compiled once, and its library is kept in a cache directory. If that directory
cannot be written, each library is compiled into a temporary directory, which is removed as soon as the library is
loaded. A process that is killed while it compiles leaves a directory behind; a later start removes that directory.

The environment variable `CXX` names the compiler, and flags in `CXXFLAGS` follow our own.
`python -m model.ops.cpu.build --all DIRECTORY` compiles all files for all instruction levels into a directory. This
module does not know what the libraries compute.
"""

import argparse
import atexit
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from model.ops.cpu.instruction_levels import LEVELS, InstructionLevel, Target, chosen_level, this_target

logger = logging.getLogger(__name__)

# -ffp-contract=off: otherwise the compiler fuses products and sums in some places and not in others, and bits differ.
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++20", "-pthread", "-fPIC")
COMPILERS = ("g++", "c++")
GCC_FLAG = "-fno-tree-pre"  # otherwise GCC 12 keeps some of the sums of a product in memory instead of registers
MACOS_FLAG = "-mmacosx-version-min=11.0"  # the oldest macOS with Apple silicon, as the tag of wheels says
ZIG = "ziglang==0.17.*"  # with which what is shipped was measured
CSRC = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / "libraries"  # of an installed package; not there in a checkout
# Environment variables: where compilers put temporary files, and Zig what it has compiled of C's library.
TEMPORARY = ("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
COMPILE_SECONDS = 10  # about what the slowest file takes; only logged
COMPILING = "forwardscope-compiling-"  # prefix of the directories in which processes compile
STALE_SECONDS = 3600.0  # far longer than a compiler takes: the process that made an older directory has ended


@dataclass(frozen=True)
class Compiler:
    """The commands of a compiler: `command` with `flags` compiles a file, and `link` makes a library.

    `naming` is the start of the option for the name that is written into a library, if there is one. On macOS, it would
    otherwise be the path at which the library is made, so no two builds would be equal.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    link: tuple[str, ...]
    naming: str | None = None
    is_zig: bool = False


def compile_source(source: Path) -> Path:
    """Compile a C++ file, unless it was compiled before, and return the path of the library.

    A library of the package is used if source, headers and our flags are the same; one in the cache, if the compiler
    and `CXXFLAGS` are the same, too. Without a cache, the library lies in a temporary directory of its own. `load`
    removes that directory after loading, or else the end of the process does. Raises `OSError`, which says what to do,
    if this CPU has no instruction level, if there is no compiler, or if it fails.
    """
    if sys.platform != "linux" and this_target() is None:
        raise OSError(
            "they are for Linux, and for macOS on Apple silicon; run the server there, in WSL 2 or in a container"
        )
    level = chosen_level()
    if level is None:
        raise OSError("this CPU has neither AVX2 (with FMA and F16C) nor 64-bit NEON; use one that has either")
    target = this_target()
    if is_whole(library := SHIPPED / library_name(source, level, target)):
        return library
    level = replace(level, compiler_flags=(*level.compiler_flags, *shlex.split(os.environ.get("CXXFLAGS", ""))))
    compiler = find_compiler()
    name = library_name(source, level, target, " ".join((*compiler.flags, version_of(compiler.command))))
    cache_path = prepare_cache()
    if cache_path is not None and is_whole(cache_path / name):
        return cache_path / name
    often = "once" if cache_path is not None else "at each start, because no cache directory can be written"
    logger.info("compiling %s for %s (up to about %d seconds, %s)", source.name, level.name, COMPILE_SECONDS, often)
    with ExitStack() as cleanup:
        directory = tempfile.TemporaryDirectory(prefix=COMPILING, dir=cache_path, ignore_cleanup_errors=True)
        library = Path(cleanup.enter_context(directory), name)
        run_compiler(compiler, source, level, library)
        if cache_path is not None:
            return library.replace(cache_path / name)
        atexit.register(cleanup.pop_all().close)
        return library


def compile_all(directory: Path, levels: Sequence[InstructionLevel] = LEVELS, target: Target | None = None) -> None:
    """Compile all files for some levels into a directory of libraries to ship, and remove other libraries from it.

    The levels are those of `target`, for which Zig can compile on any machine; None stands for this machine.

    Intact libraries of the same sources and flags are kept. `CXXFLAGS` has no effect: libraries are shipped with our
    flags alone. A library gets its name only when it is complete, so an interrupted run leaves no broken library with a
    right name. Raises `OSError` if there is no compiler, or it fails.
    """
    target = target or this_target()
    sources = [(source, level) for level in levels for source in CSRC.glob("*.cpp")]
    libraries = {library_name(source, level, target): (source, level) for source, level in sources}
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.so"):
        if path.name not in libraries:
            path.unlink()
    missing = sorted(name for name in libraries if not is_whole(directory / name))
    if not missing:
        return
    compiler = find_shipping_compiler(target)
    with (
        tempfile.TemporaryDirectory(prefix=COMPILING, dir=directory) as unfinished,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):

        def compile_one(name: str) -> None:
            run_compiler(compiler, *libraries[name], Path(unfinished, name))
            Path(unfinished, name).replace(directory / name)

        list(threads.map(compile_one, missing))  # after an error, the files that are not begun are left out


def find_compiler() -> Compiler:
    """A C++ compiler: `CXX`, one of `COMPILERS`, or Zig. Raises `OSError` if there is none.

    On macOS, Zig comes first: programs with the names of compilers are there, too, if Apple's tools are not installed.
    """
    if wanted := find_wanted():
        return wanted
    if sys.platform == "darwin" and (zig := find_zig()):
        return zig
    if path := next(filter(None, map(shutil.which, COMPILERS)), None):
        return system_compiler((path,))
    if zig := find_zig():
        return zig
    raise OSError("there is no C++ compiler; install the package from its wheel, or run `pip install ziglang`")


def find_shipping_compiler(target: Target | None) -> Compiler:
    """The compiler for libraries that are shipped: `CXX` or Zig. Raises `OSError` if there is none."""
    if compiler := find_wanted() or find_zig(target):
        return compiler
    raise OSError(f"there is no Zig; run `pip install '{ZIG}'`, or name another compiler in the variable CXX")


def find_wanted() -> Compiler | None:
    """The compiler that the variable `CXX` names; None without one. Raises `OSError` if its program does not exist."""
    wanted = tuple(shlex.split(os.environ.get("CXX", "")))
    if wanted and shutil.which(wanted[0]) is None:
        raise OSError(f"there is no compiler {wanted[0]!r}, which the variable CXX names; correct or unset it")
    return system_compiler(wanted) if wanted else None


def system_compiler(command: tuple[str, ...]) -> Compiler:
    """A compiler of this machine, which also links."""
    flags = [GCC_FLAG] if "gcc version" in version_of(command) else []
    if sys.platform == "darwin":
        flags.append(MACOS_FLAG)
    return Compiler(command, tuple(flags), command)


@cache
def version_of(command: tuple[str, ...]) -> str:
    """The text in which a compiler says its name and its version."""
    return subprocess.run([*command, "-v"], capture_output=True, text=True).stderr


def find_zig(target: Target | None = None) -> Compiler | None:
    """The Clang of PyPI's package `ziglang`, for the oldest system of a target (None: of this machine).

    Libraries are linked with C's library alone: see `csrc/cxx_library.h`. Returns None if the package is not installed,
    or if there is no target.
    """
    package, target = importlib.util.find_spec("ziglang"), target or this_target()
    if package is None or package.origin is None or target is None:
        return None
    zig, for_target = str(Path(package.origin).with_name("zig")), ("-target", target.zig)
    flags = ("-DWITHOUT_CXX_LIBRARY", "-fno-exceptions", "-fvisibility-global-new-delete=force-hidden")
    naming = "-Wl,-install_name,@rpath/" if target.system == "darwin" else None
    return Compiler((zig, "c++", *for_target), flags, (zig, "cc", *for_target, "-s"), naming, is_zig=True)


def library_name(source: Path, level: InstructionLevel, target: Target | None, compiler: str = "") -> str:
    """The name of a library's file. It depends on everything that its content depends on."""
    headers = [header.read_text() for header in sorted(CSRC.glob("*.h"))]
    system = "" if target is None else target.zig
    inputs = (source.read_text(), *headers, system, compiler, *FLAGS, *level.compiler_flags)
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    return f"{source.stem}-{level.name}-{key}.so"


def run_compiler(compiler: Compiler, source: Path, level: InstructionLevel, library: Path) -> None:
    """Compile a file. The compiler's temporary files lie next to the library, so that none is left elsewhere."""
    compiled = str(library.with_suffix(".o"))
    flags = [*FLAGS, *level.compiler_flags]
    if compiler.is_zig:  # it has no names for the versions of ARM's architecture, but for what they add
        parts = [(flag, *flag.partition("+")[1:]) for flag in flags]
        flags = [f"-mcpu=generic{plus}{more}" if flag.startswith("-march=arm") else flag for flag, plus, more in parts]
    name = [] if compiler.naming is None else [compiler.naming + library.name]
    commands = [
        [*compiler.command, *compiler.flags, *flags, f"-I{CSRC}", "-c", str(source), "-o", compiled],
        [*compiler.link, *flags, *name, "-shared", compiled, "-o", str(library)],
    ]
    environment = os.environ | dict.fromkeys(TEMPORARY, str(library.parent))
    start = time.monotonic()
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        if result.returncode != 0:
            lines = result.stderr.splitlines()
            raise OSError(next((line for line in lines if "error" in line), f"{command[0]} failed"))
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
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(home) / "forwardscope"
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        remove_stale(Path(tempfile.gettempdir()), f"{COMPILING}*")
        return None
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
