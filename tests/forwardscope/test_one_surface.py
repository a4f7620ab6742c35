"""`load`, `Client` and `AsyncClient` have the same methods, with the same arguments, types and numbers.

The calls of `EVERY_CALL` are those of a user: `mypy --strict` checks this file, too.
"""

import gc
import inspect
import threading
from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
import pytest
import torch

from forwardscope import AsyncClient, Client, InvalidArgument, load, requests
from forwardscope.local import LocalModel
from forwardscope.prompt_lists import calls_of_list
from forwardscope.results import (
    Attribution,
    ChatAnswer,
    Comparison,
    Generation,
    Logits,
    ModelInfo,
    Patterns,
    Scores,
    ServedModel,
    ServiceStatus,
    StoredVector,
    Trace,
    Weight,
)
from forwardscope.results.generations import StepTrace
from forwardscope.tensor_files import NumpyArray
from model.engine.engine import Engine
from model.engine.request import Step
from model.errors import InvalidField
from tests.service.running import wait_until

PROMPT, OTHER = "the cat sat on", "the dog ran to"
Server = tuple[ModelInfo, list[ServedModel], ServiceStatus, str]
STREAMS = ["stream", "stream_chat", "stream_sweep"]
METHODS = [
    "batch",
    "run",
    "logits",
    "patterns",
    "compare",
    "generate",
    "chat",
    "score",
    "attribute",
    "score_text",
    "harvest",
    "model",
    "status",
    *STREAMS,
]
SWEEP: dict[str, Any] = {"token": " the", "stages": ["blocks.*.resid_pre"], "positions": [1, -1]}
EVERY_CALL: dict[str, Callable[[Any], Any]] = {
    "logits": lambda model: model.logits(PROMPT, top_k=5, logprobs=True),
    "edited logits": lambda model: model.logits(PROMPT, edits=[{"stage": "embed", "op": "mean"}], baseline=True),
    "patterns": lambda model: model.patterns(f"{PROMPT} {OTHER}", layers=[0, 3], max_size=4),
    "run": lambda model: model.run(PROMPT, "blocks.0.*", detail="summary"),
    "trace": lambda model: model.generate(
        PROMPT, max_tokens=3, seed=1, trace={"stages": "blocks.1.*", "logit_lens": True, "top_k": 2}
    ),
    "constrained": lambda model: model.generate(PROMPT, max_tokens=9, seed=1, structured_outputs={"regex": "[ab]{4}"}),
    "stream": lambda model: list(model.stream(PROMPT, max_tokens=3, n=2, seed=1, trace={"stages": ["embed"]})),
    "score": lambda model: model.score(PROMPT, [" the mat", " a log"], edits=[{"stage": "embed", "op": "mean"}]),
    "direct": lambda model: model.attribute("direct", PROMPT, token=" the"),
    "gradient": lambda model: model.attribute("gradient", PROMPT, token=" the", stages=["*.resid_pre"]),
    "integrated": lambda model: model.attribute("integrated_gradients", PROMPT, token=" the", steps=4),
    "attribution patching": lambda model: model.attribute(
        "attribution_patching", PROMPT, corrupted=OTHER, token=" the", stages=["*.attn.z"]
    ),
    "stage": lambda model: model.attribute(
        "gradient", PROMPT, stage="blocks.2.resid_post", vector=np.ones(256), stages=["*.attn_out"]
    ),
    "lens": lambda model: model.attribute("logit_lens", PROMPT, token=" the"),
    "patching": lambda model: model.attribute("patching", PROMPT, corrupted=OTHER, **SWEEP),
    "sweep": lambda model: sorted(map(repr, model.stream_sweep(PROMPT, OTHER, **SWEEP))),
    "compare": lambda model: model.compare("a b", {"embed": np.ones((2, 256), np.float32)}, dtype="bfloat16"),
    "score_text": lambda model: model.score_text(f"{PROMPT}. {OTHER}" * 40, bos=True),
    "to_tokens": lambda model: model.to_tokens(PROMPT),
    "to_text": lambda model: model.to_text([5, 6, 7]),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_same_arguments_in_load_and_in_both_clients(name: str) -> None:
    first, *others = [
        [(each.name, each.kind, each.default) for each in inspect.signature(getattr(kind, name)).parameters.values()][
            1:
        ]
        for kind in (Client, AsyncClient, LocalModel)
    ]
    assert others == [first, first]


def plain(value: Any) -> Any:
    """Every number and text of a result, without ids, times and counts of the prefix cache."""
    if isinstance(value, torch.Tensor):
        return value.float().tolist() if value.is_floating_point() else value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "columns"):
        return {name: plain(each) for name, each in value.columns.items()}
    if hasattr(value, "as_list"):
        return plain(value.as_list())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "__dict__"):
        skipped = {"id", "timings", "cached_tokens"} | ({"values", "means"} if isinstance(value, Patterns) else set())
        own = {name: plain(each) for name, each in vars(value).items() if name not in skipped}
        return own | ({"maps": plain(value.values)} if isinstance(value, Patterns) else {})
    return value


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    """Compare nested lists and mappings. The summands of a gradient in float32 are added by several threads."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list):
        for own, other in zip(ours, theirs, strict=True):
            assert_same(own, other, tolerance)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=tolerance, nan_ok=True)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", EVERY_CALL)
def test_a_call_has_the_same_numbers_in_this_process_and_over_http(
    name: str, local: LocalModel, client: Client
) -> None:
    call = EVERY_CALL[name]
    ours, theirs = call(local), call(client)
    assert_same(plain(ours), plain(theirs), tolerance=1e-3 if "attribution" in name else 0.0)


def test_the_types_of_every_result_are_known() -> None:
    """A program of a user with every method. Nothing of this runs: `mypy --strict` reads it."""

    def use(local: LocalModel, client: Client) -> None:
        assert_type(local.run(PROMPT), Trace[torch.Tensor])
        assert_type(client.run(PROMPT), Trace[NumpyArray])
        assert_type(local.logits(PROMPT), Logits[torch.Tensor])
        assert_type(local.patterns(PROMPT), Patterns[torch.Tensor])
        assert_type(local.patterns(PROMPT).values, torch.Tensor)
        assert_type(client.patterns(PROMPT).values, NumpyArray)
        assert_type(local.compare(PROMPT, path="x"), Comparison)
        generation = local.generate(PROMPT, max_tokens=3, temperature=0, n=2)
        assert_type(generation, Generation[torch.Tensor])
        assert_type(generation.trace, tuple[StepTrace[torch.Tensor], ...] | None)
        with local.stream(PROMPT, max_tokens=3) as events:
            for event in events:
                assert_type(event.trace, StepTrace[torch.Tensor] | None)
        assert_type(local.chat("Hello"), ChatAnswer)
        assert_type([event.text for event in local.stream_chat("Hello")], list[str])
        assert_type(local.attribute("direct", PROMPT, token=5), Attribution[torch.Tensor])
        assert_type([cell.value for cell in local.stream_sweep(PROMPT, OTHER, token=5)], list[float])
        assert_type(local.generate([PROMPT, OTHER], max_tokens=3), list[Generation[torch.Tensor]])
        assert_type(local.run([[1, 2], [3]], "embed"), list[Trace[torch.Tensor]])
        assert_type(client.run([PROMPT]), list[Trace[NumpyArray]])
        assert_type(client.run(prompt=[1, 2]), Trace[NumpyArray])
        assert_type(local.chat(["Hello", "Bye"]), list[ChatAnswer])
        assert_type(client.chat([{"role": "user", "content": "Hello"}]), ChatAnswer)
        attributions = local.attribute("direct", [PROMPT, OTHER], token=[5, 6], minus=" a")
        assert_type(attributions, list[Attribution[torch.Tensor]])
        assert_type(local.batch(lambda seed: local.generate(PROMPT, seed=seed).text, [1, 2]), list[str])
        assert_type(client.score(PROMPT, [" a"]), Scores)
        assert_type(local.score([PROMPT, OTHER], [" a"]), list[Scores])
        assert_type(client.compare(PROMPT, {"embed": np.ones((4, 256))}).verdict.first_stage, str | None)
        assert_type(local.to_text(local.to_tokens(PROMPT)), str)
        assert_type(local.weight("embed.W_E", d_vocab=[1]), Weight[torch.Tensor])
        assert_type(client.weight("embed.W_E", dtype="float32"), Weight[NumpyArray])
        assert_type(local.weights["embed.W_E"], torch.Tensor)
        assert_type(next(info.shape for info in client.weights().values()), tuple[int, ...])
        assert_type(local.harvest([PROMPT], "embed", "directory", store="float32")["embed"], torch.Tensor)
        assert_type([word.bits for word in local.score_text(PROMPT, bos=True).words], list[float | None])
        assert_type(client.put_vector("sea", torch.ones(3)), StoredVector)
        assert_type(client.vectors(), list[StoredVector])
        assert_type(client.delete_vector("sea"), StoredVector)
        assert_type((local.model(), local.models(), local.status(), local.health()), Server)
        assert_type((client.model(), client.models(), client.status(), client.health()), Server)
        assert_type(local.stages, list[str])
        with client:
            client.close()
        local.generate(PROMPT, max_tokens="3")  # type: ignore[call-overload]

    async def use_later(client: AsyncClient) -> None:
        assert_type(await client.run(PROMPT), Trace[NumpyArray])
        assert_type(await client.generate([PROMPT, OTHER], n=2), list[Generation[NumpyArray]])
        assert_type(await client.chat(["Hello", "Bye"]), list[ChatAnswer])
        assert_type(
            await client.batch(lambda seed: client.generate(PROMPT, seed=seed), [1]), list[Generation[NumpyArray]]
        )
        assert_type([event.text async for event in client.stream(PROMPT)], list[str])

    assert use_later.__annotations__
    public = {name for kind in (Client, LocalModel) for name in dir(kind) if not name.startswith("_")}
    assert {name for name in public if f".{name}" not in inspect.getsource(use)} == set()


def test_a_refused_argument_is_a_value_error_that_names_it(local: LocalModel) -> None:
    with pytest.raises(InvalidField, match=r"^temprature: .*temperature") as raised:
        local.generate(PROMPT, temprature=1)
    assert raised.value.field == "temprature"
    with pytest.raises(InvalidField, match="max_tokens"):
        next(local.stream(PROMPT, max_tokens=100_000))
    with pytest.raises(InvalidField, match=r"^path: no/such/file: no such file"):
        local.compare(PROMPT, path="no/such/file")
    with pytest.raises(InvalidArgument, match=r"^edits\.0\.vector: a mapping is for `run`"):
        local.logits(PROMPT, edits=[{"stage": "embed", "op": "set", "vector": {"embed": [1.0]}}])


def test_streams_run_beside_each_other_and_beside_passes(local: LocalModel) -> None:
    alone = [list(local.stream(PROMPT, max_tokens=8, seed=seed)) for seed in (1, 2)]
    traced = local.run(OTHER)
    streams = [local.stream(PROMPT, max_tokens=8, seed=seed) for seed in (1, 2)]
    together: list[list[Any]] = [[], []]
    for _ in range(9):
        for index, stream in enumerate(streams):
            together[index].append(next(stream))
        assert torch.equal(local.run(OTHER).logits, traced.logits)
    for ours, theirs in zip(alone, together, strict=True):
        assert [event.text for event in ours] == [event.text for event in theirs]


def test_a_list_of_prompts_is_computed_in_the_same_steps_with_the_bits_of_single_calls(
    local: LocalModel, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, OTHER, "Once upon"]
    fields: dict[str, Any] = {"max_tokens": 100, "seed": 3, "ignore_eos": True, "logprobs": 1}
    alone = [local.generate(each, **fields) for each in prompts]
    step, sizes = Engine.step, list[int]()

    def count(engine: Engine) -> Step:
        found = step(engine)
        sizes.append(found.num_sequences)
        return found

    monkeypatch.setattr(Engine, "step", count)
    model: Any
    for model in (local, client):
        sizes.clear()
        found = model.generate(prompts, **fields)
        assert [(each.tokens, each.logprobs) for each in found] == [(each.tokens, each.logprobs) for each in alone]
        assert max(sizes) == 3
        sizes.clear()
        model.batch(lambda seed, model=model: model.generate(PROMPT, **fields | {"seed": seed}), [1, 2])
        assert max(sizes) == 2
    with pytest.raises(InvalidField, match="max_tokens"):
        local.generate(prompts, max_tokens=-1)


@pytest.mark.parametrize("name", ["run", "logits", "patterns", "score", "compare", "attribute"])
def test_every_method_takes_lists_of_prompts(name: str, local: LocalModel, client: Client) -> None:
    prompts = [PROMPT, OTHER, np.array([5, 6, 7])]
    common: dict[str, dict[str, Any]] = {
        "run": {"stages": "blocks.0.*"},
        "score": {"continuations": [" the mat", " a log"]},
        "compare": {"setting": {"dtype": "bfloat16"}},
        "attribute": {"method": "attribution_patching", "stages": ["*.attn.z"], "minus": 7},
    }
    lists: dict[str, Any] = {"corrupted": [OTHER, [1, 2, 3, 4], [5, 6, 8]], "token": [" the", 5, 6]}
    each = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    if name != "attribute":
        lists, each = {}, [{}, {}, {}]
    if name == "score":
        prompts = prompts[:2]
    model: Any
    for model in (local, client):
        method, fields = getattr(model, name), common.get(name, {})
        alone = [method(prompt=prompt, **fields, **own) for prompt, own in zip(prompts, each, strict=False)]
        assert_same(plain(method(prompt=prompts, **fields, **lists)), plain(alone), 1e-3 if lists else 0.0)


def test_a_list_means_one_call_for_each_of_its_entries() -> None:
    calls: Any
    conversation = [{"role": "user", "content": "a"}]
    for one in (PROMPT, [5, 6], np.array([5, 6]), torch.tensor([5, 6]), []):
        assert calls_of_list(requests.generate, one, max_tokens=3) is None
    assert calls_of_list(requests.chat, conversation) is None
    assert calls_of_list(requests.to_tokens, PROMPT) is None
    for many in ([PROMPT, OTHER], (PROMPT, [5]), np.array([[5, 6], [7, 8]]), torch.tensor([[5], [7]])):
        calls = calls_of_list(requests.generate, many, max_tokens=3, top_k=1)
        assert calls is not None
        assert [call().request for call in calls] == [
            requests.generate(each, max_tokens=3, top_k=1).request for each in many
        ]
    for chats in (["a", "b"], [conversation, conversation]):
        calls = calls_of_list(requests.chat, chats)
        assert calls is not None
        assert [call().request for call in calls] == [requests.chat(each).request for each in chats]
    with pytest.raises(InvalidArgument, match="token: has 1 of 2 entries; give one for each"):
        calls_of_list(requests.attribute, "direct", [PROMPT, OTHER], token=[5])


def test_a_stream_that_is_left_early_ends_its_generation(local: LocalModel) -> None:
    with local.stream(PROMPT, max_tokens=400, ignore_eos=True) as events:
        next(events)
    wait_until(lambda: local.status().requests_running == 0, "the generation ends")
    assert local.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2


def test_a_deleted_model_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    model = load("bundled")
    model.generate(PROMPT, max_tokens=1)
    threads = set(threading.enumerate()) - before
    assert {"in-process", "network"} <= {thread.name for thread in threads}
    del model

    def has_ended() -> bool:
        gc.collect()  # again, because the thread of the requests may have held the model a moment before
        return not any(thread.is_alive() for thread in threads)

    wait_until(has_ended, "the threads end")
