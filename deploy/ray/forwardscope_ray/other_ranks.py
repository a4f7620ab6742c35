"""The other processes of a replica that computes its network with several (`tensor_parallel`): actors of Ray.

The replica is rank 0, and Ray reserves CPUs and GPUs for all ranks together, as a placement group. Ray ends the actors
when their replica ends. If one of them ends before, the replica ends as well, and Ray starts all of them again.
"""

import asyncio
from typing import Any

import ray
from ray.actor import exit_actor
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports this class

from model.network.ranks import TIMEOUT, Place, Ranks
from service.commands.ranks import follow
from service.loading import device_of
from service.log_format import configure_logging
from service.settings import Settings


class OtherRank:
    """An actor of Ray: a rank that follows that of the replica."""

    def follow(self, settings: dict[str, Any], place: Place, host: str, port: int) -> None:
        """Connect with rank 0, which listens on this address, and compute a share of its passes until it ends."""
        parsed = Settings(**settings)
        configure_logging(parsed.log_level, parsed.log_format)
        store = TCPStore(host, port, place.size, is_master=False, timeout=TIMEOUT)
        follow(parsed, Ranks(place, device_of(parsed), store=store))
        exit_actor()


async def connect_other_ranks(settings: dict[str, Any]) -> Ranks | None:
    """Start the other ranks of this replica, and connect with them. None if the replica computes the whole network.

    Raises the error of a rank that ends before all are connected.
    """
    parsed = Settings(**settings)
    size = parsed.tensor_parallel
    if size == 1:
        return None
    group = ray.util.get_current_placement_group()
    assert group is not None, "app.build reserves resources for all ranks"
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    ends = []
    for rank in range(1, size):
        bundle = group.bundle_specs[rank]
        actor = ray.remote(OtherRank).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        work = actor.remote().follow.remote(settings, Place(rank, size), host, store.port)
        ends.append(asyncio.ensure_future(error_of(work)))
    connected = asyncio.ensure_future(asyncio.to_thread(Ranks, Place(0, size), device_of(parsed), store=store))
    await asyncio.wait({connected, *ends}, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        if end.done():
            raise end.result()
    return await connected


async def error_of(work: "ray.ObjectRef[None]") -> RayError:
    """Wait until a rank ends, which is always an error for Ray."""
    try:
        await work
    except RayError as error:
        return error
    raise AssertionError("`follow` ends with its process")
