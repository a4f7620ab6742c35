"""Chooses replicas at random: the baseline for routing by prefixes."""

from hashlib import sha256

from forwardscope_ray.asgi_call import Call
from forwardscope_ray.router import PrefixRouter
from ray.serve.request_router import ReplicaID


class RandomRouter(PrefixRouter):
    """Chooses by a hash of the body, so that a test can repeat the choice."""

    def rank(self, call: Call, loads: dict[ReplicaID, int]) -> list[ReplicaID]:
        order = sorted(loads, key=lambda replica: replica.unique_id)
        first = order[sha256(call.body).digest()[0] % len(order)]
        return [first, *(replica for replica in order if replica != first)]
