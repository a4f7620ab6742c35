"""Jobs of the network's thread. Jobs that need short passes and wait at the same time share one pass of the network."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from model.network.joint_passes import MAX_COST, PromptPass, compute_passes
from model.tracing.pauses import PAUSE

Result = TypeVar("Result")
Out = TypeVar("Out", covariant=True)


class PassJob(Protocol[Out]):
    """A job that needs passes over prompts, such as the `AnswerGroup` of answers/passes.py.

    `make_result` gets their logits, and the seconds from the first `prepare_passes` of the jobs that share a pass to
    the end of the pass. `cost` is the sum for all passes (see `cost_of` in model/network/joint_passes.py).
    """

    @property
    def cost(self) -> int: ...
    def prepare_passes(self) -> Sequence[PromptPass]: ...
    def make_result(self, logits: Sequence[Tensor], seconds: float) -> Out: ...


Work = Callable[[], Result] | PassJob[Result]


class Job(Generic[Result]):
    """Work that waits, and the future of its result. It runs in the context of the caller: log lines have its ids."""

    def __init__(self, work: Work[Result], pause: Callable[[], None]) -> None:
        self.future: Future[Result] = Future()
        self.passes: Sequence[PromptPass] = ()
        self._work: Work[Result] | None = work  # None: it has ended
        self._context = copy_context()
        self._context.run(PAUSE.set, pause)

    @property
    def cost(self) -> int | None:
        """The cost of the passes that it needs; None: it needs none."""
        return None if self._work is None or callable(self._work) else self._work.cost

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._context.run(function, *arguments)

    def call(self) -> None:
        """Do work that needs no passes."""
        assert callable(self._work)
        self._end(self._work)

    def prepare(self) -> None:
        """Prepare the passes. If this fails, the job has ended."""
        assert self._work is not None
        assert not callable(self._work)
        try:
            self.passes = self.run(self._work.prepare_passes)
        except Exception as error:
            self._fail(error)

    def complete(self, found: Sequence[Tensor | Exception], seconds: float) -> None:
        """Make the result from the logits of the passes. The first exception among them ends the job."""
        assert self._work is not None
        assert not callable(self._work)
        if errors := [each for each in found if isinstance(each, Exception)]:
            self._fail(errors[0])
        else:
            self._end(self._work.make_result, found, seconds)

    def _end(self, function: Callable[..., Result], *arguments: Any) -> None:
        try:
            self.future.set_result(self.run(function, *arguments))
        except Exception as error:
            self._fail(error)
        self._work, self.passes = None, ()

    def _fail(self, error: Exception) -> None:
        """Let an exception be raised where the result is awaited. Its frames, which keep this job, keep no work."""
        self._work, self.passes = None, ()
        self.future.set_exception(error)


def run_next(jobs: deque[Job[Any]]) -> None:
    """Run the first job that nobody has cancelled, together with others that may share its pass."""
    while jobs:
        job = jobs.popleft()
        if job.future.set_running_or_notify_cancel():
            if job.cost is None:
                job.call()
            else:
                run_together([job, *take_small(jobs, MAX_COST - job.cost)])
            return


def take_small(jobs: deque[Job[Any]], room: int) -> list[Job[Any]]:
    """Take the jobs out of the queue whose passes cost at most `room` together."""
    taken = []
    for job in tuple(jobs):
        cost = job.cost
        if cost is not None and cost <= room:
            jobs.remove(job)
            if job.future.set_running_or_notify_cancel():
                room -= cost
                taken.append(job)
    return taken


def run_together(jobs: Sequence[Job[Any]]) -> None:
    """Run jobs that need passes. An error ends only its own job, and keeps nothing of the others."""
    began = time.perf_counter()
    for job in jobs:
        job.prepare()
    jobs = [job for job in jobs if not job.future.done()]
    if not jobs:
        return
    passes = [each for job in jobs for each in job.passes]
    found = deque(jobs[0].run(compute_passes, passes))
    passes.clear()
    seconds = time.perf_counter() - began
    for job in jobs:
        job.complete([found.popleft() for _ in job.passes], seconds)
