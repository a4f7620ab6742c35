"""The number of replicas that the load needs, for Ray's autoscaler."""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

TARGET_USE = 0.7  # of the sequences that the replicas can compute at a time, after a replica has been removed


def replicas_for_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Add replicas while requests wait, and remove those that the running requests do not need.

    A replica can run `capacity` requests at a time (`--max-num-seqs`). Ray averages the figures over its look-back
    period, and applies its delays and limits to the result.
    """
    current = context.target_num_replicas
    figures = context.aggregated_metrics or {}
    waiting, running = (sum(figures.get(name, {}).values()) for name in ("waiting", "running"))
    capacities = figures.get("capacity", {}).values()
    if not capacities:  # no replica has reported yet
        return current, {}
    capacity = sum(capacities) / len(capacities)
    if waiting >= 1:
        return current + math.ceil(waiting / capacity), {}
    needed = max(1, math.ceil(running / (TARGET_USE * capacity)))
    return min(current, needed), {}
