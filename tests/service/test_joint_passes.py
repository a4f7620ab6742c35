"""Short passes that wait at the same time are one pass of the network, and each has the answer that it has alone."""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from forwardscope import load
from model.network.joint_passes import PromptPass
from model.network.transformer import Transformer
from service.network_jobs import Job, run_next
from service.network_thread import NetworkThread
from service.state import State
from tests.service.running import PATIENCE_SECONDS, Running, Start, running, wait_until
from tests.service.test_prompt_lists import without_timings

PROMPTS = ["Once upon a time", "Tom", "The cat saw a big dog and", "Lily had a red ball."]
ADD = {"stage": "blocks.1.resid_post", "op": "add", "vector": [1.0] * 8, "neurons": [*range(8)], "positions": [-1]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/forward", {"prompt": PROMPTS[0], "stages": ["blocks.*.attn.pattern", "*.resid_post"], "detail": "values"}),
    ("/logits", {"prompt": PROMPTS[1], "top_k": 5}),
    ("/logits", {"prompt": PROMPTS[2], "positions": "all", "top_k": 3, "edits": [ADD], "baseline": True}),
    ("/patterns", {"prompt": PROMPTS[3], "layers": [0, 2]}),
    ("/logits", {"prompt": PROMPTS, "top_k": 2}),
]


@pytest.fixture(scope="module")
def bundled() -> Iterator[Running]:
    with running(model="bundled") as service:
        yield service


