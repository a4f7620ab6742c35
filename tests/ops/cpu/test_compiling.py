"""Compiling leaves only libraries in the cache, and no files elsewhere."""

import ctypes
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from model.ops.cpu import build, instruction_levels

pytestmark = pytest.mark.compiles
ROOT = Path(__file__).resolve().parents[3]
SOURCE = 'extern "C" int answer() { return 42; }'
OLD_SECONDS = 2 * 3600
LOAD = """
import os, signal, sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from model.ops.cpu import build, libraries

build.CSRC = Path(sys.argv[1])
library = libraries.load("answer")
assert library.answer() == 42  # a loaded library works after its file is removed
sys.stdout.write("loaded")
sys.stdout.flush()
if sys.argv[2] == "os._exit":
    os._exit(0)
if sys.argv[2] == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
"""
SLOW_COMPILER = """#!/bin/sh
[ "$1" = -v ] && exit
echo half > "$TMPDIR/half.s"
exec sleep 60
"""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiler of the system, and no other one."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "find_zig", lambda: None)
    found = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with one small source, different for each test: a process loads a library only once."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text(f"{SOURCE} // {tmp_path}")
    return tmp_path / "sources"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and of the processes that it starts."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "temporary"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "forwardscope").mkdir(parents=True)
    return tmp_path / "cache" / "forwardscope"


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")


def aged(path: Path, *, is_folder: bool = True) -> Path:
    """Make a folder with a file in it, or a file, that is two hours old."""
    if is_folder:
        path.mkdir()
        (path / "half.so").touch()
    else:
        path.touch()
    then = time.time() - OLD_SECONDS
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("end", ["return", "os._exit", "SIGKILL"])
def test_without_a_cache_no_file_is_left_however_the_process_ends(
    sources: Path, temporary: Path, no_cache: None, end: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(sources), end], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "loaded", ended.stderr
    assert ended.returncode == (-signal.SIGKILL if end == "SIGKILL" else 0)
    assert list(temporary.iterdir()) == []


def test_without_a_cache_a_library_that_is_never_loaded_is_removed_when_the_process_ends(
    sources: Path, temporary: Path, no_cache: None
) -> None:
    code = (
        "import sys; from pathlib import Path; from model.ops.cpu import build;"
        "assert build.compile_source(Path(sys.argv[1], 'answer.cpp')).exists()"
    )
    subprocess.run([sys.executable, "-c", code, str(sources)], cwd=ROOT, check=True, timeout=120)
    assert list(temporary.iterdir()) == []


def test_the_cache_holds_only_the_library(sources: Path, temporary: Path, cache: Path) -> None:
    library = build.compile_source(sources / "answer.cpp")
    assert list(cache.iterdir()) == [library]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("is_prebuilt", [False, True])
