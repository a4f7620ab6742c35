"""Compiled once and kept; without a compiler or the instructions, PyTorch's layers stay."""

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.kernels import native
from model.kernels.linear import pack_linears
from model.kernels.operations import use_kernels
from model.quantization import Quantization, quantize_linears
from service.app import BUNDLED
from tests.kernels.common import EMULATED, NO_KERNELS, by_kernels, compiled_for, compiled_with, forget_kernels

SOURCE = Path(native.__file__).with_name("linear.cpp")


class TestCompiling:
    @pytest.fixture(autouse=True)
    def cache_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        if native.kernel("linear", "linear", torch.float32) is None:
            pytest.skip(NO_KERNELS)
        return tmp_path

    def test_what_was_compiled_once_is_found_again(self, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = native.compile_source(SOURCE)
        assert library.parent == cache_home / "forwardscope"
        assert list(library.parent.iterdir()) == [library]
        commands: list[Any] = []
        run = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or run(command, **_))
        assert native.compile_source(SOURCE) == library
        assert all("-o" not in command for command in commands)

    def test_another_source_is_another_library(self, tmp_path: Path) -> None:
        changed = tmp_path / "linear.cpp"
        changed.write_text(SOURCE.read_text() + "\n// changed\n")
        assert native.compile_source(changed).name != native.compile_source(SOURCE).name

    def test_a_cache_that_cannot_be_written_is_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
        assert native.compile_source(SOURCE).exists()

    def test_a_user_without_a_home_has_kernels_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        assert native.compile_source(SOURCE).exists()

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda patch: patch.setattr(native, "COMPILERS", ("no-such-compiler",)), "no C++ compiler"),
            (lambda patch: patch.setenv("CXXFLAGS", "-march=x86-64"), "neither AVX-512 nor AVX2"),
        ],
    )
    def test_without_it_one_line_says_why_and_pytorchs_layers_stay(
        self, change: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load_checkpoint(str(BUNDLED)).model
        change(monkeypatch)
        forget_kernels()
        try:
            with caplog.at_level(logging.INFO):
                assert not use_kernels(model)
            assert [why in record.message for record in caplog.records] == [True]
            assert pack_linears(model) == 0
            assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 4096)
        finally:
            forget_kernels()


@torch.inference_mode()
def logits(dtype: str, quantization: Quantization) -> torch.Tensor:
    model = load_checkpoint(str(BUNDLED), dtype=dtype).model
    quantize_linears(model, quantization)
    return by_kernels(model)(torch.arange(100, 165)[None])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_width_of_the_vectors_changes_no_bit(quantization: Quantization) -> None:
    wide = logits("float32", quantization)
    with compiled_for("AVX2"):
        assert torch.equal(logits("float32", quantization), wide)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_matrix_unit_adds_up_as_the_one_that_stands_in_for_it(quantization: Quantization) -> None:
    if "amx_bf16" not in native.cpu().split():
        pytest.skip("this machine has no AMX")
    own = logits("bfloat16", quantization)
    with compiled_with(EMULATED["amx_bf16"]):
        assert torch.equal(logits("bfloat16", quantization), own)
    with compiled_for("AVX512-BF16"):
        assert not torch.equal(logits("bfloat16", quantization), own)  # so it was the matrix unit
