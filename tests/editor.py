"""A tap that changes stages, for tests that compute the same change in another way."""

from collections.abc import Callable, Mapping

from torch import Tensor


class Editor:
    """Replaces stages: `edits` maps a full stage name to a function of the tensor."""

    def __init__(self, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._edits = edits

    def wants(self, name: str) -> bool:
        return name in self._edits

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return self._edits[name](tensor)
