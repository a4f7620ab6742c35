"""Keys and values in 8 bits: PyTorch and our kernels store the same bits, and attention uses what they stand for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.ops.cpu.paged_attention import PagedAttention, PagedRead, empty_partials
from model.ops.quantized_rows import SMALLEST_MAGNITUDE, QuantizedRows, dequantize_rows, quantize_rows
from model.ops.torch_attention import ScoreRule
from tests.ops.cpu.common import DTYPES, cpu_backend

pytestmark = pytest.mark.usefixtures("instructions")

every_shape = pytest.mark.parametrize(("H", "Hkv", "D"), [(9, 3, 64), (4, 4, 16), (6, 2, 80)])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def kernels(dtype: torch.dtype) -> PagedAttention:
    found = cpu_backend(dtype).paged_attention
    assert found is not None
    return found


def random_rows(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(dtype: torch.dtype, k: Tensor, v: Tensor) -> tuple[QuantizedRows, QuantizedRows]:
    """The cache after our kernels wrote k and v to its slots in reverse order, in the order of the rows."""
    caches = [QuantizedRows(torch.empty(k.shape, dtype=torch.int8), torch.empty(k.shape[:2]).bfloat16()) for _ in "kv"]
    slots = torch.arange(len(k)).flip(0)
    kernels(dtype).write(k, v, caches[0], caches[1], slots)
    keys, values = (QuantizedRows(rows.integers[slots], rows.magnitudes[slots]) for rows in caches)
    return keys, values


@every_dtype
@every_shape
def test_our_kernels_quantize_to_the_bits_of_pytorch(dtype: torch.dtype, H: int, Hkv: int, D: int) -> None:
    """Also rows that are zero, tiny, huge or not finite."""
    k, v = (random_rows(dtype, 300, Hkv, D, seed=seed) for seed in (0, 1))
    k[3, 0, 1], k[4, 0, D - 1], v[5, 0, 0] = torch.nan, -torch.inf, torch.inf
    v[6], v[7], k[8, 0], k[9] = 0, 1e-38, 3e38, SMALLEST_MAGNITUDE
    for x, found in zip((k, v), written(dtype, k, v), strict=True):
        expected = quantize_rows(x)
        assert torch.equal(found.integers, expected.integers)
        assert torch.equal(found.magnitudes.view(torch.int16), expected.magnitudes.view(torch.int16))
        numbers = dequantize_rows(found, dtype).double()
        is_finite = x.isfinite().all(-1)
        assert torch.equal(numbers.isnan().all(-1), ~is_finite)
        steps = x.double().abs().amax(-1, keepdim=True) / 127
        # Half a step, the rounding of the magnitude, and that of the result.
        error = (numbers - x.double()).abs() - 2**-8 * x.double().abs()
        assert (error <= 0.5 * steps + 2 * SMALLEST_MAGNITUDE)[is_finite].all()


@every_dtype
@every_shape
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (300, 0.8)])
def test_attention_in_8_bits_is_bitwise_attention_over_the_dequantized_keys_and_values(
    dtype: torch.dtype, H: int, Hkv: int, D: int, window: int | None, softcap: float | None
) -> None:
    """Hence it is the same in one pass, in chunks, token by token, and if threads share the keys of a sequence."""
    N, size, rule = 560, 16, ScoreRule(D**-0.5, softcap)
    keys, values = written(dtype, *(random_rows(dtype, N, Hkv, D, seed=seed) for seed in (0, 1)))
    plain_keys, plain_values = dequantize_rows(keys, dtype), dequantize_rows(values, dtype)
    blocks = torch.randperm(N // size, generator=torch.Generator().manual_seed(0))[None]
    q = random_rows(dtype, N, H, D, seed=2)
    attend = kernels(dtype).attend_blocks
    for start, num_new in ((0, N), (N - 1, 1), (N - 5, 5), (40, 200)):
        new = q[start : start + num_new]
        read = PagedRead(blocks, torch.tensor([0, num_new]), torch.tensor([start]), size)
        shared = replace(read, partials=empty_partials(num_new, H, D, N))
        expected = attend(new, plain_keys, plain_values, read, window, rule)
        assert torch.equal(attend(new, keys, values, read, window, rule), expected)
        assert torch.equal(attend(new, keys, values, shared, window, rule), expected)
        if num_new < N:
            found = kernels(dtype).step_scores(new, keys, read, 0, N, window, rule)
            plain = kernels(dtype).step_scores(new, plain_keys, read, 0, N, window, rule)
            count = H * num_new * (start + num_new)
            assert all(torch.equal(one[:count], other[:count]) for one, other in zip(found, plain, strict=True))
