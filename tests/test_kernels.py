"""Our own kernels: PyTorch's numbers, whoever else is in the step; and PyTorch's own where they cannot be had."""

import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.generation import GenerationParams
from model.kernels import attention, native
from model.kernels.linear import PackedLinear, kernel_for, pack_linears
from model.sampling import SamplingParams
from service.app import BUNDLED
from tests.service.running import running

SOURCE = Path(native.__file__).with_name("linear.cpp")
SHAPES = [(768, 96, True), (5003, 64, False), (17, 6, True), (1, 2, True), (33, 2050, False), (32, 34, True)]
NUM_ROWS = (1, 2, 11, 12, 13, 25, 40)


def packed_and_plain(dtype: torch.dtype, N: int, K: int, bias: bool) -> tuple[PackedLinear, nn.Linear]:
    kernel = kernel_for(dtype)
    if kernel is None:
        pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
    torch.manual_seed(0)
    plain = nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)
    return PackedLinear(plain, kernel), plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "bias"), SHAPES)
class TestPackedLinear:
    def test_it_is_the_product_to_the_rounding_of_its_dtype(
        self, dtype: torch.dtype, N: int, K: int, bias: bool
    ) -> None:
        packed, plain = packed_and_plain(dtype, N, K, bias)
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, K).to(dtype)
            b = plain.bias.double() if bias else None
            exact = F.linear(x.double(), plain.weight.double(), b)
            # Sums of K products in float32, then one rounding: 2^-24 each, or 2^-9 for bfloat16.
            size = F.linear(x.double().abs(), plain.weight.double().abs(), None if b is None else b.abs())
            bound = size * K * 2**-24 + (exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
            assert ((packed(x).double() - exact).abs() <= bound + 1e-30).all()

    def test_a_row_does_not_depend_on_those_beside_it(self, dtype: torch.dtype, N: int, K: int, bias: bool) -> None:
        packed, _ = packed_and_plain(dtype, N, K, bias)
        x = torch.randn(max(NUM_ROWS), K).to(dtype)
        alone = torch.cat([packed(row[None]) for row in x])
        for num_rows in NUM_ROWS:
            assert torch.equal(packed(x[:num_rows]), alone[:num_rows])

    def test_any_strides_and_any_leading_dims_will_do(self, dtype: torch.dtype, N: int, K: int, bias: bool) -> None:
        packed, _ = packed_and_plain(dtype, N, K, bias)
        x = torch.randn(K, 2, 3).to(dtype)
        turned = x.permute(1, 2, 0)
        assert packed(turned).shape == (2, 3, N)
        assert torch.equal(packed(turned), packed(turned.clone(memory_format=torch.contiguous_format)))
        assert packed(turned[:, :0]).shape == (2, 0, N)


def test_what_does_not_fit_is_refused_before_the_kernel_reads_it() -> None:
    packed, _ = packed_and_plain(torch.float32, 16, 8, False)
    for wrong in (torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, 9)):
        with pytest.raises(ValueError, match="packed layer"):
            packed(wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_of_packed_layers_is_the_same_network(dtype: str) -> None:
    plain, packed = (load_checkpoint(str(BUNDLED), dtype=dtype).model for _ in range(2))
    if not pack_linears(packed):
        pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    ids = torch.randint(4096, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = plain(ids), packed(ids)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # bfloat16 has 8 bits, and each layer rounds
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_other_dtypes_and_odd_sizes_keep_pytorchs_layers() -> None:
    for layer in (nn.Linear(8, 16, dtype=torch.float64), nn.Linear(7, 16, dtype=torch.bfloat16)):
        holder = nn.Sequential(layer)
        assert pack_linears(holder) == 0
        assert holder[0] is layer


def test_the_service_runs_on_either_kernels_and_tells_the_same_of_the_model() -> None:
    answers = []
    for kernels in ("auto", "torch"):
        with running(model="bundled", dtype="float32", kernels=kernels) as service:
            is_packed = isinstance(service.checkpoint.model.head, PackedLinear)
            assert is_packed == (kernels == "auto" and kernel_for(torch.float32) is not None)
            text = service.answer("/generate", prompt="the cat sat on", max_tokens=20, temperature=0)["text"]
            answers.append((text, service.get("/model").json()["parameters"]))
    assert answers[0] == answers[1]


ATTENTION_SHAPES = [(4, 4, 16), (8, 2, 32), (6, 1, 64), (2, 2, 128)]  # H, Hkv, D
BLOCK_SIZE = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "Hkv", "D"), ATTENTION_SHAPES)
class TestStreamAttention:
    LENGTHS = (1, 3, 4, 17, 50, 16)

    @pytest.fixture
    def attend(self, dtype: torch.dtype, H: int, Hkv: int, D: int) -> Callable[..., torch.Tensor]:
        """Attention of some of the streams, whose blocks lie in no order, over pools of keys and values."""
        config = ModelConfig(
            vocab_size=8, d_model=H * D, num_layers=1, num_heads=H, num_kv_heads=Hkv, d_head=D, d_mlp=8
        )
        kernel = attention.kernel_for(config, dtype, torch.device("cpu"))
        if kernel is None:
            pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
        generator = torch.Generator().manual_seed(0)
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in self.LENGTHS)
        order = iter(torch.randperm(num_blocks, generator=generator).tolist())
        self.blocks = [[next(order) for _ in range(-(-n // BLOCK_SIZE))] for n in self.LENGTHS]
        pool = (num_blocks * BLOCK_SIZE, Hkv, D)
        self.keys, self.values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
        self.queries = torch.randn(len(self.LENGTHS), H, D, generator=generator).to(dtype)

        def run(streams: Sequence[int], window: int | None = None) -> torch.Tensor:
            blocks, num_keys = [self.blocks[n] for n in streams], [self.LENGTHS[n] for n in streams]
            queries = self.queries[list(streams)]
            out = torch.full_like(queries, torch.nan)
            read = attention.StreamRead(blocks, num_keys, BLOCK_SIZE)
            read.attend(kernel, queries, self.keys, self.values, window, out)
            return out

        return run

    def slots(self, stream: int) -> list[int]:
        slots = [block * BLOCK_SIZE + place for block in self.blocks[stream] for place in range(BLOCK_SIZE)]
        return slots[: self.LENGTHS[stream]]

    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    def test_it_is_what_the_formula_says(self, attend: Any, dtype: torch.dtype, window: int | None) -> None:
        found = attend(range(len(self.LENGTHS)), window)
        for stream in range(len(self.LENGTHS)):
            slots = self.slots(stream)[-window:] if window else self.slots(stream)
            q, k, v = (self.queries[stream].double(), self.keys[slots].double(), self.values[slots].double())
            k, v = (x.repeat_interleave(q.shape[0] // k.shape[1], dim=1) for x in (k, v))  # (S, H, D)
            pattern = (torch.einsum("hd,shd->hs", q, k) * q.shape[1] ** -0.5).softmax(-1)
            exact = torch.einsum("hs,shd->hd", pattern, v)
            tolerance = 2e-6 if dtype == torch.float32 else 2**-8  # of sums in float32, rounded once
            torch.testing.assert_close(found[stream].double(), exact, atol=tolerance, rtol=tolerance)

    def test_a_stream_does_not_depend_on_those_beside_it(self, attend: Any) -> None:
        together = attend(range(len(self.LENGTHS)))
        for stream in range(len(self.LENGTHS)):
            assert torch.equal(attend([stream])[0], together[stream])
        assert torch.equal(attend([3, 1]), together[[3, 1]])

    def test_what_is_no_number_stays_with_whose_it_is(self, attend: Any) -> None:
        expected = attend(range(len(self.LENGTHS)))
        self.keys[self.slots(3)[2]] = torch.nan
        beyond = [block * BLOCK_SIZE + 3 for block in (self.blocks[0][0], self.blocks[1][0])]  # in no stream's keys
        self.keys[beyond] = self.values[beyond] = torch.nan
        found = attend(range(len(self.LENGTHS)))
        assert found[3].isnan().all()
        others = [stream for stream in range(len(self.LENGTHS)) if stream != 3]
        assert torch.equal(found[others], expected[others])

    def test_scores_far_apart_leave_one_value(self, attend: Any) -> None:
        slots = self.slots(4)
        self.keys[slots] = 0
        self.keys[slots[7]] = 200.0
        self.queries[4] = 1.0
        found = attend([4])[0]
        group = found.shape[0] // self.values.shape[1]
        assert torch.equal(found, self.values[slots[7]].repeat_interleave(group, dim=0))


def test_heads_that_are_no_whole_vectors_are_left_to_pytorch() -> None:
    config = ModelConfig(vocab_size=8, d_model=40, num_layers=1, num_heads=2, d_mlp=8)
    assert attention.kernel_for(config, torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_kernels_gives_a_request_the_same_tokens_in_any_company(dtype: str) -> None:
    model = load_checkpoint(str(BUNDLED), dtype=dtype).model
    if not pack_linears(model):
        pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")

    def generate(*seeds: int) -> dict[str, list[int]]:
        engine = Engine(model, None, EngineConfig(cache_bytes=1 << 24))
        for seed in seeds:
            params = GenerationParams(max_tokens=60, sampling=SamplingParams(temperature=0.8, seed=seed))
            engine.add(Request(id=str(seed), prompt_ids=[5 + seed] * (3 + 9 * seed), params=params))
        tokens: dict[str, list[int]] = {str(seed): [] for seed in seeds}
        with torch.inference_mode():
            while engine.can_step:
                for output in engine.step().outputs:
                    tokens[output.request_id] += [token.token_id for token in output.tokens]
        return tokens

    together = generate(*range(8))
    assert {name: generate(int(name))[name] for name in together} == together


class TestCompiling:
    @pytest.fixture(autouse=True)
    def cache_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        if kernel_for(torch.float32) is None:
            pytest.skip("this machine has no AVX-512, or no C++ compiler")
        return tmp_path

    def test_what_was_compiled_once_is_found_again(self, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = native.compile_source(SOURCE)
        assert library.parent == cache_home / "forwardscope"
        assert list(library.parent.iterdir()) == [library]
        calls: list[Any] = []
        run = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command) or run(command, **_))
        assert native.compile_source(SOURCE) == library
        assert all("-o" not in command for command in calls)

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
            (lambda patch: patch.setattr(native, "FLAGS", ("-march=x86-64", *native.FLAGS[2:])), "no AVX-512"),
        ],
    )
    def test_without_it_one_line_says_why_and_pytorchs_layers_stay(
        self, change: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        change(monkeypatch)
        native.load.cache_clear()
        try:
            with caplog.at_level(logging.INFO):
                holder = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
                assert pack_linears(holder) == 0
            assert [why in record.message for record in caplog.records] == [True]
            assert holder(torch.zeros(1, 8)).shape == (1, 8)
        finally:
            native.load.cache_clear()
