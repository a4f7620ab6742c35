"""Read the indices that a caller chooses of the dims of a weight, written as in "0, 2, -3:" for each dim."""

import re
from collections.abc import Mapping

import torch

from model.errors import InvalidField, shortened
from model.network.weight_views import Indices, Part, WeightView

INDEX = re.compile(r"-?\d{1,9}")
RANGE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9}))?")


def read_part(view: WeightView, texts: Mapping[str, str]) -> Part:
    """The indices of each dim of a weight; all of a dim that `texts` does not have.

    Raises `InvalidField`, which names the dim, for a dim or an index that the weight does not have.
    """
    for dim in texts:
        if dim not in view.dims:
            raise InvalidField(dim, f"{view.name} does not have this dim; it has {', '.join(view.dims)}")
    return [
        _read_indices(texts[dim], size, dim) if dim in texts else range(size)
        for dim, size in zip(view.dims, view.shape, strict=True)
    ]


def _read_indices(text: str, size: int, dim: str) -> Indices:
    """The indices among `size` ones, in the order of the text. One may occur twice, as a token does in a prompt."""
    ranges = [_read_range(item.strip(), size, dim) for item in text.split(",")]
    if len(ranges) == 1:
        return ranges[0]
    if (number := sum(map(len, ranges))) > size:
        raise InvalidField(dim, f"selects {number} indices; it may select as many as there are, {size}")
    return torch.cat([torch.arange(each.start, each.stop, each.step, device="cpu") for each in ranges])


def _read_range(item: str, size: int, dim: str) -> range:
    """The indices of one number or range."""
    if INDEX.fullmatch(item):
        index = int(item)
        if not -size <= index < size:
            raise InvalidField(dim, f"{index} is out of range; the indices are {-size} to {size - 1}")
        return range(index % size, index % size + 1)
    found = RANGE.fullmatch(item)
    if found is None:
        takes = "give numbers and ranges such as 0, -1 or 0:10, separated by commas"
        raise InvalidField(dim, f"{shortened(item)} is not an index; {takes}")
    start, stop, step = (None if number is None else int(number) for number in found.groups())
    first = 0 if start is None else start + size * (start < 0)
    end = size if stop is None else stop + size * (stop < 0)
    if not (0 <= first < end <= size and step != 0):
        reason = "a range has a start before its stop, both from 0 to"
        raise InvalidField(dim, f"{item} selects no indices or some that are out of range; {reason} {size}")
    return range(first, end, step or 1)
