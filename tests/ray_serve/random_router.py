"""Chooses replicas at random: the baseline for routing by prefixes."""

from collections.abc import Sequence
from random import Random

from forwardscope_ray.asgi_call import Call
from forwardscope_ray.router import PrefixRouter
from ray.serve.request_router import ReplicaID


class RandomRouter(PrefixRouter):
    """Draws from a seeded generator, one number for each request whose prompt has whole blocks."""

    def initialize_state(self, seed: int = 0) -> None:
        super().initialize_state()
        self._random = Random(seed)

    def rank(self, call: Call, loads: dict[ReplicaID, int]) -> list[ReplicaID]:
        order: Sequence[ReplicaID] = sorted(loads, key=lambda replica: replica.unique_id)
        first = self._random.randrange(len(order)) if call.prefix_blocks else 0
        return [order[first], *(replica for replica in order if replica != order[first])]
