"""Our own kernels: PyTorch's numbers, whoever else is in the step; and PyTorch's own where they cannot be had."""

import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.attention import CausalMask
from model.checkpoint import load_checkpoint
from model.config import Activation, ModelConfig
from model.engine.engine import Engine, EngineConfig
from model.engine.replay import StreamSteps
from model.engine.request import Request
from model.generation import GenerationParams
from model.kernels import calls, native
from model.kernels.calls import Memory, Recording
from model.kernels.linear import PackedLinear, PackedQuantizedLinear, pack_linears
from model.kernels.operations import NativeOperations, PagedRead, operations_for, use_kernels
from model.operations import PYTORCH
from model.quantization import QuantizedLinear, quantize_int4, quantize_int8
from model.sampling import SamplingParams
from model.stages import Editor, Recorder, stages_of
from model.transformer import Transformer
from service.app import BUNDLED
from tests.service.running import running
from tests.tiny import CONFIGS

DTYPES = [torch.float32, torch.bfloat16]
DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SOURCE = Path(native.__file__).with_name("linear.cpp")
SHAPES = [(768, 96, True), (5003, 64, False), (17, 32, True), (1, 64, True), (33, 2048, False), (32, 32, True)]
NUM_ROWS = (1, 2, 5, 6, 7, 11, 12, 13, 25, 40)
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # of one number


def packed_of(layer: nn.Module) -> Any:
    """The layer by our kernels; skips where there are none."""
    holder = nn.Sequential(layer)
    if not pack_linears(holder):
        pytest.skip("this machine has no AVX-512 for it, or no C++ compiler")
    return holder[0]


def native_operations(dtype: torch.dtype, d_head: int = 16) -> NativeOperations:
    config = ModelConfig(vocab_size=8, d_model=d_head, num_layers=1, num_heads=1, d_head=d_head, d_mlp=8)
    operations = operations_for(config, dtype, torch.device("cpu"))
    if operations is None:
        pytest.skip("this machine has no AVX-512 for it, or no C++ compiler")
    return operations


