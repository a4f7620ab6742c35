"""Parts of weights have the bits of the whole weights, in every form in which a layer holds them."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from model.network.float_copy import linear_weight
from model.network.weight_parts import LinearMatrix
from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import pack_weight
from model.ops.cpu.packed_linear import pack_linear
from model.ops.quantization import INT4, INT8, quantize_int8, quantize_with_minimums
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import FORMATS, GroupedWeight, WeightFormat
from tests.ops.cpu.test_grouped_linear import random_weight

LAYERS: Mapping[str, Callable[[Tensor], nn.Module]] = {
    "PyTorch": lambda weight: TORCH.ops.linear(weight, None, weight.dtype),
    "packed float32": lambda weight: packed(weight),
    "packed bfloat16": lambda weight: packed(weight.bfloat16()),
    "int8": lambda weight: grouped(quantize_int8(weight)),
    "int4": lambda weight: grouped(quantize_with_minimums(weight, INT4)),
    "int8 without kernels": lambda weight: TORCH.ops.linear(weight, None, weight.dtype, INT8),
    "two formats": lambda weight: two_formats(quantize_int8(weight[:40]), quantize_with_minimums(weight[40:], INT4)),
}


def packed(weight: Tensor) -> nn.Module:
    layer = pack_linear(weight, None, weight.dtype)
    return layer if layer is not None else pytest.skip(f"no kernels for {weight.dtype} here")


def grouped(weight: GroupedWeight) -> nn.Module:
    if not has_grouped_kernel(weight.format, torch.float32):
        pytest.skip("no kernels for quantized weights here")
    return GroupedLinear([pack_weight(weight)], None, torch.float32)


def two_formats(*parts: GroupedWeight) -> nn.Module:
    for part in parts:
        grouped(part)  # skips the test without a kernel
    return GroupedLinear(list(map(pack_weight, parts)), None, torch.float32)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("numbers_at_a_time", [1, 1 << 20])
def test_a_part_of_a_layer_has_the_bits_of_the_whole_weight(
    name: str, numbers_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns in any order, at the ends of tiles and groups, of a weight that fills neither."""
    monkeypatch.setattr("model.ops.cpu.grouped_packing.NUMBERS_AT_A_TIME", numbers_at_a_time)
    layer = LAYERS[name](torch.randn(83, 76, generator=torch.Generator().manual_seed(1)))
    matrix, whole = LinearMatrix(layer, torch.float32), linear_weight(layer)
    for rows, columns in (([82, 0, 15, 16, 39, 40], [75, 0, 31, 32, 64]), ([5], range(76)), (range(83), [63])):
        index = torch.tensor(rows), torch.tensor(columns)
        assert torch.equal(matrix.read(*index), whole[index[0][:, None], index[1]].to(matrix.dtype))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_part_of_every_format_has_the_bits_of_the_whole_weight(format: WeightFormat) -> None:
    layer = grouped(random_weight(format, 33, 512))
    rows, columns = torch.tensor([32, 3, 17]), torch.tensor([0, 511, 255, 256])
    found = LinearMatrix(layer, torch.float32).read(rows, columns)
    assert torch.equal(found, linear_weight(layer)[rows[:, None], columns])
