"""A sequence whose items are made when they are first read, possibly on another thread."""

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """`length` items that `make` returns. `make` is called at the first access, and then forgotten."""

    def __init__(self, length: int, make: Callable[[], list[Item]]) -> None:
        self._length = length
        self._make: Callable[[], list[Item]] | None = make
        self._items: list[Item] = []

    def _made(self) -> list[Item]:
        make = self._make
        if make is not None:
            items = make()
            assert len(items) == self._length
            self._items, self._make = items, None
        return self._items

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self._made()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list
