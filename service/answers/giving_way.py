"""Pauses of long work that delays the generations of others, so that these go on meanwhile."""

import asyncio

from service.state import State, get_engine

PAUSES = 3.0  # of the time of the work


async def give_way(state: State, seconds: float, num_own: int) -> None:
    """After work of `seconds`, leave other generations three times as long, if any run.

    `num_own` of those that run belong to the work itself.
    """
    if get_engine(state).num_owners > num_own:
        await asyncio.sleep(PAUSES * seconds)