@pytest.fixture
def pass_sizes(monkeypatch: pytest.MonkeyPatch, bundled: Running) -> list[int]:
    """The numbers of tokens of the passes of all networks."""
    sizes: list[int] = []
    forward = Transformer.forward

    def counted(self: Transformer, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(ids.shape[1])
        return forward(self, ids, *args, **kwargs)

    assert bundled.state.checkpoint is not None
    if not bundled.state.checkpoint.model.batch_invariant:
        pytest.skip("this machine has no kernels")
    monkeypatch.setattr(Transformer, "forward", counted)
    return sizes


def num_jobs(state: State) -> int:
    """The number of jobs of the network's thread that run or wait."""
    return len(state.worker._jobs_in_flight)


def at_once(service: Running, requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The answers to requests that wait at the same time, in their order."""
    with ThreadPoolExecutor(len(requests)) as pool:
        with service.blocked():
            pending = []
            for path, body in requests:
                pending.append(pool.submit(service.answer, path, **body))
                wait_until(lambda: num_jobs(service.state) == 1 + len(pending), "the request waits")
        return [each.result() for each in pending]


def comparable(answer: dict[str, Any]) -> Any:
    return [*map(without_timings, answer.get("results", [answer]))]


def test_requests_that_wait_together_are_one_pass_with_the_answers_of_single_ones(
    bundled: Running, pass_sizes: list[int]
) -> None:
    alone = [comparable(bundled.answer(path, **body)) for path, body in REQUESTS]
    assert len(pass_sizes) == len(REQUESTS)  # a list is one pass, and so are an edited and a plain one
    num_tokens = sum(pass_sizes)
    pass_sizes.clear()
    assert [*map(comparable, at_once(bundled, REQUESTS))] == alone
    assert pass_sizes == [num_tokens]


def test_long_prompts_and_many_stages_are_passes_of_their_own(bundled: Running, pass_sizes: list[int]) -> None:
    at_once(bundled, [("/logits", {"prompt": [1] * length}) for length in (200, 100, 57, 56, 1)])
    assert pass_sizes == [200 + 56, 100 + 57 + 1]
    pass_sizes.clear()
    bundled.answer("/logits", prompt=[1] * 150, edits=[ADD], baseline=True)
    assert pass_sizes == [150, 150]
    pass_sizes.clear()
    edits = [ADD | {"stage": "blocks.*.resid_post"}] * 64
    at_once(bundled, [("/logits", {"prompt": [1, 2], "edits": edits}), ("/logits", {"prompt": [1] * 160})])
    assert sorted(pass_sizes) == [2, 160]


def test_passes_that_together_need_more_memory_than_the_limit_are_not_joined(
    start: Start, pass_sizes: list[int]
) -> None:
    service = start(model="bundled")
    assert service.state.checkpoint is not None
    limit = 3 * 4 * 20 * service.state.checkpoint.model.config.vocab_size
    service.state.settings.max_pass_bytes = limit
    for prompts in ([[1] * 12] * 3, [[1] * 10] * 3):
        service.answer("/logits", prompt=prompts, positions="all", top_k=1)
    assert pass_sizes == [12, 12, 12, 20, 10]


def test_a_joint_pass_keeps_to_the_longest_prompt_that_is_allowed(start: Start, pass_sizes: list[int]) -> None:
    service = start(model="bundled", max_pass_tokens=40)
    service.answer("/logits", prompt=[[1] * 20] * 3, top_k=1)
    assert pass_sizes == [40, 20]


def test_the_prompts_of_a_network_without_kernels_are_jobs_of_their_own(tiny: Running) -> None:
    num_jobs = 0
    submit = NetworkThread.submit

    def counted(self: NetworkThread, work: Any) -> Any:
        nonlocal num_jobs
        num_jobs += 1
        return submit(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkThread, "submit", counted)
        tiny.answer("/logits", prompt=[[1]] * 5)
    assert num_jobs == 5


def test_an_error_keeps_nothing_of_the_jobs_that_share_the_pass() -> None:
    class Work:
        cost = 1

        def __init__(self, error: Exception | None = None) -> None:
            self.error = error

        def prepare_passes(self) -> list[PromptPass]:
            return []

        def make_result(self, logits: Sequence[Tensor], seconds: float) -> str:
            if self.error is not None:
                raise self.error
            return "a result"

    works = [Work(), Work(ValueError("a bug")), Work()]
    alive = [weakref.ref(each) for each in works]
    jobs = deque(Job(each, lambda: None) for each in works)
    futures = [job.future for job in jobs]
    gc.disable()  # references that go round in a circle would be freed late
    try:
        works.clear()
        run_next(jobs)
        assert [str(each.exception() or each.result()) for each in futures] == ["a result", "a bug", "a result"]
        assert [each() is None for each in alive] == [True, False, True]  # the frames of the error are its own
    finally:
        gc.enable()


def test_a_refused_request_does_not_end_those_that_share_its_pass(
    bundled: Running, pass_sizes: list[int], monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory for the maps")

    monkeypatch.setattr("service.routes.patterns.reduce_blocks", fail)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        with bundled.blocked():
            pending = [pool.submit(bundled.post, path, body) for path, body in REQUESTS]
            wait_until(lambda: num_jobs(bundled.state) == 1 + len(REQUESTS), "all wait")
        statuses = [each.result().status_code for each in pending]
    assert [status == 200 for status in statuses] == [path != "/patterns" for path, _ in REQUESTS]
    errors_logged.clear()


def test_lists_of_prompts_of_load_share_passes(pass_sizes: list[int]) -> None:
    model = load("bundled")
    traces = [model.run(prompt, "*.resid_post") for prompt in PROMPTS]
    logits = [model.logits(prompt) for prompt in PROMPTS]
    num_tokens = sum(len(trace.tokens) for trace in traces)
    state = model._transport._state  # type: ignore[union-attr]  # `logits` has made it
    started, released = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        released.wait(PATIENCE_SECONDS)

    def blocked(call: Callable[[], Any]) -> Any:
        """The result of a call whose passes wait for each other."""
        for event in (started, released):
            event.clear()
        pass_sizes.clear()
        with ThreadPoolExecutor(2) as pool:
            blocking = pool.submit(model._compute, block)
            assert started.wait(PATIENCE_SECONDS)
            pending = pool.submit(call)
            wait_until(lambda: num_jobs(state) == 1 + len(PROMPTS), "all wait")
            released.set()
            blocking.result()
            return pending.result()

    assert blocked(lambda: model.run(PROMPTS, "*.resid_post")) == traces
    assert pass_sizes == [num_tokens]
    assert blocked(lambda: model.logits(PROMPTS)) == logits
    assert pass_sizes == [num_tokens]
