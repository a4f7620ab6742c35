"""A wheel holds the compiled kernels, and an installation from it runs them without a compiler."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from model import __version__
from model.ops.cpu import build, instruction_levels, libraries
from tests.conftest import source_tree
from tests.kernels import package_kernels

pytestmark = pytest.mark.slow
ROOT = source_tree()
STATUS = "from model.ops.cpu import libraries; print(libraries.__file__); print(libraries.kernel_status())"


def make_wheel(checkout: Path, levels: str) -> Path:
    to = ["--wheel-dir", str(checkout / levels), str(checkout)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *to]
    # `CXX` keeps Zig, a large download, away.
    environment = os.environ | {"KERNEL_LEVELS": levels, "CXX": "c++"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "No matching distribution found for setuptools" in result.stderr:
        pytest.skip("pip cannot download setuptools")
    assert result.returncode == 0, result.stderr
    (wheel,) = (checkout / levels).iterdir()
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the kernels of the tests where the build would compile them."""
    if libraries.load("thread_pool") is None:
        pytest.skip("there are no kernels for this machine")
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("forwardscope", "model", "service"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.pt"))
    stale = checkout / "build/lib" / build.SHIPPED.relative_to(ROOT)
    package_kernels(stale)
    shutil.copy(next(stale.glob("linear-*.so")), stale / "linear-old-0123456789abcdef.so")
    return checkout


def test_an_installed_wheel_runs_its_kernels_without_a_compiler_and_a_cache(checkout: Path, tmp_path: Path) -> None:
    level = instruction_levels.chosen_level()
    assert level is not None
    wheel = make_wheel(checkout, "own")
    assert wheel.name == f"forwardscope-{__version__}-py3-none-linux_{platform.machine()}.whl"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel)]
    subprocess.run(install, check=True, timeout=100)
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": "/proc/nothing"}
    found = subprocess.run(
        [sys.executable, "-c", STATUS], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        str(tmp_path / "model/ops/cpu/libraries.py"),
        str(libraries.KernelStatus(level.name, "package", None)),
    ]
    assert found.stderr == ""  # nothing was compiled, and no library of another source was packaged
    assert len(list((tmp_path / "model/ops/cpu/libraries").iterdir())) == len(list(build.CSRC.glob("*.cpp")))


def test_a_wheel_without_kernels_is_for_any_system(checkout: Path) -> None:
    wheel = make_wheel(checkout, "none")
    assert wheel.name == f"forwardscope-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_a_wheel_for_another_machine_has_all_levels_of_that_machine_and_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheels = pytest.importorskip("model.ops.cpu.wheels", reason="needs setuptools 77 to build a wheel")
    for machine, target in instruction_levels.TARGETS.items():
        monkeypatch.setenv("KERNEL_LEVELS", "all")
        monkeypatch.setenv("KERNEL_MACHINE", machine)
        assert wheels.levels() == target.levels
        tag = wheels.WheelWithKernels.get_tag(None)
        assert tag == ("py3", "none", "macosx_11_0_arm64" if machine == "arm64" else f"manylinux_2_28_{machine}")
        monkeypatch.setenv("KERNEL_LEVELS", "own")
        with pytest.raises(ValueError, match="KERNEL_MACHINE has no effect with KERNEL_LEVELS=own; set KERNEL_LEVELS"):
            wheels.levels()
    monkeypatch.setenv("KERNEL_MACHINE", "riscv64")
    with pytest.raises(ValueError, match="KERNEL_MACHINE is 'riscv64'; take x86_64, aarch64, arm64"):
        wheels.target()


FORMATS = {  # the first bytes of a library, up to the number of the processor
    "x86_64": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00",
    "aarch64": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xb7\x00",
    "arm64": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
}


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "target"), instruction_levels.TARGETS.items())
def test_libraries_for_every_machine_need_its_c_library_alone_and_are_equal_in_every_build(
    tmp_path: Path, machine: str, target: instruction_levels.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if build.find_zig(target) is None:
        pytest.skip("needs `pip install ziglang`")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    shutil.copytree(source_tree() / "model/ops/cpu/csrc", build.CSRC)
    for source in build.CSRC.glob("*.cpp"):
        if source.stem not in ("thread_pool", "sampling"):  # one with threads, one with variables of threads
            source.unlink()
    (tmp_path / "first").mkdir()
    for another in instruction_levels.TARGETS.values():  # whose libraries are not taken for those of the target
        for source in build.CSRC.glob("*.cpp"):
            for level in another.levels if another != target else ():
                library = tmp_path / "first" / build.library_name(source, level, another)
                library.write_bytes(b"of another machine")
                build.seal(library)
    for directory in ("first", "second"):
        build.compile_all(tmp_path / directory, target.levels[-1:], target)
    first, second = (sorted((tmp_path / directory).iterdir()) for directory in ("first", "second"))
    assert [path.name for path in first] == [path.name for path in second]
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        content = one.read_bytes()
        assert content == other.read_bytes()
        assert content.startswith(FORMATS[machine])
        assert b"libc++" not in content
        assert b"libstdc++" not in content
        assert (b"/usr/lib/libSystem.B.dylib" in content) == (machine == "arm64")
        assert str(tmp_path).encode() not in content