def test_a_damaged_library_is_compiled_again(
    sources: Path, tmp_path: Path, cache: Path, compiler: str, is_prebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loads a part of a library, as after a crash of the system, would end with SIGBUS."""
    if is_prebuilt:
        monkeypatch.setattr(build, "CSRC", sources)
        monkeypatch.setattr(build, "SHIPPED", tmp_path / "prebuilt")
        monkeypatch.setenv("CXX", compiler)
        build.compile_all(build.SHIPPED)
    library = build.compile_source(sources / "answer.cpp")
    assert library.is_relative_to(tmp_path / "prebuilt") == is_prebuilt
    whole = library.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:20], whole[:middle], whole[:-1], whole[:middle] + b"?" + whole[middle + 1 :]):
        library.unlink()  # this process has loaded it
        library.write_bytes(damaged)
        again = build.compile_source(sources / "answer.cpp")
        assert again.is_relative_to(cache)
        assert ctypes.CDLL(str(again)).answer() == 42


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_failing_compiler_leaves_no_files(
    sources: Path, temporary: Path, cache: Path, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cache:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    (sources / "answer.cpp").write_text("this is not C++")
    with pytest.raises(OSError, match="error"):
        build.compile_source(sources / "answer.cpp")
    assert list(cache.iterdir()) == list(temporary.iterdir()) == []


def kill_while_it_compiles(sources: Path, tmp_path: Path) -> None:
    """Start a process that compiles, and kill it while its compiler runs."""
    compiler = tmp_path / "compiler"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from model.ops.cpu import build;"
        "build.COMPILERS = (sys.argv[2],); build.compile_source(Path(sys.argv[1], 'answer.cpp'))"
    )
    command = [sys.executable, "-c", code, str(sources), str(compiler)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    for _ in range(600):
        if list(tmp_path.rglob("half.s")):
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)  # kills the compiler too, as when a container is killed
    process.wait()


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_files_of_a_killed_process_are_removed_by_a_later_process(
    sources: Path, tmp_path: Path, temporary: Path, cache: Path, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cache:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    kill_while_it_compiles(sources, tmp_path)
    used, unused = (cache, temporary) if has_cache else (temporary, cache)
    assert list(unused.iterdir()) == []
    (left_behind,) = used.iterdir()
    build.compile_source(sources / "answer.cpp")
    assert left_behind.exists(), "a new folder is kept, since its process may still run"
    then = time.time() - OLD_SECONDS
    os.utime(left_behind, (then, then))
    build.compile_source(sources / "answer.cpp")
    assert not left_behind.exists()


def test_only_old_folders_are_removed_from_the_cache(sources: Path, tmp_path: Path, cache: Path) -> None:
    stale = [
        aged(cache / "tmp8_kq2x1z"),
        aged(cache / f"{build.COMPILING}8_kq2x1z"),
    ]  # the first name is that of earlier versions
    library = aged(cache / "linear-0123456789abcdef.so", is_folder=False)
    elsewhere = aged(tmp_path / "elsewhere")
    link = cache / "link"
    link.symlink_to(elsewhere)
    then = time.time() - OLD_SECONDS
    os.utime(link, (then, then), follow_symlinks=False)
    fresh = cache / f"{build.COMPILING}fresh"
    fresh.mkdir()
    build.compile_source(sources / "answer.cpp")
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in (library, link, fresh, elsewhere / "half.so"))


def test_folders_of_other_programs_in_the_temporary_folder_are_kept(
    sources: Path, temporary: Path, no_cache: None
) -> None:
    others = [aged(temporary / name) for name in ("tmp8_kq2x1z", "forwardscope-data", "forwardscope")]
    stale = aged(temporary / f"{build.COMPILING}8_kq2x1z")
    build.compile_source(sources / "answer.cpp")
    assert not stale.exists()
    assert all((path / "half.so").exists() for path in others)


@pytest.mark.parametrize("has_cache", [True, False])
def test_log_lines_come_before_and_after_each_compilation_and_only_then(
    sources: Path,
    temporary: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_cache: bool,
) -> None:
    if not has_cache:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr(build, "CSRC", sources)
    with caplog.at_level("INFO"):
        build.compile_source(sources / "answer.cpp")
        build.compile_source(sources / "answer.cpp")
    often = "once" if has_cache else "at each start, because no cache directory can be written"
    level = instruction_levels.chosen_level()
    assert level is not None
    before = f"compiling answer.cpp for {level.name} (up to about 10 seconds, {often})"
    after = re.compile(rf"compiled answer\.cpp for {level.name} in \d+\.\d seconds")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[::2] == [before] * (1 if has_cache else 2)
    assert len(lines[1::2]) == len(lines[::2])
    assert all(map(after.fullmatch, lines[1::2]))


LEVEL_SOURCE = """
#if defined(__AMX_TILE__)
#define NAME "amx"
#elif defined(__AVX512BF16__)
#define NAME "avx512-bf16"
#elif defined(__AVX512VNNI__)
#define NAME "avx512-vnni"
#elif defined(__AVX512F__)
#define NAME "avx512"
#elif defined(__AVXVNNI__)
#define NAME "avx2-vnni"
#elif defined(__AVX2__) && defined(__FMA__)
#define NAME "avx2"
#endif
extern "C" const char* level() { return NAME; }
"""

# Writes half of the library, as when the disk is full. It knows no version (`-v`).
FAILING_COMPILER = """#!/bin/sh
for file; do :; done
[ "$file" = -v ] && exit 1
echo half > "$file"
echo "error: no space left on device" >&2
exit 1
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86 CPUs")
class TestInstructionLevels:
    @pytest.fixture(autouse=True)
    def prebuilt(self, tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A directory with the library of one small source for all levels."""
        sources = tmp_path / "levels"
        sources.mkdir()
        (sources / "level.cpp").write_text(f"{LEVEL_SOURCE}// {tmp_path}")
        monkeypatch.setattr(build, "CSRC", sources)
        monkeypatch.delenv("CXXFLAGS", raising=False)
        monkeypatch.delenv(instruction_levels.VARIABLE, raising=False)
        monkeypatch.setattr(build, "SHIPPED", tmp_path / "prebuilt")
        with monkeypatch.context() as patch:
            patch.setenv("CXX", compiler)
            build.main(["--all", str(build.SHIPPED)])
        return build.SHIPPED

    @pytest.fixture(autouse=True)
    def _other_cpus(self) -> Iterator[None]:
        instruction_levels.cpu_features.cache_clear()
        yield
        instruction_levels.cpu_features.cache_clear()

    @staticmethod
    def emulate_cpu(
        features: Iterable[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str = "AuthenticAMD"
    ) -> None:
        processor = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu sse2 {' '.join(features)}\n"
        (tmp_path / "cpuinfo").write_text(processor)
        monkeypatch.setattr(instruction_levels, "CPU_INFO", tmp_path / "cpuinfo")

    @pytest.mark.parametrize("level", instruction_levels.LEVELS, ids=lambda level: level.name)
    def test_without_a_compiler_the_prebuilt_library_of_the_best_level_of_the_cpu_is_loaded(
        self,
        level: instruction_levels.InstructionLevel,
        prebuilt: Path,
        tmp_path: Path,
        cache: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(build, "COMPILERS", ())
        self.emulate_cpu(level.cpu_features, tmp_path, monkeypatch)
        library = build.compile_source(build.CSRC / "level.cpp")
        assert library.parent == prebuilt
        describe = ctypes.CDLL(str(library)).level
        describe.restype = ctypes.c_char_p
        assert describe() == level.name.encode()
        assert list(cache.iterdir()) == []

    def test_an_interrupted_run_leaves_no_incomplete_library_and_a_failed_one_ends_with_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        compiler = tmp_path / "compiler"
        compiler.write_text(FAILING_COMPILER)
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(SystemExit) as ended:
            build.main(["--all", str(tmp_path / "failed")])
        assert ended.value.code == 1
        assert capsys.readouterr().err == "the kernels could not be compiled: error: no space left on device\n"
        assert list((tmp_path / "failed").iterdir()) == []

    def test_a_variable_chooses_a_lower_level_and_a_wrong_name_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.emulate_cpu(instruction_levels.AVX512_VNNI.cpu_features, tmp_path, monkeypatch)
        assert instruction_levels.chosen_level() == instruction_levels.AVX512_VNNI
        monkeypatch.setenv(instruction_levels.VARIABLE, "avx2")
        assert instruction_levels.chosen_level() == instruction_levels.AVX2
        for wrong in ("avx512-bf16", "sse2"):
            monkeypatch.setenv(instruction_levels.VARIABLE, wrong)
            with pytest.raises(ValueError, match=f"'{wrong}', but this CPU has the levels: avx2, avx512, avx512-vnni"):
                instruction_levels.chosen_level()

    @pytest.mark.parametrize("level", instruction_levels.LEVELS, ids=lambda level: level.name)
    def test_intel_cpus_multiply_pairs_of_bfloat16_only_if_a_variable_says_so(
        self, level: instruction_levels.InstructionLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.emulate_cpu(level.cpu_features, tmp_path, monkeypatch, vendor="GenuineIntel")
        pairs, vnni = instruction_levels.AVX512_BF16, instruction_levels.AVX512_VNNI
        assert instruction_levels.chosen_level() == (vnni if level == pairs else level)
        monkeypatch.setenv(instruction_levels.VARIABLE, level.name)
        assert instruction_levels.chosen_level() == level

    def test_a_cpu_without_avx2_has_no_level(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.emulate_cpu(["avx"], tmp_path, monkeypatch)
        assert instruction_levels.chosen_level() is None
        with pytest.raises(OSError, match="neither AVX2"):
            build.compile_source(build.CSRC / "level.cpp")

    def test_prebuilt_libraries_of_another_source_are_not_used(
        self,
        prebuilt: Path,
        tmp_path: Path,
        cache: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self.emulate_cpu(instruction_levels.AVX2.cpu_features, tmp_path, monkeypatch)
        source = build.CSRC / "level.cpp"
        source.write_text(source.read_text() + "// changed")
        with caplog.at_level(logging.INFO):
            assert build.compile_source(source).parent == cache
        compiling, compiled = (record.message for record in caplog.records[-2:])
        assert compiling.startswith("compiling level.cpp for avx2")
        assert re.fullmatch(r"compiled level\.cpp for avx2 in \d+\.\d seconds", compiled)


class ArmSystem:
    """The functions of an ARM system's C library that tell what the processor has."""

    def __init__(self, features: set[str], numbers: dict[int, int]) -> None:
        self.features = {f"hw.optional.arm.FEAT_{name}".encode() for name in features}
        self.getauxval = Mock(side_effect=numbers.get)

    def sysctlbyname(self, name: bytes, number: Any, size: Any, _new: None, _new_size: Any) -> int:
        assert size._obj.value == 4
        number._obj.value = int(name in self.features)
        return 0 if name in self.features else -1


@pytest.mark.parametrize(
    ("system", "machine", "library", "level"),
    [
        ("darwin", "arm64", ArmSystem(set(), {}), "neon-dotprod"),
        ("darwin", "arm64", ArmSystem({"I8MM"}, {}), "neon-dotprod"),
        ("darwin", "arm64", ArmSystem({"BF16", "I8MM"}, {}), "neon-bf16"),
        ("linux", "aarch64", ArmSystem(set(), {16: 1 << 1, 26: 0}), "neon"),
        ("linux", "aarch64", ArmSystem(set(), {16: 1 << 1 | 1 << 20, 26: 1 << 13}), "neon-dotprod"),
        ("linux", "aarch64", ArmSystem(set(), {16: 1 << 1 | 1 << 20, 26: 1 << 13 | 1 << 14}), "neon-bf16"),
    ],
)
def test_the_level_of_an_arm_processor_depends_on_its_features(
    system: str, machine: str, library: ArmSystem, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(instruction_levels.VARIABLE, raising=False)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(instruction_levels, "LEVELS", instruction_levels.TARGETS[machine].levels)
    instruction_levels.cpu_features.cache_clear()
    try:
        chosen = instruction_levels.chosen_level()
    finally:
        instruction_levels.cpu_features.cache_clear()
    assert chosen is not None
    assert chosen.name == level
