"""Products with packed weights: exact to their rounding, and no row depends on the other rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.ops.cpu import launch
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.cpu.packed_linear import PackedLinear, pack_linear
from model.ops.quantization import INT4, INT8, QuantizedLinear, quantize_to
from model.ops.weight_formats import GROUP, WeightFormat
from tests.ops.cpu.common import DTYPES, ROUNDING, cpu_backend, packed_layer

pytestmark = pytest.mark.usefixtures("instructions")

SHAPES = [(768, 96, True), (5003, 64, False), (17, 32, True), (1, 64, True), (33, 2048, False), (32, 32, True)]
NUM_ROWS = (1, 2, 5, 6, 7, 11, 12, 13, 25, 40)


def packed_and_plain(dtype: torch.dtype, N: int, K: int, bias: bool) -> tuple[PackedLinear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)
    packed = packed_layer(plain.weight, plain.bias, dtype)
    assert isinstance(packed, PackedLinear)
    return packed, plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "bias"), SHAPES)
class TestPackedLinear:
    def test_packed_products_are_exact_to_the_rounding_of_the_dtype(
        self, dtype: torch.dtype, N: int, K: int, bias: bool
    ) -> None:
        packed, plain = packed_and_plain(dtype, N, K, bias)
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, K).to(dtype)
            b = plain.bias.double() if bias else None
            exact = F.linear(x.double(), plain.weight.double(), b)
            # Sums of K products in float32 (2^-24 for each), then for bfloat16 one rounding of the sum (2^-9).
            size = F.linear(x.double().abs(), plain.weight.double().abs(), None if b is None else b.abs())
            bound = size * K * 2**-24 + (exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
            assert ((packed(x).double() - exact).abs() <= bound + 1e-30).all()

    def test_a_row_does_not_depend_on_the_other_rows(self, dtype: torch.dtype, N: int, K: int, bias: bool) -> None:
        packed, _ = packed_and_plain(dtype, N, K, bias)
        x = torch.randn(max(NUM_ROWS), K).to(dtype)
        alone = torch.cat([packed(row[None]) for row in x])
        for num_rows in NUM_ROWS:
            assert torch.equal(packed(x[:num_rows]), alone[:num_rows])

    def test_inputs_may_have_any_strides_and_leading_dims(self, dtype: torch.dtype, N: int, K: int, bias: bool) -> None:
        packed, _ = packed_and_plain(dtype, N, K, bias)
        x = torch.randn(K, 2, 3).to(dtype)
        permuted = x.permute(1, 2, 0)
        assert packed(permuted).shape == (2, 3, N)
        assert torch.equal(packed(permuted), packed(permuted.clone(memory_format=torch.contiguous_format)))
        assert packed(permuted[:, :0]).shape == (2, 0, N)


def test_an_input_of_the_wrong_dtype_or_width_is_refused() -> None:
    packed, _ = packed_and_plain(torch.float32, 16, 8, False)
    for wrong in (torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, 9)):
        with pytest.raises(ValueError, match="packed layer"):
            packed(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [INT8, INT4], ids=lambda format: format.name)
@pytest.mark.parametrize(("N", "K", "bias"), [*SHAPES, (24, 50, True)])
class TestGroupedLinear:
    def both(self, dtype: torch.dtype, format: WeightFormat, N: int, K: int, bias: bool) -> tuple[Any, QuantizedLinear]:
        torch.manual_seed(0)
        plain = nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)
        quantized = QuantizedLinear(quantize_to(plain.weight, format), plain.bias)
        packed = packed_layer(quantized.weight_groups, plain.bias, dtype)
        assert isinstance(packed, GroupedLinear)
        return packed, quantized

    def test_quantized_products_are_exact_products_of_the_rounded_rows(
        self, dtype: torch.dtype, format: WeightFormat, N: int, K: int, bias: bool
    ) -> None:
        packed, quantized = self.both(dtype, format, N, K, bias)
        assert (quantized.bias is not None) == bias
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, K).to(dtype)
            groups = F.pad(x.float(), (0, -K % GROUP)).unflatten(1, (-1, GROUP))
            largest = groups.abs().amax(2, keepdim=True)
            integers = (groups * torch.full_like(largest, 127).div(largest)).round().double()
            rounded = (integers * (largest / 127).double()).flatten(1)[:, :K]
            weight = quantized.weight_groups.dequantize().double()
            exact = F.linear(rounded, weight, None if quantized.bias is None else quantized.bias.double())
            # The integer products are exact; then float32 rounds a few times, and the dtype once.
            bound = F.linear(rounded.abs(), weight.abs()) * 2**-21 + exact.abs() * ROUNDING[dtype] + 1e-6
            assert ((packed(x).double() - exact).abs() <= bound).all()

    def test_a_row_does_not_depend_on_the_other_rows_even_if_one_has_nan(
        self, dtype: torch.dtype, format: WeightFormat, N: int, K: int, bias: bool
    ) -> None:
        packed, _ = self.both(dtype, format, N, K, bias)
        x = torch.randn(max(NUM_ROWS), K).to(dtype)
        alone = torch.cat([packed(row[None]) for row in x])
        x[3, 5] = torch.nan
        for num_rows in NUM_ROWS:
            found = packed(x[:num_rows])
            others = [row for row in range(num_rows) if row != 3]
            assert torch.equal(found[others], alone[others])
            assert found[3:4].isnan().all()

    def test_the_product_with_a_row_of_zeros_is_the_bias(
        self, dtype: torch.dtype, format: WeightFormat, N: int, K: int, bias: bool
    ) -> None:
        packed, _ = self.both(dtype, format, N, K, bias)
        expected = packed.bias if bias else torch.zeros(N, dtype=dtype)
        assert torch.equal(packed(torch.zeros(1, K, dtype=dtype))[0], expected)


def test_pytorch_computes_layers_of_other_dtypes_and_of_odd_sizes() -> None:
    for layer in (nn.Linear(8, 16, dtype=torch.float64), nn.Linear(7, 16, dtype=torch.bfloat16)):
        layer.requires_grad_(False)
        assert pack_linear(layer.weight, layer.bias, layer.weight.dtype) is None
        backend = cpu_backend(torch.float32)
        built = backend.ops.linear(layer.weight, layer.bias, layer.weight.dtype)
        assert isinstance(built, nn.Linear)
        x = torch.randn(3, layer.in_features, dtype=layer.weight.dtype)
        assert torch.equal(built(x), layer(x))


@pytest.mark.parametrize("format", [None, INT4])
def test_on_a_cpu_with_many_cores_each_thread_has_a_task_and_the_bits_stay(
    format: WeightFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = launch.thread_pool()
    assert pool is not None
    tasks = []

    def run_call(kernel: int, num_tasks: int, arguments: bytes, num_threads: int) -> int:
        tasks.append(num_tasks)
        pool.run_call(kernel, num_tasks, arguments, 2)
        return num_threads

    layer = pack_linear(torch.randn(2048, 64), None, torch.float32, format)
    assert layer is not None
    x = torch.randn(3, 64)
    expected = layer(x)
    monkeypatch.setattr(launch, "_pool", lambda: replace(pool, run_call=run_call))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    found = layer(x)
    monkeypatch.undo()
    assert tasks[-1] == 64
    assert torch.equal(found, expected)
