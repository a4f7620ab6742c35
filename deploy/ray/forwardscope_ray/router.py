"""Chooses the replica of a request: the one that has computed the longest part of its prompt before.

Ray's own `PrefixCacheAffinityRouter` expects the request objects of Ray's vLLM deployments, and asks an actor for each
request. This router reads the hashes of a `Call`, and remembers in its own process which replica got which blocks.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forwardscope_ray.asgi_call import Call

MAX_LOAD_DIFFERENCE = 8  # requests
MAX_REMEMBERED_BLOCKS = 1 << 16  # for each replica


class KnownBlocks:
    """The hashes of the blocks of prompts that one replica has got. The least recently used one is forgotten first."""

    def __init__(self, max_blocks: int = MAX_REMEMBERED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """The number of blocks at the beginning that the replica knows."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the first block is needed for all others, so it is forgotten last
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def rank(
    blocks: Sequence[int], loads: dict[ReplicaID, int], known: dict[ReplicaID, KnownBlocks], max_difference: int
) -> list[ReplicaID]:
    """Sort the replicas of `loads` (replica -> requests that it works on), the best one for these blocks first.

    A replica with `max_difference` more requests than the idlest one is not preferred for what it knows. Without a
    match, the better of two random replicas is first (power of two choices).
    """
    least = min(loads.values())
    matches = {
        replica: known[replica].match(blocks) if load - least < max_difference else 0 for replica, load in loads.items()
    }
    pair = random.sample(list(loads), min(2, len(loads)))
    if not any(matches.values()):
        first = min(pair, key=loads.__getitem__)
    else:
        first = max(loads, key=lambda replica: (matches[replica], -loads[replica]))
    return [first, *sorted(loads.keys() - {first}, key=loads.__getitem__)]


class PrefixRouter(RequestRouter):
    """Ray's request router for deployments whose only argument is a `Call`."""

    def initialize_state(self, max_load_difference: int = MAX_LOAD_DIFFERENCE) -> None:
        """Ray passes `request_router_kwargs` here."""
        self._max_load_difference = max_load_difference
        self._known: dict[ReplicaID, KnownBlocks] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: each rank has one replica, and Ray takes the first one that accepts the request."""
        call = call_of(pending_request)
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        replicas = {id: each for id, each in replicas.items() if id.unique_id not in call.excluded} or replicas
        if not replicas:
            return []
        loads = {id: self.replica_queue_len_cache.get(id) or 0 for id in replicas}
        order = self.rank(call, loads)
        return [[replicas[id]] for id in order]

    def rank(self, call: Call, loads: dict[ReplicaID, int]) -> list[ReplicaID]:
        """Sort the replicas, and remember that the first one gets the blocks of the request."""
        for id in loads:
            self._known.setdefault(id, KnownBlocks())
        order = rank(call.prefix_blocks, loads, self._known, self._max_load_difference)
        self._known[order[0]].add(call.prefix_blocks)
        return order

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        running = {replica.replica_id for replica in replicas}
        self._known = {id: blocks for id, blocks in self._known.items() if id in running}


def call_of(request: PendingRequest | None) -> Call:
    """The argument of a request."""
    arguments: list[Any] = [] if request is None else request.args
    return next((argument for argument in arguments if isinstance(argument, Call)), Call({}, b""))
