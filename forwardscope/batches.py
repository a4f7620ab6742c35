"""Many calls at once: the engine computes their sequences together, with the results of single calls."""

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import anyio

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_AT_ONCE = 64  # by default, a server computes as many sequences in a step
FEW_AT_ONCE = {"attribute": 8, "compare": 8}  # calls that a server computes one by one, and of which few may wait


class Batches:
    """The method `batch` of clients whose calls wait for their results."""

    def batch(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call a function that uses the model with each of several items, up to 64 at a time, in threads.

        `batch(lambda scale: model.generate("a", edits=[add | {"scale": scale}]), [0, 1, 2])` returns three generations,
        which are computed together. A method takes a list of prompts itself. The first exception is raised when the
        calls that have begun have ended; no others begin then.
        """
        return self._together([partial(call, item) for item in items])

    def _together(self, calls: Sequence[Callable[[], Result]], name: str = "") -> list[Result]:
        """The results of calls, which are those of one method if this has a name."""
        self._begin_batch()
        with ThreadPoolExecutor(max(1, min(len(calls), FEW_AT_ONCE.get(name, MAX_AT_ONCE)))) as pool:
            return list(pool.map(lambda call: call(), calls))

    def _begin_batch(self) -> None:
        """Prepare for calls from several threads."""


class AsyncBatches:
    """The method `batch` of an asynchronous client."""

    async def batch(self, call: Callable[[Item], Coroutine[Any, Any, Result]], items: Sequence[Item]) -> list[Result]:
        """Call a function with each of several items, up to 64 at a time, and await the results.

        A method takes a list of prompts itself. The first exception is raised, and cancels the other calls.
        """
        return await self._together([partial(call, item) for item in items])

    async def _together(
        self, calls: Sequence[Callable[[], Coroutine[Any, Any, Result]]], name: str = ""
    ) -> list[Result]:
        results: dict[int, Result] = {}
        room = anyio.CapacityLimiter(FEW_AT_ONCE.get(name, MAX_AT_ONCE))

        async def run(index: int, call: Callable[[], Coroutine[Any, Any, Result]]) -> None:
            async with room:
                results[index] = await call()

        try:
            async with anyio.create_task_group() as group:
                for index, call in enumerate(calls):
                    group.start_soon(run, index, call)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [results[index] for index in range(len(calls))]
