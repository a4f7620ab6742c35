"""Many calls at once: the engine computes their sequences together, with the results of single calls."""

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio

Result = TypeVar("Result")
MAX_AT_ONCE = 64  # by default, a server computes as many sequences in a step


class Batches:
    """The method `batch` of clients whose calls wait for their results."""

    def batch(
        self,
        call: Callable[..., Result],
        prompts: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[Result]:
        """Make a call for each of several prompts, up to 64 at a time, and return the results in order.

        `batch(model.generate, ["a", "b"], max_tokens=5)` calls `model.generate(..., max_tokens=5)` with each prompt.
        The calls may be any that begin with a prompt or with messages. The first exception of a call is raised when
        those that have begun have ended; no others begin then.
        """
        self._begin_batch()
        with ThreadPoolExecutor(max(1, min(len(prompts), MAX_AT_ONCE))) as pool:
            return list(pool.map(lambda prompt: call(prompt, *args, **kwargs), prompts))

    def _begin_batch(self) -> None:
        """Prepare for calls from several threads."""


class AsyncBatches:
    """The method `batch` of an asynchronous client."""

    async def batch(
        self,
        call: Callable[..., Coroutine[Any, Any, Result]],
        prompts: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[Result]:
        """Make a call for each of several prompts, up to 64 at a time, and return the results in order.

        `await client.batch(client.generate, ["a", "b"], max_tokens=5)` calls `generate` with each prompt. The first
        exception of a call is raised, and cancels the others.
        """
        results: dict[int, Result] = {}
        room = anyio.CapacityLimiter(MAX_AT_ONCE)

        async def run(index: int, prompt: Any) -> None:
            async with room:
                results[index] = await call(prompt, *args, **kwargs)

        try:
            async with anyio.create_task_group() as group:
                for index, prompt in enumerate(prompts):
                    group.start_soon(run, index, prompt)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [results[index] for index in range(len(prompts))]
