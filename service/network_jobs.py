"""Jobs of the network's thread. Jobs that need short passes and wait at the same time share one pass of the network."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from model.network.joint_passes import MAX_COST, PromptPass, compute_together
from model.tracing.pauses import PAUSE

Result = TypeVar("Result")
Out = TypeVar("Out", covariant=True)


class PassJob(Protocol[Out]):
    """A job that needs passes over prompts: `begin` prepares them, and `finish` gets their logits.

    `finish` also gets the seconds from the first `begin` of the jobs that share a pass to the end of the pass. `cost`
    is the sum for all passes (see `cost_of` in model/network/joint_passes.py).
    """

    @property
    def cost(self) -> int: ...
    def begin(self) -> Sequence[PromptPass]: ...
    def finish(self, logits: Sequence[Tensor], seconds: float) -> Out: ...


Work = Callable[[], Result] | PassJob[Result]


class Job(Generic[Result]):
    """Work that waits, and the future of its result. It runs in the context of the caller: log lines have its ids."""

    def __init__(self, work: Work[Result], pause: Callable[[], None]) -> None:
        self.work = work
        self.future: Future[Result] = Future()
        self._context = copy_context()
        self._context.run(PAUSE.set, pause)

    def run(self, function: Callable[[], Any]) -> Any:
        return self._context.run(function)

    def complete(self, function: Callable[[], Result]) -> None:
        """Set the result to that of a function. Its exception is raised where the result is awaited."""
        try:
            self.future.set_result(self.run(function))
        except Exception as error:
            self.future.set_exception(error)


def run_next(jobs: deque[Job[Any]]) -> None:
    """Run the first job that nobody has cancelled, together with others that may share its pass."""
    while jobs:
        job = jobs.popleft()
        if job.future.set_running_or_notify_cancel():
            work = job.work
            if callable(work):
                job.complete(work)
            else:
                run_together([(job, work), *take_small(jobs, MAX_COST - work.cost)])
            return


def take_small(jobs: deque[Job[Any]], room: int) -> list[tuple[Job[Any], PassJob[Any]]]:
    """Take the jobs out of the queue whose passes cost at most `room` together."""
    taken = []
    for job in tuple(jobs):
        work = job.work
        if not callable(work) and work.cost <= room:
            jobs.remove(job)
            if job.future.set_running_or_notify_cancel():
                room -= work.cost
                taken.append((job, work))
    return taken


def run_together(jobs: Sequence[tuple[Job[Any], PassJob[Any]]]) -> None:
    """Run jobs that need passes. An error ends only its own job."""
    began = time.perf_counter()
    passes: list[PromptPass] = []
    ready: list[tuple[Job[Any], PassJob[Any], slice]] = []
    for job, work in jobs:
        try:
            own = job.run(work.begin)
        except Exception as error:  # raised again where the result is awaited
            job.future.set_exception(error)
        else:
            ready.append((job, work, slice(len(passes), len(passes) + len(own))))
            passes += own
    if not ready:
        return
    found = ready[0][0].run(partial(compute_together, passes))
    seconds = time.perf_counter() - began
    for job, work, rows in ready:
        job.complete(partial(finish, work, found[rows], seconds))


def finish(work: PassJob[Result], found: Sequence[Tensor | Exception], seconds: float) -> Result:
    """The result of a job. Raises the first exception of its passes."""
    logits: list[Tensor] = []
    for each in found:
        if isinstance(each, Exception):
            raise each
        logits.append(each)
    return work.finish(logits, seconds)
