"""Kernels agree with PyTorch for random shapes, strides and numbers of threads.

`test_sanitizers.py` runs these tests again with kernels in which the compiler checks every access to memory.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import pack_weight, quantize_rows
from model.ops.cpu.packing import pack_rows
from model.ops.cpu.paged_attention import PagedRead, empty_partials
from model.ops.interface import Draw, NormRule
from model.ops.quantization import INT4, INT8, quantize_to
from model.ops.row_edits import EditRule, EditSeries, RowEdit, RowEdits
from model.ops.stored_weights import StackedRows
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import FORMATS, GROUP, SUPERGROUP, WeightFormat
from tests.ops.cpu.common import DTYPES, NO_KERNELS, cpu_backend, packed_layer
from tests.ops.cpu.test_grouped_linear import random_weight

NUM_ROUNDS = 4
CPU = torch.device("cpu")
# Relative to the largest number of a result: bfloat16 rounds inputs of sums in other places than PyTorch does.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("seed", range(NUM_ROUNDS)),
]


@pytest.fixture
def rng(seed: int, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """The source of the shapes. Also chooses the number of threads, which may exceed the CPUs and the tasks."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    num_threads = rng.choice((1, 2, 3, 5))
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    return rng


def strided(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Random numbers of a shape: contiguous, or a part of a larger tensor that ends where its memory ends."""
    padding = [
        rng.choice((0, 0, 1, 3)) if dim < len(shape) - 1 or rng.random() < 0.5 else 0 for dim in range(len(shape))
    ]
    whole = torch.randn([size + extra for size, extra in zip(shape, padding, strict=True)]).to(dtype)
    return whole[tuple(slice(extra, None) for extra in padding)]


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=TOLERANCES[dtype] * scale)


def test_elementwise(rng: random.Random, dtype: torch.dtype) -> None:
    ours, theirs = cpu_backend(dtype).ops, TORCH.ops
    shape = (rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 70))
    a, b = strided(rng, shape, dtype), strided(rng, shape, dtype)
    check(ours.add(a, b), theirs.add(a, b), dtype)
    check(ours.scale(a, 1.7), theirs.scale(a, 1.7), dtype)
    check(ours.softcap(a, 3.0), theirs.softcap(a, 3.0), dtype)
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        for linear in (None, b):
            check(ours.activate(activation, a, linear), theirs.activate(activation, a, linear), dtype)
    table = torch.randn(rng.randint(1, 20), shape[-1]).to(dtype)
    ids = torch.randint(len(table), (rng.randint(1, 3), rng.randint(1, 40)))
    check(ours.embed(table, ids), theirs.embed(table, ids), dtype)


def test_norm(rng: random.Random, dtype: torch.dtype) -> None:
    ours, theirs = cpu_backend(dtype).ops, TORCH.ops
    heads = rng.choice((None, 1, 3))
    size = rng.randint(1, 70)
    shape = (rng.randint(1, 3), rng.randint(1, 9), *(() if heads is None else (heads,)), size)
    weight_shape = (heads, size) if heads is not None and rng.random() < 0.5 else (size,)
    for rule in (NormRule(1e-5, "rms", offset=True), NormRule(1e-5, "layer")):
        x, weight = strided(rng, shape, dtype), torch.randn(weight_shape).to(dtype)
        bias = torch.randn(size).to(dtype) if rule.kind == "layer" and len(weight_shape) == 1 else None
        stages = zip(ours.norm_stages(x, weight, bias, rule), theirs.norm_stages(x, weight, bias, rule), strict=True)
        for found, expected in stages:
            check(found, expected, dtype)


def test_rotary_positions(rng: random.Random, dtype: torch.dtype) -> None:
    ours, theirs = cpu_backend(dtype).ops, TORCH.ops
    B, T, H, half = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 20)
    positions = torch.randint(0, 50, (T,))
    frequencies = torch.rand(half)
    found, expected = (each.rotation(positions, frequencies, 1.1, dtype) for each in (ours, theirs))
    for mine, reference in zip(found, expected, strict=True):
        check(mine, reference[:, 0, :half], dtype)  # PyTorch's angles are repeated for both halves of a head
    x = strided(rng, (B, T, H, 2 * half + rng.choice((0, 2, 6))), dtype)
    check(ours.rotate(x, found), theirs.rotate(x, expected), dtype)


@pytest.mark.parametrize("format", [None, INT8, INT4])
def test_linear(rng: random.Random, dtype: torch.dtype, format: WeightFormat | None) -> None:
    N, K = rng.randint(1, 300), 4 * rng.randint(1, 40)
    weight = torch.randn(N, K).to(dtype)
    bias = torch.randn(N).to(dtype) if rng.random() < 0.5 else None
    rows = StackedRows((weight,), dtype, CPU)
    if format is None:
        layer = packed_layer(weight, bias, dtype)
        assert torch.equal(pack_rows(rows).packed.flatten(), layer.packed.flatten())
    else:
        layer = packed_layer(quantize_to(weight, format), bias, dtype)
        packed, (part,) = quantize_rows(rows, format), layer.parts
        assert torch.equal(packed.integers.flatten(), part.integers.flatten())
        assert torch.equal(packed.scales.view(torch.uint8).flatten(), part.scales.view(torch.uint8).flatten())
    for M in (1, rng.randint(2, 12), rng.randint(13, 60)):
        x = strided(rng, (M, K), dtype)
        expected = TORCH.ops.linear(weight, bias, dtype)(x).float()
        found = layer(x).float()
        assert found.shape == expected.shape
        error = (found - expected).norm() / expected.norm().clamp(min=1.0)
        assert error < {None: TOLERANCES[dtype], INT8: 0.03, INT4: 0.3}[format]


def test_stacked_parts_in_every_format(rng: random.Random, dtype: torch.dtype) -> None:
    """Parts with numbers of outputs that are no multiple of a tile, some with rows of x that cannot be scaled."""
    if not all(has_grouped_kernel(format, dtype) for format in FORMATS.values()):
        pytest.skip(NO_KERNELS)
    K = SUPERGROUP * GROUP * rng.randint(1, 2)
    weights = [random_weight(format, rng.randint(1, 40), K) for format in rng.sample(list(FORMATS.values()), 8)]
    N = sum(len(weight.integers) for weight in weights)
    bias = torch.randn(N).to(dtype) if rng.random() < 0.5 else None
    layer = GroupedLinear([pack_weight(weight) for weight in weights], bias, dtype)
    matrix = torch.cat([weight.dequantize() for weight in weights])
    for M in (1, rng.randint(2, 20)):
        x = strided(rng, (M, K), dtype)
        x[0, :GROUP] = 1e-38  # 127 divided by it is infinite
        expected = F.linear(x.float(), matrix, None if bias is None else bias.float())
        found = layer(x).float()
        assert found.shape == expected.shape
        # Relative to the parts of a sum: minimums cancel most of it.
        size = F.linear(x.float().abs(), matrix.abs()) + 40 * x.float().abs().sum(1, keepdim=True) / 16
        assert ((found - expected).abs() <= 0.03 * size).all()
        x[-1, 5] = rng.choice((torch.nan, torch.inf))
        assert layer(x)[-1].isnan().all()


def test_the_largest_numbers(rng: random.Random, dtype: torch.dtype) -> None:
    logits = torch.randn(rng.randint(1, 3), rng.randint(1, 700)).to(dtype)
    logits[0, rng.randrange(logits.shape[1])] = rng.choice((torch.nan, torch.inf, -torch.inf))
    count = min(rng.randint(1, 64), logits.shape[1])
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    found = cpu_backend(dtype).summaries.top(logits, count)
    assert torch.equal(found.indices, expected.indices[:, :count])
    torch.testing.assert_close(found.values, expected.values[:, :count], rtol=0, atol=0, equal_nan=True)


def test_attention(rng: random.Random, dtype: torch.dtype) -> None:
    Hkv, group, D, size = rng.randint(1, 3), rng.randint(1, 4), 16 * rng.randint(1, 5), rng.choice((1, 4, 16))
    kernels = cpu_backend(dtype, D).paged_attention
    assert kernels is not None
    counts = [rng.choice((1, 1, 2, rng.randint(3, 40))) for _ in range(rng.randint(1, 4))]
    starts = [rng.randint(0, 50) for _ in counts]
    if is_long := rng.random() < 0.5:  # several chunks of keys; few new tokens may share them among threads
        counts, starts = [min(count, 7) for count in counts[:2]], [rng.randint(200, 700) for _ in counts[:2]]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    max_blocks = max(-(-length // size) for length in lengths)
    order = torch.randperm(len(counts) * max_blocks)
    blocks = order.view(len(counts), max_blocks)
    window, softcap = rng.choice((None, rng.randint(1, 400 if is_long else 60))), rng.choice((None, 20.0))
    rule = ScoreRule(D**-0.5, softcap)
    keys, values = (torch.zeros(len(order) * size, Hkv, D, dtype=dtype) for _ in range(2))
    queries, expected = [], []
    for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True)):
        q, k, v = (
            strided(rng, (count if i == 0 else length, Hkv * group if i == 0 else Hkv, D), dtype) for i in range(3)
        )
        slots = torch.tensor([blocks[row, i // size] * size + i % size for i in range(length)])
        kernels.write(k, v, keys, values, slots)
        mask = CausalMask(start, count, window, CPU)
        expected.append(TORCH.ops.fused_attention(q[None], k[None], v[None], mask, rule)[0])
        queries.append(q)
        scores = zip(
            kernels.attention_scores(q[None], k[None], mask, rule),
            TORCH.ops.attention_scores(q[None], k[None], mask, rule),
            strict=True,
        )
        for mine, reference in scores:
            check(mine.float().clamp(min=-1e4), reference.float().clamp(min=-1e4), dtype)
    read = PagedRead(blocks, torch.tensor([0, *counts]).cumsum(0), torch.tensor(starts), size)
    found = kernels.attend_blocks(torch.cat(queries), keys, values, read, window, rule)
    check(found, torch.cat(expected), dtype)
    partials = empty_partials(sum(counts), Hkv * group, D, max_blocks * size)
    assert not is_long or partials is not None
    shared = kernels.attend_blocks(torch.cat(queries), keys, values, replace(read, partials=partials), window, rule)
    assert torch.equal(shared, found)


def test_edits_and_patterns(rng: random.Random, dtype: torch.dtype) -> None:
    ours, theirs = cpu_backend(dtype).ops, TORCH.ops
    T, H, D = rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 40)
    x = strided(rng, (1, T, H, D), dtype)
    rows = torch.tensor(rng.sample(range(T), rng.randint(1, T)))
    heads = torch.tensor(rng.sample(range(H), rng.randint(1, H))) if rng.random() < 0.5 else None
    vectors = torch.randn(2, H if heads is None else len(heads), D)
    indices = torch.randint(2, (len(rows),))
    edits = [
        RowEdit(rule=EditRule("add"), vectors=vectors, heads=heads),
        RowEdit(rule=EditRule("set", 0.5), heads=heads),
        RowEdit(rule=EditRule("cap", -0.5, 0.5), heads=heads),
        RowEdit(rule=EditRule("project", 0.25), vectors=vectors[:, :1], heads=heads),
    ]
    for some in ([edit] for edit in edits):
        edited = [RowEdits(EditSeries(some), rows, indices)]
        check(ours.edit_rows(x, edited), theirs.edit_rows(x, edited), dtype)
    B, Hkv, S = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 20)
    pattern = torch.rand(B, 2 * Hkv, T, S).softmax(-1).to(dtype)
    v = strided(rng, (B, S, Hkv, D), dtype)
    check(ours.apply_pattern(pattern, v), theirs.apply_pattern(pattern, v), dtype)


def test_logits_and_statistics(rng: random.Random, dtype: torch.dtype) -> None:
    backend = cpu_backend(dtype)
    N, V = rng.randint(1, 5), rng.randint(1, 200)
    logits = strided(rng, (N, V), dtype)
    masks = None
    if rng.random() < 0.5:
        masks = torch.randint(-(1 << 31), 1 << 31, (N, -(-V // 32)), dtype=torch.int64).to(torch.int32)
        masks[:, 0] |= 1
    found, expected = (each.sampling.argmax(logits, masks) for each in (backend, TORCH))
    assert torch.equal(found.indices, expected.indices)
    draws = [Draw(i % N, 0.7, rng.choice((0, 3)), rng.choice((1.0, 0.6)), 0.01, rng.getrandbits(63)) for i in range(4)]
    assert backend.sampling.draw(logits, draws, masks) == TORCH.sampling.draw(logits, draws, masks)
    by_each = [each.summaries.distribution(logits, wants_probabilities=True) for each in (backend, TORCH)]
    for mine, reference in zip(*by_each, strict=True):
        assert mine is not None
        assert reference is not None
        check(mine, reference, torch.float32)
    tensors = [strided(rng, (rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 9000)), dtype) for _ in range(3)]
    summaries: list[Callable[..., Any]] = [backend.summaries.summarize, TORCH.summaries.summarize]
    for mine, reference in zip(*(summarize(tensors) for summarize in summaries), strict=True):
        assert mine.non_finite == reference.non_finite
        assert [mine[i] for i in range(5)] == pytest.approx([reference[i] for i in range(5)], rel=1e-4, abs=1e-4)
