"""Results with PyTorch's tensors in place of numpy arrays, for the requests of `load`."""

from typing import Any, TypeVar

import numpy as np
import torch

from forwardscope.results.passes import LogitRows, Patterns
from forwardscope.results.records import Named, Record
from forwardscope.results.stages import Stage

Result = TypeVar("Result")


def with_tensors(result: Result) -> Result:
    """Replace the arrays of a result that nobody else has, in place where possible. Stages get their dtype back."""
    found: Any = result
    if isinstance(result, np.ndarray):
        found = torch.from_numpy(result)
    elif isinstance(result, tuple):
        found = tuple(map(with_tensors, result))
    elif isinstance(result, Named):
        found = Named(map(with_tensors, result.values()))
    elif isinstance(result, LogitRows):
        result.columns |= {name: with_tensors(each) for name, each in result.columns.items()}
    elif isinstance(result, Record):
        fields = vars(result)
        fields |= {name: with_tensors(each) for name, each in fields.items()}
        if isinstance(result, Stage) and result.values is not None:  # numpy has no bfloat16
            fields["values"] = result.values.to(getattr(torch, result.dtype))
        elif isinstance(result, Patterns):
            fields["values"] = with_tensors(result.values)
            fields["means"] = {name: with_tensors(each) for name, each in result.means.items()}
    return found  # type: ignore[no-any-return]  # the type of the result has other arrays
