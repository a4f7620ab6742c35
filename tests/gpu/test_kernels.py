"""The Triton kernels compute what PyTorch computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import Activation, NormKind
from model.ops.cpu.trace_kernels import decode_summaries
from model.ops.gpu.backend import load_kernels
from model.ops.gpu.gpu_ops import ARGMAX_BLOCK, GpuNetworkOps, GpuSamplingOps
from model.ops.gpu.gpu_summaries import GpuGatherCopy, GpuSummaryCalls, GpuSummaryOps, GpuTraceKernels
from model.ops.gpu.invariant import InvariantLinear
from model.ops.gpu.paged_attention import CHUNK, PagedKeys, step_scores, store_and_attend
from model.ops.interface import NormRule
from model.ops.summary import summarize
from model.ops.torch_attention import CausalMask, ScoreRule, fused_attention
from model.ops.torch_ops import TORCH

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def ops(device: torch.device) -> GpuNetworkOps:
    kernels = load_kernels(device)
    if kernels is None:
        pytest.skip("Triton does not run here")
    return GpuNetworkOps(kernels)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@every_dtype
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("shape", "weights"), [((2, 3, 24), (24,)), ((1, 2, 4, 6), (6,)), ((1, 2, 4, 6), (4, 6)), ((1, 1, 5000), (5000,))]
)
def test_norms(
    kind: NormKind, offset: bool, shape: Any, weights: Any, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device
) -> None:
    x, weight = random(*shape, dtype=dtype, device=device), random(*weights, dtype=dtype, device=device)
    bias = random(weights[-1], dtype=dtype, device=device) if kind == "layer" and len(weights) == 1 else None
    rule = NormRule(1e-3, kind, offset)
    assert_same(ops.norm(x, weight, bias, rule), TORCH.ops.norm(x, weight, bias, rule))


@every_dtype
@pytest.mark.parametrize(("size", "rotated"), [(8, 8), (6, 2), (12, 6), (128, 128), (96, 32)])
@pytest.mark.parametrize("num_heads", [4, 11])
def test_rotation(
    num_heads: int, size: int, rotated: int, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device
) -> None:
    x = random(2, 5, num_heads + 3, size, dtype=dtype, device=device)[:, :, 1 : num_heads + 1]
    positions = torch.arange(3, 8, device=device)
    frequencies = torch.rand(rotated // 2, generator=torch.Generator().manual_seed(0)).to(device)
    rotation = TORCH.ops.rotation(positions, frequencies, 1.1, dtype)
    assert_same(ops.rotate(x, rotation), TORCH.ops.rotate(x, rotation))


@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(24, 5), (1030, 4099), (2048, 64), (8, 9000)])
def test_products_of_one_row(
    num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device
) -> None:
    weight, bias = (random(*shape, dtype=dtype, device=device) for shape in ((num_outputs, num_inputs), (num_outputs,)))
    layer = ops.linear(weight, bias if has_bias else None, dtype)
    x = random(2, 1, 3 * num_inputs, dtype=dtype, device=device)[..., ::3] / num_inputs**0.5
    for own in (x[:1], x[1, 0], x):
        wide = own.double() @ weight.double().T + (bias.double() if has_bias else 0)
        assert_same(layer(own), wide.to(dtype))


@every_dtype
@pytest.mark.parametrize("size", [1, 7, ARGMAX_BLOCK, 5 * ARGMAX_BLOCK + 3])
def test_largest(size: int, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device) -> None:
    logits = random(8, size, dtype=dtype, device=device)
    logits[1, size // 2 :] = 9  # equal numbers
    logits[2] = -torch.inf
    logits[3, -1] = torch.inf
    logits[4, size // 3 :: 2] = torch.nan
    logits[5, size - 1] = torch.nan
    logits[6, 0] = 100
    masks = torch.full((8, -(-size // 32)), -1, dtype=torch.int32)
    masks[6, 0], masks[7] = -2, 0
    for given in (None, masks):
        found, expected = GpuSamplingOps(ops.kernels).argmax(logits, given), TORCH.sampling.argmax(logits, given)
        assert found.indices.tolist() == expected.indices.tolist()
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: Activation, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device) -> None:
    pre, linear = (4 * random(2, 3, 2500, dtype=dtype, device=device)).split((1250, 1250), -1)
    pre[0, 0, :4] = torch.tensor([-100.0, 100.0, float("nan"), float("inf")])
    for gate in (None, linear):
        found = ops.activate(activation, pre, gate)
        expected = TORCH.ops.activate(activation, pre, gate)
        tolerance = 16 * TOLERANCE[dtype]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=TOLERANCE[dtype], equal_nan=True)


@every_dtype
@pytest.mark.parametrize("window", [None, 5, CHUNK + 44])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(4, 4, 6), (6, 2, 16), (9, 3, 64), (32, 2, 128)])
def test_attention(
    num_heads: int,
    num_kv_heads: int,
    size: int,
    softcap: float | None,
    window: int | None,
    dtype: torch.dtype,
    ops: GpuNetworkOps,
    device: torch.device,
) -> None:
    """Each sequence has the bits that it has alone, and the new keys and values are in the cache afterwards."""
    lengths, block_size, rule = [1, 5, 17, CHUNK, CHUNK + 1, 300, 700, 1024], 16, ScoreRule(0.3, softcap)
    num_blocks = sum(-(-length // block_size) for length in lengths)
    keys = torch.full((num_blocks * block_size, num_kv_heads, size), torch.nan, dtype=dtype, device=device)
    values, order = keys.clone(), torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    blocks = torch.zeros(len(lengths), 64, dtype=torch.int64)
    heads = random(len(lengths), num_heads + 2 * num_kv_heads, size, dtype=dtype, device=device)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    expected, newest = [], []
    for row, length in enumerate(lengths):
        own, order = order.split((-(-length // block_size), len(order) - -(-length // block_size)))
        blocks[row, : len(own)] = own
        slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:length].to(device)
        own_k, own_v = random(2 * length, num_kv_heads, size, dtype=dtype, device=device).split(length)
        keys[slots[:-1]], values[slots[:-1]] = own_k[:-1], own_v[:-1]
        own_k, own_v = torch.cat((own_k[:-1], k[row, None])), torch.cat((own_v[:-1], v[row, None]))
        mask = CausalMask(length - 1, 1, window, device)
        expected.append(fused_attention(q[None, row, None], own_k[None], own_v[None], mask, rule)[0])
        newest.append(int(slots[-1]))
    positions, tables = torch.tensor(lengths).to(device) - 1, blocks.to(device)

    def run(rows: list[int], num_columns: int = 64) -> Tensor:
        table = tables[rows, :num_columns].contiguous()
        paged = PagedKeys(keys, values, table, positions[rows], block_size, window, rule)
        return store_and_attend(ops.kernels, q[rows], k[rows], v[rows], paged)

    together = run(list(range(len(lengths))))
    assert_same(together, torch.cat(expected))
    assert torch.equal(keys[newest], k)
    assert torch.equal(values[newest], v)
    for row, length in enumerate(lengths):
        assert torch.equal(run([row], -(-length // block_size)), together[row, None])


@every_dtype
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_scores(
    window: int | None, softcap: float | None, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device
) -> None:
    """Those of one token, in memory with room for more keys."""
    length, block_size, rule = 300, 16, ScoreRule(0.3, softcap)
    keys = random(24 * block_size, 2, 16, dtype=dtype, device=device)
    blocks = torch.randperm(24, generator=torch.Generator().manual_seed(0)).to(device)
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()[:length]
    q = random(1, 6, 16, dtype=dtype, device=device)
    position = torch.tensor(length - 1, device=device)
    paged = PagedKeys(keys, keys, blocks[None], position[None], block_size, window, rule)
    found = step_scores(ops.kernels, q, paged, 0, 512)
    mask = CausalMask(length - 1, 1, window, device)
    expected = TORCH.ops.attention_scores(q[None], keys[slots][None], mask, rule)
    for buffer, x in zip(found, expected, strict=True):
        assert_same(buffer[: 6 * length].view(1, 6, 1, length), x)


@every_dtype
def test_summaries(dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device) -> None:
    tensors = [random(*shape, dtype=dtype, device=device) for shape in ((1, 1, 7), (1, 4, 1, 3000), (5,), (3, 2))]
    tensors[1][0, 2, 0, 5:900] = -torch.inf
    tensors[2][:] = torch.nan
    tensors[3][1] = 60000.0
    calls = GpuSummaryCalls(ops.kernels, tensors)
    calls.set_count([1], 2000)
    calls.run()
    expected = [summarize(x.flatten()[: 2000 if i == 1 else None].double()) for i, x in enumerate(tensors)]
    for found, wanted in zip(decode_summaries(calls.read()), expected, strict=True):
        assert [x for x in found if x is None] == [x for x in wanted if x is None]
        numbers = [[float(x) for x in each if x is not None] for each in (found, wanted)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-6)


def test_summaries_of_large_tensors(ops: GpuNetworkOps, device: torch.device) -> None:
    """They are divided among programs."""
    tensors = [random(*shape, dtype=torch.float32, device=device) + 3 for shape in ((7,), (3, 50000), (131072,))]
    tensors[1][1, 300:] = -torch.inf
    tensors[2][70000:] = torch.nan
    found = GpuSummaryOps(GpuTraceKernels(ops.kernels)).summarize(tensors)
    for one, x in zip(found, tensors, strict=True):
        assert one == pytest.approx(summarize(x.double()), rel=1e-5)


def test_copies(ops: GpuNetworkOps, device: torch.device) -> None:
    tensors = [random(*shape, dtype=torch.bfloat16, device=device) for shape in ((1, 3), (2, 4500), (700,), (900,))]
    copy = GpuGatherCopy(ops.kernels.copy_tensors, tensors, 2)
    for size in (600, 10):
        copy.set_variable_size(2 * size)
        for place in ("cpu", device):
            out = torch.zeros(copy.offsets[-1], dtype=torch.uint8, device=place)
            copy.copy_to(out)
            for x, begin in zip(tensors, copy.offsets, strict=False):
                wanted = x.flatten()[: None if len(x.shape) > 1 else size]
                assert torch.equal(out[begin : begin + wanted.nbytes].view(torch.bfloat16), wanted.to(place))


@every_dtype
def test_the_largest_numbers_and_the_first_of_equal_ones(dtype: torch.dtype, device: torch.device) -> None:
    logits = random(6, 500, dtype=dtype, device=device).round()  # many are equal
    logits[1, 7], logits[2, 400:], logits[3, 3], logits[4] = torch.nan, torch.inf, -torch.inf, -0.0
    logits[4, ::2] = 0.0
    for count in (0, 1, 5, 500):
        found, expected = GpuSummaryOps(GpuTraceKernels(None)).top(logits, count), TORCH.summaries.top(logits, count)
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)


@every_dtype
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 24), (96, 6), (2048, 520), (9000, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_invariant_products(
    num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype, ops: GpuNetworkOps, device: torch.device
) -> None:
    """A row has the same bits in any number of rows."""
    weight = random(num_outputs, num_inputs, dtype=dtype, device=device) / num_inputs**0.5
    bias = random(num_outputs, dtype=dtype, device=device) if has_bias else None
    layer = InvariantLinear(weight, bias, ops.kernels)
    x = random(1, 130, num_inputs + 2, dtype=dtype, device=device)[..., :num_inputs]
    found = layer(x)
    assert_same(found, torch.nn.functional.linear(x, weight, bias))
    for rows in (slice(0, 1), slice(5, 7), slice(60, 129)):
        assert torch.equal(layer(x[:, rows]), found[:, rows])
