"""The processes that compute one network together, and the messages between them.

They are started by `torchrun` or Ray, and numbered: rank 0 decides what is computed, and the other ranks follow.
Numbers of the network travel with the library for its device (gloo for CPUs, NCCL for CUDA), decisions always with
gloo.

A lost rank cannot be replaced: every call fails with `LostRank` from then on. A process that dies closes its
connections, so the other ranks notice it in their next exchange, without waiting for a timeout.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not say that it exports this class

FIRST_INTEGERS = 512  # of a message; only a longer message needs a second exchange
TIMEOUT = timedelta(minutes=10)  # how long a rank waits for one that answers no more, but has not closed its connection


class LostRank(Exception):
    """A rank has ended or does not answer, or the ranks no longer agree on what they compute."""


@dataclass(frozen=True)
class Place:
    """The rank of this process among all `size` ranks, and its rank among those on its own machine."""

    rank: int
    size: int
    local_rank: int = 0

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Place | None":
        """The place that `torchrun` gave to this process. None if something else has started it."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
            return None
        numbers = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(*numbers)


class Ranks:
    """The connection of this process to all others. Only one thread may use it at a time."""

    def __init__(
        self, place: Place, device: str = "cpu", timeout: timedelta = TIMEOUT, store: Store | None = None
    ) -> None:
        """Connect. This returns when all ranks have connected; call `disconnect` at the end.

        The ranks find each other through `store`, by default at the address in the variables of `torchrun`.
        """
        self.rank, self.size = place.rank, place.size
        self._lost: str | None = None
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "cpu:gloo"
        self._call(
            lambda: dist.init_process_group(
                backend, rank=place.rank, world_size=place.size, timeout=timeout, store=store
            )
        )

    @property
    def is_lost(self) -> bool:
        """Whether a rank is lost. Nothing can be computed any more."""
        return self._lost is not None

    def lose(self, reason: str) -> LostRank:
        """Note that the ranks can no longer compute together. Returns the error to raise."""
        self._lost = self._lost or reason
        return LostRank(self._lost)

    def check(self) -> None:
        """Raise `LostRank` if an earlier exchange has failed."""
        if self._lost is not None:
            raise LostRank(self._lost)

    def send(self, integers: Sequence[int]) -> None:
        """Send integers from rank 0 to all other ranks, which must call `receive`."""
        first = torch.zeros(1 + FIRST_INTEGERS, dtype=torch.int64)
        message = torch.tensor(integers, dtype=torch.int64)
        first[0] = len(message)
        first[1 : 1 + len(message)] = message[:FIRST_INTEGERS]
        self.broadcast(first)
        if len(message) > FIRST_INTEGERS:
            self.broadcast(message[FIRST_INTEGERS:])

    def receive(self) -> list[int]:
        """The next integers that rank 0 sends."""
        first = torch.empty(1 + FIRST_INTEGERS, dtype=torch.int64)
        self.broadcast(first)
        length = int(first[0])
        message = first[1 : 1 + length]
        if length > FIRST_INTEGERS:
            rest = torch.empty(length - FIRST_INTEGERS, dtype=torch.int64)
            self.broadcast(rest)
            message = torch.cat((message, rest))
        numbers: list[int] = message.tolist()
        return numbers

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x`, which is contiguous, with that of rank 0."""
        self._call(lambda: dist.broadcast(x, src=0))

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each of them. `x` is contiguous and overwritten."""
        self._call(lambda: dist.all_reduce(x))
        return x

    def collect(self, x: Tensor) -> list[Tensor] | None:
        """On rank 0 the tensors of all ranks, which have the same shape, in the order of the ranks; elsewhere None."""
        x = x.contiguous()
        all_parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._call(lambda: dist.gather(x, all_parts, dst=0))
        return all_parts

    def wait_for_all(self) -> None:
        """Return when all ranks have called this."""
        self._call(lambda: dist.all_reduce(torch.zeros(1, dtype=torch.int64)))

    def disconnect(self) -> None:
        """Close the connections."""
        with suppress(RuntimeError):  # those to a lost rank are closed already
            dist.destroy_process_group()

    def _call(self, exchange: Callable[[], object]) -> None:
        self.check()
        try:
            exchange()
        except RuntimeError as error:  # torch has no narrower class for lost connections
            # gloo writes the place in its source before the reason, and general advice after it
            reason = re.sub(r"^\[[^\]]*\] ?", "", str(error).strip().splitlines()[0]).partition(". ")[0]
            lost = f"rank {self.rank} of {self.size} has lost another rank, so the network cannot be computed"
            raise self.lose(f"{lost}: {reason}") from error