def packed_and_plain(dtype: torch.dtype, N: int, K: int, bias: bool) -> tuple[PackedLinear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)
    packed = packed_of(plain)
    assert isinstance(packed, PackedLinear)
    return packed, plain


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
@pytest.mark.parametrize(("N", "K", "bias"), SHAPES)
class TestPackedQuantizedLinear:
    def both(self, dtype: torch.dtype, quantize: Any, N: int, K: int, bias: bool) -> tuple[Any, QuantizedLinear]:
        torch.manual_seed(0)
        plain = nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)
        quantized = QuantizedLinear(plain, quantize(plain.weight))
        packed = packed_of(quantized)
        assert isinstance(packed, PackedQuantizedLinear)
        return packed, quantized

    def test_it_is_the_product_of_the_rounded_rows(
        self, dtype: torch.dtype, quantize: Any, N: int, K: int, bias: bool
    ) -> None:
        packed, quantized = self.both(dtype, quantize, N, K, bias)
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, K).to(dtype)
            most = x.float().abs().amax(1, keepdim=True)
            rounded = (x.float() * torch.full_like(most, 127).div(most)).round().double() * (most / 127).double()
            weight = quantized.quantized.dequantize(torch.float64)
            exact = F.linear(rounded, weight, quantized.bias.double() if bias else None)
            # The products of integers are exact; then a few roundings of float32, and one of the dtype.
            bound = F.linear(rounded.abs(), weight.abs()) * 2**-21 + exact.abs() * ROUNDING[dtype] + 1e-6
            assert ((packed(x).double() - exact).abs() <= bound).all()

    def test_a_row_does_not_depend_on_those_beside_it(
        self, dtype: torch.dtype, quantize: Any, N: int, K: int, bias: bool
    ) -> None:
        packed, _ = self.both(dtype, quantize, N, K, bias)
        x = torch.randn(max(NUM_ROWS), K).to(dtype)
        alone = torch.cat([packed(row[None]) for row in x])
        x[3, 5] = torch.nan
        for num_rows in NUM_ROWS:
            found = packed(x[:num_rows])
            others = [row for row in range(num_rows) if row != 3]
            assert torch.equal(found[others], alone[others])
            assert found[3:4].isnan().all()

    def test_a_row_of_zeros_is_the_bias(self, dtype: torch.dtype, quantize: Any, N: int, K: int, bias: bool) -> None:
        packed, _ = self.both(dtype, quantize, N, K, bias)
        expected = packed.bias if bias else torch.zeros(N, dtype=dtype)
        assert torch.equal(packed(torch.zeros(1, K, dtype=dtype))[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_by_kernels_is_the_same_network(dtype: str) -> None:
    plain, packed = (load_checkpoint(str(BUNDLED), dtype=dtype).model for _ in range(2))
    if not use_kernels(packed):
        pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    ids = torch.randint(4096, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = plain(ids), packed(ids)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # bfloat16 has 8 bits, and each layer rounds
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_and_traced_passes_are_the_plain_one_to_the_bit(dtype: str) -> None:
    model = load_checkpoint(str(BUNDLED), dtype=dtype).model
    if not use_kernels(model):
        pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
    ids = torch.randint(4096, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(ids)
        cache = model.new_cache(80, batch=2)
        parts = [model(part, cache) for part in ids.split([40, 1, 1, 20, 3, 5], dim=1)]
        recorder = Recorder(stages_of(model.config))
        traced = model(ids, tap=recorder)
        edited = model(ids, tap=Editor({name: torch.clone for name in recorder.kept if "pattern" not in name}))
    assert torch.equal(torch.cat(parts, dim=1), plain)
    assert torch.equal(traced, plain)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # edited norms and scores are spelled out
    torch.testing.assert_close(edited, plain, atol=tolerance, rtol=tolerance)


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
            assert is_packed == (kernels == "auto" and calls.runner() is not None)
            text = service.answer("/generate", prompt="the cat sat on", max_tokens=20, temperature=0)["text"]
            answers.append((text, service.get("/model").json()["parameters"]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", DTYPES)
class TestOperations:
    """Each against PyTorch's in float64, to the rounding of the dtype."""

    def check(self, found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
        assert found.dtype == dtype
        tolerance = 8 * 2**-23 + ROUNDING[dtype]
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("size", [1, 15, 16, 33, 768])
    @pytest.mark.parametrize("has_bias", [True, False])
    def test_norm(self, dtype: torch.dtype, size: int, has_bias: bool) -> None:
        operations = native_operations(dtype)
        torch.manual_seed(0)
        weight = torch.randn(size).to(dtype)
        bias = torch.randn(size).to(dtype) if has_bias else None
        wide = torch.randn(2, 5, 7, size + 3).to(dtype)
        for x in (wide[0, 0, :, :size], wide[..., :size], wide[:, :, 2:4, :size], wide[0, 0, 0, :size]):
            exact = PYTORCH.norm(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
            self.check(operations.norm(x, weight, bias, 1e-5), exact, dtype)

    @pytest.mark.parametrize("d_head", [2, 16, 64, 72])
    def test_rotary_positions(self, dtype: torch.dtype, d_head: int) -> None:
        operations = native_operations(dtype)
        torch.manual_seed(0)
        positions = torch.tensor([0, 1, 17, 4000])
        frequencies = 1 / 10000 ** (torch.arange(0, d_head, 2) / d_head)
        qkv = torch.randn(2, 4, 6, d_head).to(dtype)
        for x in (qkv[:, :, :3], qkv[:, :, 5:]):
            angles = (positions[:, None] * frequencies).double()  # as float32 has them
            ones = torch.ones_like(angles)
            cos, sin = (torch.cat((turned, turned), -1)[:, None] for turned in (angles.cos(), angles.sin()))
            exact = PYTORCH.rotate(x.double(), (1.25 * cos, 1.25 * sin))
            self.check(operations.rotate(x, operations.rotation(positions, frequencies, 1.25, dtype)), exact, dtype)
            own = frequencies * ones.float()  # each position with frequencies of its own
            self.check(operations.rotate(x, operations.rotation(positions, own, 1.25, dtype)), exact, dtype)

    @pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
    def test_activations(self, dtype: torch.dtype, activation: Activation) -> None:
        operations = native_operations(dtype)
        both = torch.cat((torch.linspace(-120, 120, 401), torch.linspace(-5, 5, 401))).repeat(3, 1).to(dtype)
        pre, linear = both[:, :401], both[:, 401:]
        self.check(operations.activate(activation, pre), PYTORCH.activate(activation, pre.double()), dtype)
        gated = PYTORCH.activate(activation, pre.double(), linear.double())
        self.check(operations.activate(activation, pre, linear), gated, dtype)

    def test_sums_and_rows(self, dtype: torch.dtype) -> None:
        operations = native_operations(dtype)
        a, b = (torch.randn(3, 4001).to(dtype) for _ in range(2))
        assert torch.equal(operations.add(a, b), a + b)
        assert torch.equal(operations.add(a.T, b.T), (a + b).T)
        index = torch.tensor([[2, 0], [2, 1]])
        assert torch.equal(operations.embed(a, index), a[index])
        for wrong in (-1, 3):
            with pytest.raises(IndexError, match=f"index {wrong} is out of range; there are 3 rows"):
                operations.embed(a, torch.tensor([0, wrong]))

    def test_the_largest_is_the_first_of_its_size(self, dtype: torch.dtype) -> None:
        operations = native_operations(dtype)
        x = torch.randn(6, 5003).to(dtype)
        x[0, [77, 4, 5002]] = 9.0
        x[1, 5002] = 9.0
        x[2, 1] = torch.nan
        x[3] = -torch.inf
        x[4, 3] = torch.inf
        values, indices = operations.largest(x)
        assert indices[[0, 1, 3, 4, 5]].tolist() == [4, 5002, 0, 3, x[5].argmax()]
        assert values.isnan().tolist() == [False, False, True, False, False, False]
        assert values[[0, 1, 3, 4]].tolist() == [9, 9, -torch.inf, torch.inf]

    @pytest.mark.parametrize("centred", [True, False])
    def test_what_a_norm_divides_by(self, dtype: torch.dtype, centred: bool) -> None:
        operations = native_operations(dtype)
        x = 3 + torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact_scale, exact = PYTORCH.normalize(x.double(), 1e-5, centred=centred)
        scale, normalized = operations.normalize(x, 1e-5, centred=centred)
        torch.testing.assert_close(scale.double(), exact_scale, atol=0, rtol=2**-21)
        self.check(normalized, exact, dtype)

    @pytest.mark.parametrize("wanted", [True, False])
    def test_distributions(self, dtype: torch.dtype, wanted: bool) -> None:
        operations = native_operations(dtype)
        logits = 9 * torch.randn(1, 4, 5003, generator=torch.Generator().manual_seed(0)).to(dtype)
        logits[0, 1, 7] = -torch.inf
        logits[0, 2, 5002] = torch.nan
        probabilities, log_totals = operations.distribution(logits, wants_probabilities=wanted)
        exact, exact_totals = PYTORCH.distribution(logits.double(), wants_probabilities=True)
        assert log_totals[0, 2].isnan()
        torch.testing.assert_close(log_totals.double(), exact_totals, atol=2e-6, rtol=2e-6, equal_nan=True)
        assert (probabilities is not None) == wanted
        if probabilities is not None and exact is not None:
            assert probabilities[0, 2].isnan().all()
            torch.testing.assert_close(probabilities.double(), exact, atol=1e-12, rtol=1e-5, equal_nan=True)

    def test_summaries(self, dtype: torch.dtype) -> None:
        operations, generator = native_operations(dtype), torch.Generator().manual_seed(0)
        large = torch.randn(100_003, generator=generator)
        views = torch.randn(2, 9, 6, 70, generator=generator)
        masked = views.masked_fill(views > 0.5, -torch.inf)
        shifted = 3000 + torch.randn(40_000, generator=generator)
        for x in (large[:1], large, masked, views[:, :, 2:4], views[..., :33], views.transpose(1, 3), shifted):
            x = x.to(dtype)
            found, exact = operations.summarize(x), PYTORCH.summarize(x.double())
            assert (found.min, found.max, found.non_finite) == (exact.min, exact.max, exact.non_finite)
            assert found.mean == pytest.approx(exact.mean, abs=1e-6, rel=1e-6)
            assert found.std == pytest.approx(exact.std, abs=1e-6, rel=1e-5)
            assert found.l2 == pytest.approx(exact.l2, rel=1e-6)
        nothing = operations.summarize(torch.tensor([torch.nan, torch.inf], dtype=dtype))
        assert nothing == PYTORCH.summarize(torch.tensor([torch.nan, torch.inf]))

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("num_new", [1, 5, 40])
    def test_scores_and_pattern(self, dtype: torch.dtype, num_new: int, window: int | None) -> None:
        operations, S = native_operations(dtype), num_new + 4
        heads = torch.randn(2, S, 6, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        q, k, v = heads[:, 4:, :4], heads[:, :, 4:5].repeat(1, 1, 2, 1), heads[:, :, 4:]
        mask = CausalMask(4, num_new, window, q.device)
        found = operations.spell_out(q, k, mask, scale=0.3)
        exact = PYTORCH.spell_out(q.double(), k.double(), mask, scale=0.3)
        for ours, theirs in zip(found, exact, strict=True):
            tolerance = 2**-18 + 2 * ROUNDING[dtype]
            torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
        mixed = operations.attend(q, k, v, mask, scale=0.3)
        again = found[2].double() @ v.double().transpose(1, 2).repeat_interleave(2, dim=1)
        torch.testing.assert_close(mixed.double(), again.transpose(1, 2), atol=0.02, rtol=4 * ROUNDING[dtype])

    @pytest.mark.parametrize("window", [None, 3])
    def test_attention_of_rows_of_equal_length(self, dtype: torch.dtype, window: int | None) -> None:
        operations = native_operations(dtype)
        torch.manual_seed(0)
        qkv = torch.randn(3, 9, 8, 16).to(dtype)
        q, k, v = qkv[:, 4:, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
        mask = CausalMask(4, 5, window, q.device)
        exact = PYTORCH.attend(q.double(), k.double(), v.double(), mask, scale=0.3)
        self.check(operations.attend(q, k, v, mask, scale=0.3), exact, dtype)


ATTENTION_SHAPES = [(4, 4, 16), (8, 2, 32), (6, 1, 64), (2, 2, 128), (3, 3, 80)]  # H, Hkv, D
BLOCK_SIZE = 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "Hkv", "D"), ATTENTION_SHAPES)
class TestPagedAttention:
    LENGTHS = (1, 3, 4, 17, 150, 16)

    @pytest.fixture
    def attend(self, dtype: torch.dtype, H: int, Hkv: int, D: int) -> Callable[..., torch.Tensor]:
        """Attention of the last `num_new` tokens of some of the sequences, whose blocks lie in no order."""
        operations = native_operations(dtype)
        generator = torch.Generator().manual_seed(0)
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in self.LENGTHS)
        order = iter(torch.randperm(num_blocks, generator=generator).tolist())
        self.blocks = [[next(order) for _ in range(-(-n // BLOCK_SIZE))] for n in self.LENGTHS]
        pool = (num_blocks * BLOCK_SIZE, Hkv, D)
        self.keys, self.values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
        self.queries = [torch.randn(n, H, D, generator=generator).to(dtype) for n in self.LENGTHS]

        def run(
            sequences: Sequence[int], num_new: int = 1, window: int | None = None, end: int | None = None
        ) -> list[torch.Tensor]:
            ends = [min(self.LENGTHS[s], end or self.LENGTHS[s]) for s in sequences]
            counts = [min(num_new, length) for length in ends]
            longest = max(len(self.blocks[s]) for s in sequences)
            read = PagedRead(
                blocks=torch.tensor([self.blocks[s] + [0] * (longest - len(self.blocks[s])) for s in sequences]),
                first_row=torch.tensor([0, *counts]).cumsum(0),
                start=torch.tensor([length - count for length, count in zip(ends, counts, strict=True)]),
                block_size=BLOCK_SIZE,
            )
            shown = zip(sequences, ends, counts, strict=True)
            q = torch.cat([self.queries[s][length - count : length] for s, length, count in shown])
            z = operations.attend_pages(q, self.keys, self.values, read, window, scale=D**-0.5)
            return list(z.split(counts))

        return run

    def slots(self, sequence: int) -> list[int]:
        slots = [block * BLOCK_SIZE + place for block in self.blocks[sequence] for place in range(BLOCK_SIZE)]
        return slots[: self.LENGTHS[sequence]]

    @pytest.mark.parametrize("num_new", [1, 2, 7, 33, 150])
    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    def test_it_is_what_the_formula_says(
        self, attend: Any, dtype: torch.dtype, window: int | None, num_new: int
    ) -> None:
        found = attend(range(len(self.LENGTHS)), num_new, window)
        for sequence, z in enumerate(found):
            slots, num_shown = self.slots(sequence), len(z)
            q = self.queries[sequence][-num_shown:].double()
            k, v = self.keys[slots].double(), self.values[slots].double()
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (S, H, D)
            scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
            own, keys = torch.arange(len(slots) - num_shown, len(slots))[:, None], torch.arange(len(slots))
            visible = (keys <= own) & (keys > own - (window or len(slots)))
            exact = torch.einsum("hts,shd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
            tolerance = 4e-6 if dtype == torch.float32 else 2**-8  # of sums in float32, rounded once
            torch.testing.assert_close(z.double(), exact, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("window", [None, 20])
    def test_it_depends_neither_on_the_others_nor_on_how_a_prompt_is_divided(
        self, attend: Any, window: int | None
    ) -> None:
        everything = attend(range(len(self.LENGTHS)), 150, window)
        for sequence, whole in enumerate(everything):
            assert torch.equal(attend([sequence], 150, window)[0], whole)
        assert all(map(torch.equal, attend([3, 1], 150, window), [everything[3], everything[1]]))
        for end, num_new in ((150, 1), (149, 1), (150, 3), (100, 40), (33, 2), (70, 70)):
            part = attend([4], num_new, window, end)[0]
            assert torch.equal(part, everything[4][end - num_new : end])

    def test_what_is_no_number_stays_with_whose_it_is(self, attend: Any) -> None:
        expected = attend(range(len(self.LENGTHS)), 50)
        self.keys[self.slots(3)[2]] = torch.nan
        self.values[self.slots(4)[120]] = torch.nan
        beyond = [block * BLOCK_SIZE + 3 for block in (self.blocks[0][0], self.blocks[1][0])]  # of no sequence
        self.keys[beyond] = self.values[beyond] = torch.nan
        found = attend(range(len(self.LENGTHS)), 50)
        assert found[3][2:].isnan().all()
        assert torch.equal(found[3][:2], expected[3][:2])
        assert found[4][20:].isnan().all()  # from its own token on, and not before
        assert torch.equal(found[4][:20], expected[4][:20])
        for other in (0, 1, 2, 5):
            assert torch.equal(found[other], expected[other])

    def test_scores_far_apart_leave_one_value(self, attend: Any) -> None:
        slots = self.slots(4)
        self.keys[slots] = 0
        self.keys[slots[7]] = 200.0
        self.queries[4][:] = 1.0
        for num_new in (1, 40):
            for found in attend([4], num_new)[0]:
                group = found.shape[0] // self.values.shape[1]
                assert torch.equal(found, self.values[slots[7]].repeat_interleave(group, dim=0))


def test_heads_that_are_no_whole_vectors_are_left_to_pytorch() -> None:
    config = ModelConfig(vocab_size=8, d_model=40, num_layers=1, num_heads=2, d_mlp=8)
    operations = operations_for(config, torch.float32, torch.device("cpu"))
    assert operations is None or not operations.reads_pages


class TestRecording:
    def test_what_was_recorded_runs_again_on_what_its_inputs_hold(self) -> None:
        operations = native_operations(torch.float32)
        a, b = torch.ones(5), torch.ones(5)
        recording = Recording(Memory())
        with recording.record():
            total = operations.add(operations.add(a, b), b)
        assert recording.is_whole
        assert total.tolist() == [3.0] * 5
        a[:] = torch.arange(5.0)
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert torch.equal(operations.add(a, b), a + 1)  # what is called afterwards is no part of it
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]

    @pytest.mark.parametrize("compute", [lambda x: x * 2, lambda x: x.add_(1), lambda x: x[::2].contiguous()])
    def test_what_pytorch_computes_is_noticed(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operations, a = native_operations(torch.float32), torch.ones(6)
        for made, is_whole in ((lambda x: x.view(2, 3).flatten()[2:4], True), (compute, False)):
            recording = Recording(Memory())
            with torch.inference_mode(), recording.record():
                made(operations.add(a, a))
            assert recording.is_whole is is_whole

    def test_recordings_share_memory_and_grow_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "CHUNK", 256)
        operations, memory = native_operations(torch.float32), Memory()
        for _ in range(2):
            recording, ones = Recording(memory), [torch.ones(size) for size in (10, 50, 200, 10)]
            with recording.record():
                tensors = [operations.add(x, x) for x in ones]
            assert recording.is_whole
            assert [bool((tensor == 2).all()) for tensor in tensors] == [True] * 4
        assert [len(chunk) for chunk in memory.chunks] == [256, 256, 800, 256]


def generated(engine: Engine, *seeds: int, num_out: int = 60) -> dict[str, list[int]]:
    for seed in seeds:
        params = GenerationParams(max_tokens=num_out, sampling=SamplingParams(temperature=0.8, seed=seed))
        engine.add(Request(id=str(seed), prompt_ids=[5 + seed] * (3 + 9 * seed), params=params))
    tokens: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    while engine.can_step:
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += [token.token_id for token in output.tokens]
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestEngine:
    @pytest.fixture
    def build(self, dtype: str) -> Callable[[int], Engine]:
        model = load_checkpoint(str(BUNDLED), dtype=dtype).model
        if not use_kernels(model):
            pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
        return lambda cache_bytes: Engine(model, None, EngineConfig(cache_bytes=cache_bytes))

    def test_a_request_has_the_same_tokens_in_any_company_and_when_it_is_preempted(
        self, build: Callable[[int], Engine]
    ) -> None:
        alone = {str(seed): generated(build(1 << 24), seed)[str(seed)] for seed in range(8)}
        assert generated(build(1 << 24), *range(8)) == alone
        token_bytes = 1 << 24 // build(1 << 24).num_cache_tokens
        small = build((1 << 24) * 400 // build(1 << 24).num_cache_tokens)
        assert token_bytes
        assert generated(small, *range(8)) == alone
        assert small.stats().num_preemptions > 0

    @pytest.mark.parametrize("first", [1, 3])
    def test_every_family_is_recorded_and_replayed_steps_are_the_steps(
        self, dtype: str, first: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many streams the first recorded step has."""
        for name, config in CONFIGS.items():
            model = Transformer(replace(config, d_head=16))
            model.initialize(torch.Generator().manual_seed(0), std=0.2)
            model = model.to(DTYPES_BY_NAME[dtype]).requires_grad_(False)
            if not use_kernels(model):
                pytest.skip(f"this machine has no AVX-512 for {dtype}, or no C++ compiler")
            engines = [Engine(model, None, EngineConfig(cache_bytes=1 << 22, block_size=4)) for _ in range(2)]
            monkeypatch.setattr(engines[1]._runner._stream_steps, "_can_record", False)
            found = [
                [generated(engine, *seeds, num_out=12) for seeds in (range(first), range(3), range(1))]
                for engine in engines
            ]
            assert found[0] == found[1], name
            can_be = config.positions != "sinusoidal" and config.activation != "gelu"
            is_dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
            assert (engines[0]._runner._stream_steps._steps != {}) == (can_be and not is_dynamic), name

    def test_replayed_steps_are_the_steps(
        self, build: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replayed: list[int] = []
        run = StreamSteps.run
        monkeypatch.setattr(
            StreamSteps, "run", lambda self, shares: replayed.append(len(self._steps)) or run(self, shares)
        )
        found = generated(build(1 << 24), 1, 2, 3)
        assert max(replayed) > 0
        monkeypatch.setattr(StreamSteps, "run", lambda self, shares: None)
        assert generated(build(1 << 24), 1, 2, 3) == found


class TestCompiling:
    @pytest.fixture(autouse=True)
    def cache_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        if native.kernel("linear", "linear", torch.float32) is None:
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
        model = load_checkpoint(str(BUNDLED)).model
        change(monkeypatch)
        native.load.cache_clear()
        calls.runner.cache_clear()
        try:
            with caplog.at_level(logging.INFO):
                assert not use_kernels(model)
            assert [why in record.message for record in caplog.records] == [True]
            assert pack_linears(model) == 0
            assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 4096)
        finally:
            native.load.cache_clear()
            calls.runner.cache_clear()
