"""How tensors lie in memory, as kernels take them: an address, a stride and sizes. Also, how kernels are divided."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)  # of the numbers that kernels read and write
NUMBERS_PER_TASK = 2048  # with fewer numbers, starting another thread costs more than it saves
OUTPUTS_PER_TASK = 128  # of a linear layer: several tiles one after the other, so that the next one can be prefetched
FEWEST_OUTPUTS = 32  # of a task, where a linear layer would have fewer tasks than there are threads


def num_tasks(tensor: Tensor) -> int:
    """How many tasks a kernel that writes `tensor` may be divided into."""
    return tensor.numel() // NUMBERS_PER_TASK


def num_linear_tasks(num_outputs: int) -> int:
    """How many tasks a linear layer may be divided into."""
    return max(num_outputs // OUTPUTS_PER_TASK, min(num_outputs // FEWEST_OUTPUTS, torch.get_num_threads()))


def linear_input(x: Tensor, dtype: torch.dtype, num_inputs: int) -> Tensor:
    """The rows of x, contiguous, for a linear layer. Raises `ValueError` if the layer takes other rows."""
    if x.dtype != dtype or x.shape[-1] != num_inputs:
        raise ValueError(
            f"the input is {x.dtype} {tuple(x.shape)}, but this packed layer takes {num_inputs} {dtype} per row"
        )
    return x.contiguous()


def merge_outer_dims(x: Tensor, num_inner: int) -> tuple[Tensor, int]:
    """Return x, and the stride at which its outer dims (all but the last `num_inner`) can be walked as one dim.

    The inner dims must be contiguous. If the layout of x does not allow this, a contiguous copy is returned instead.
    """
    shape, strides = x.shape, x.stride()
    outer = len(shape) - num_inner
    if outer <= 0:
        return x.contiguous(), 0
    is_contiguous = strides[-1] == 1 or shape[-1] == 1
    if num_inner == 2:
        is_contiguous = is_contiguous and (strides[-2] == shape[-1] or shape[-2] == 1)
    merges = all(shape[dim] == 1 or strides[dim] == shape[dim + 1] * strides[dim + 1] for dim in range(outer - 1))
    if is_contiguous and merges:
        return x, strides[outer - 1]
    x = x.contiguous()
    return x, x.stride(outer - 1)


def equal_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x, and the stride and size of the rows of equal size in it. The stride is 0 if there is one row.

    If the layout of x does not allow this, a contiguous copy is returned instead.
    """
    if x.is_contiguous():
        return x, 0, x.numel()
    size, inner = 1, 0
    while inner < x.dim() and (x.shape[-inner - 1] == 1 or x.stride(-inner - 1) == size):
        inner += 1
        size *= x.shape[-inner]
    x, stride = merge_outer_dims(x, inner) if inner in (1, 2) else (x.contiguous(), 0)
    return (x, stride, size) if stride else (x, 0, x.numel())
