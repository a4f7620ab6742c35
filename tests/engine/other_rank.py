"""The other process of the tests of tensor parallelism: rank 1, which follows the process of the tests.

As a program, it connects, and then follows one network after the other: before each, rank 0 sends the index of its
config in `NETWORKS`. A negative index ends it. With the argument `idle`, it is one of two ranks that have nothing to
compute for longer than their timeout.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from model.config import ModelConfig
from model.engine.tensor_parallel.follower import Follower
from model.engine.tensor_parallel.leading_network import LeadingNetwork
from model.network.ranks import Place, Ranks
from model.network.tensor_parallel import prepare_share
from model.network.transformer import Transformer
from tests.tiny import CONFIGS, build, random_ids

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = timedelta(seconds=120)
IDLE_TIMEOUT = timedelta(seconds=8)
NETWORKS: dict[str, ModelConfig] = CONFIGS | {
    "one key-value head": replace(CONFIGS["gemma3"], num_kv_heads=1),
    "one key-value head, norm over all heads": replace(CONFIGS["olmo2"], num_kv_heads=1, num_heads=4),
}


def share_of(name: str, ranks: Ranks) -> Transformer:
    """Build this rank's shard of a network of `NETWORKS`."""
    whole = build(NETWORKS[name])
    weights = dict(whole.state_dict())
    if whole.config.tied_head:
        del weights["head.weight"]
    network = partial(LeadingNetwork, ranks=ranks) if ranks.rank == 0 else Transformer
    return prepare_share(whole.config, weights, ranks, network=network)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def two_ranks() -> Iterator[Ranks]:
    """Start rank 1 and connect with it, as rank 0."""
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-m", "tests.engine.other_rank"]
    environment = os.environ | own | {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(command, cwd=ROOT, env=environment)
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        ranks = Ranks(Place(rank=0, size=2), timeout=TIMEOUT)
        yield ranks
        ranks.send([-1])
        assert other.wait(TIMEOUT.total_seconds()) == 0
        ranks.disconnect()
    finally:
        other.kill()
        other.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def idle(place: Place) -> None:
    """Be idle for twice the timeout, and then compute a pass."""
    ranks = Ranks(place, timeout=IDLE_TIMEOUT)
    network = share_of("llama", ranks)
    if isinstance(network, LeadingNetwork):
        for _ in range(8):
            time.sleep(IDLE_TIMEOUT.total_seconds() / 4)
            network.keep_alive()
        network(random_ids(67, 5))
        network.end()
    else:
        Follower(network, ranks).run()
    ranks.disconnect()


def main() -> None:
    torch.set_num_threads(1)
    place = Place.of_environment()
    assert place is not None
    if sys.argv[1:] == ["idle"]:
        idle(place)
        return
    ranks = Ranks(place, timeout=TIMEOUT)
    names = list(NETWORKS)
    while (index := ranks.receive()[0]) >= 0:
        Follower(share_of(names[index], ranks), ranks).run()
    ranks.disconnect()


if __name__ == "__main__":
    main()
