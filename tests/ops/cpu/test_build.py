"""Kernels are compiled once and cached; without a compiler or vector instructions, PyTorch's layers are used."""

import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.choices import Quantization
from model.ops.cpu import build, instruction_levels, libraries
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import FORMATS
from tests.conftest import source_tree
from tests.kernels import package_kernels
from tests.ops.cpu.common import (
    EMULATED,
    INSTRUCTIONS,
    NO_KERNELS,
    by_kernels,
    compiled_for,
    compiled_with,
    forget_kernels,
)
from tests.ops.cpu.test_grouped_linear import layer_of, random_weight

source_tree()
LEVELS = [  # the kernels for those with a mark are compiled for these tests alone
    pytest.param(level.name, marks=[] if level.name in INSTRUCTIONS else pytest.mark.slow)
    for level in instruction_levels.LEVELS
]


@pytest.mark.compiles
class TestCompiling:
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A small source, and an empty cache."""
        if instruction_levels.chosen_level() is None or not any(map(shutil.which, build.COMPILERS)):
            pytest.skip(NO_KERNELS)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        source = tmp_path / "answer.cpp"
        source.write_text('extern "C" int answer() { return 42; }')
        return source

    def test_a_compiled_library_is_found_in_the_cache(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = build.compile_source(source)
        assert library.parent == tmp_path / "cache" / "forwardscope"
        assert list(library.parent.iterdir()) == [library]
        commands: list[Any] = []
        run = subprocess.run

        def noted(command: Any, **options: Any) -> Any:
            commands.append(command)
            return run(command, **options)

        monkeypatch.setattr(subprocess, "run", noted)
        build.version_of.cache_clear()
        assert build.compile_source(source) == library
        assert commands
        assert all("-o" not in command for command in commands)

    def test_a_changed_source_is_compiled_to_another_library(self, source: Path) -> None:
        library = build.compile_source(source)
        source.write_text(f"{source.read_text()} // changed")
        assert build.compile_source(source).name != library.name

    def test_kernels_are_compiled_without_a_cache_if_it_cannot_be_written(
        self, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
        assert build.compile_source(source).exists()

    def test_kernels_are_compiled_for_a_user_without_a_home(
        self, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        assert build.compile_source(source).exists()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda patch: patch.setenv("CXX", "no-such-compiler"),
                "no compiler 'no-such-compiler', which the variable CXX names",
            ),
            (lambda patch: patch.setattr(build, "chosen_level", lambda: None), "neither AVX2"),
        ],
    )
    def test_without_kernels_one_warning_says_why_and_pytorchs_layers_are_used(
        self, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        change(monkeypatch)
        forget_kernels()
        try:
            model = load_checkpoint(str(BUNDLED), kernels="auto").model
            (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
            assert reason in warning
            assert "PyTorch computes, with one stream up to 16 times slower" in warning
            status = libraries.kernel_status()
            assert (status.level, status.origin) == (None, None)
            assert status.problem is not None
            assert reason in status.problem
            assert model.backend is TORCH
            assert isinstance(model.head, nn.Linear)
            assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 4096)
        finally:
            forget_kernels()


def test_the_status_of_the_kernels_says_whether_all_came_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = instruction_levels.chosen_level()
    if level is None or libraries.load("thread_pool") is None:
        pytest.skip(NO_KERNELS)
    compiled = libraries.KernelStatus(level.name, "compiled", None)
    assert libraries.kernel_status() == compiled
    package_kernels(tmp_path / "package")
    try:
        monkeypatch.setattr(build, "SHIPPED", tmp_path / "package")
        forget_kernels()
        assert libraries.kernel_status() == libraries.KernelStatus(level.name, "package", None)
        next((tmp_path / "package").glob("linear-*")).unlink()
        forget_kernels()
        assert libraries.kernel_status() == compiled
        monkeypatch.setattr(build, "find_compiler", lambda: (_ for _ in ()).throw(OSError("no compiler")))
        forget_kernels()
        assert libraries.kernel_status() == libraries.KernelStatus(level.name, "package", "no compiler")
    finally:
        forget_kernels()


@torch.inference_mode()
def logits(dtype: str, quantization: Quantization) -> torch.Tensor:
    model = load_checkpoint(str(BUNDLED), dtype=dtype).model
    found: torch.Tensor = by_kernels(model, quantization)(torch.arange(100, 165)[None])
    return found


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("level", ["avx2", pytest.param("avx512", marks=pytest.mark.slow)])
def test_networks_in_float32_give_the_same_bits_with_every_width_of_vectors(
    level: str, quantization: Quantization
) -> None:
    own = logits("float32", quantization)
    with compiled_for(level):
        assert torch.equal(logits("float32", quantization), own)


@pytest.mark.slow
def test_without_products_of_bfloat16_networks_give_the_same_bits_with_every_width_of_vectors() -> None:
    with compiled_for("avx2"):
        narrow = logits("bfloat16", "none")
    with compiled_for("avx512"):
        assert torch.equal(logits("bfloat16", "none"), narrow)


def products_in_every_format() -> list[torch.Tensor]:
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1))
    return [layer_of([random_weight(format, 40, 512)], None, torch.float32)(x) for format in FORMATS.values()]


@pytest.mark.parametrize("level", LEVELS)
def test_products_in_every_format_give_the_same_bits_with_every_instruction_level(level: str) -> None:
    own = products_in_every_format()
    with compiled_for(level):
        assert all(map(torch.equal, products_in_every_format(), own))


@pytest.mark.slow
def test_amx_and_its_emulation_give_the_same_bits() -> None:
    if "amx_bf16" not in instruction_levels.cpu_features():
        pytest.skip("this machine has no AMX")
    own = logits("bfloat16", "none")
    with compiled_with(EMULATED["amx_bf16"]):
        assert torch.equal(logits("bfloat16", "none"), own)
    with compiled_for("avx512-bf16"):
        assert not torch.equal(logits("bfloat16", "none"), own)  # the first two did use AMX code
