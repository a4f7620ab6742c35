"""Edits over HTTP: every route computes with them, answers say what they matched, and wrong ones are refused."""

import base64
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from forwardscope import Client
from forwardscope.results.generations import FinishEvent, Generation
from forwardscope.results.passes import Logits, Trace
from model.analysis.edit_sources import compute_source, edited_pass
from model.tracing.edits import Edit, EditSource, plan_edits
from model.tracing.edits.bound_edit import StageEdit
from model.tracing.tap import Recorder
from service.answers import edits as service_edits
from service.answers import generation_plan, passes, source_passes
from service.answers.budget import Budget
from tests.checkpoints.adapter_files import write_adapter
from tests.service.checkpoints import CONTEXT, VOCAB_SIZE
from tests.service.running import PATIENCE_SECONDS, Running, Start, running, validate, wait_until
from tests.service.test_forward import AS_SAFETENSORS
from tests.service.test_generate_trace import BLOCK_BYTES

IDS = [5, 9, 77, 200, 31, 8]
OTHER = [5, 9, 78, 201, 30, 8]
WIDTH, HEADS = 24, 6
RESIDUAL = "blocks.0.resid_post"
ZERO = {"stage": "blocks.0.attn.z", "op": "zero", "heads": [1]}
STEER = {"stage": RESIDUAL, "op": "add", "vector": [0.5] * WIDTH, "scale": 2}
NOISE = {"stage": "blocks.1.mlp_out", "op": "noise", "std": 0.5, "seed": 3, "positions": "generated"}
PROBE = {"stage": "blocks.0.resid_mid", "vector": [1] * WIDTH, "above": 0.5}
ROUTES = ("/forward", "/logits", "/generate", "/v1/completions")


@pytest.fixture(scope="module")
def adapted(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with the tiny checkpoint and an adapter."""
    path = write_adapter(tmp_path_factory.mktemp("adapter") / "one", tiny_directory, seed=1)
    with running(model=str(tiny_directory), adapter=[f"first={path}"]) as service:
        yield service


def edited_stages(service: Running, ids: Sequence[int], edit: Edit, stages: str = "*") -> dict[str, Tensor]:
    """The stages of an edited pass of the library, on the network's thread."""

    def run() -> dict[str, Tensor]:
        model = service.checkpoint.model
        bound = plan_edits([edit], model.config, service.checkpoint.stages, ids, len(ids)).bind()
        recorder = Recorder([stage for stage in service.checkpoint.stages if stages in ("*", stage.name)])
        edited_pass(model, ids, bound, tap=recorder)
        return recorder.kept

    return service.on_network(run).result(PATIENCE_SECONDS)


def values(answer: dict[str, Any], name: str) -> Tensor:
    (found,) = [stage["values"] for stage in answer["stages"] if stage["name"] == name]
    return torch.tensor([[math.nan if each is None else each for each in row] for row in _rows(found)])


def _rows(nested: Any) -> list[Any]:
    """The innermost lists."""
    return [nested] if not isinstance(nested[0], list) else [row for each in nested for row in _rows(each)]


# Wrong edits


def edit(**fields: Any) -> dict[str, Any]:
    return {"stage": RESIDUAL, "op": "zero"} | fields


def tensor(data: str, shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"data": data, "shape": shape, "dtype": dtype}


BAD: list[tuple[Any, int, str]] = [
    # the form
    ({"op": "zero"}, 422, "edits.0.stage"),
    ({"stage": RESIDUAL}, 422, "edits.0"),
    (edit(op="remove"), 422, "edits.0"),
    (3, 422, "edits.0"),
    (edit(op=None), 422, "edits.0"),
    (edit(factor=2), 422, "edits.0"),
    (edit(vectr=[1]), 422, "edits.0.vectr"),
    (edit(op="scale"), 422, "edits.0.factor"),
    (edit(op="scale", factor="2"), 422, "edits.0.factor"),
    (edit(op="scale", factor=True), 422, "edits.0.factor"),
    (edit(op="project"), 400, "edits.0.vector"),
    (edit(op="patch"), 422, "edits.0.source"),
    (edit(op="patch", source={"prompt": None}), 422, "edits.0.source"),
    (edit(op="patch", source={"promt": "a"}), 422, "edits.0.source.promt"),
    (edit(op="noise", std=1, seed=-1), 422, "edits.0.seed"),
    (edit(op="noise", std=1, seed=2**63), 422, "edits.0.seed"),
    (edit(positions="first"), 422, "edits.0.positions"),
    (edit(positions=[]), 422, "edits.0.positions"),
    (edit(positions=[0.5]), 422, "edits.0.positions.0"),
    (edit(positions=[1, [1, 2, 3]]), 422, "edits.0.positions.1"),
    (edit(positions=[0] * 5000), 422, "edits.0.positions"),
    (edit(heads=[-1]), 422, "edits.0.heads.0"),
    (edit(heads=[]), 422, "edits.0.heads"),
    (edit(op="set", vector=3), 422, "edits.0.vector"),
    (edit(op="set", vector=[]), 422, "edits.0.vector"),
    (edit(op="set", vector=[1, "a"]), 422, "edits.0.vector"),
    (edit(op="set", vector=[[1], [1, 2]]), 422, "edits.0.vector"),
    (edit(op="set", vector=[[1], 2]), 422, "edits.0.vector"),
    (edit(op="set", vector=[[[[[1]]]]]), 422, "edits.0.vector"),
    (edit(op="set", vector=[1e39]), 422, "edits.0.vector"),
    (edit(op="set", vector=[10**400]), 422, "edits.0.vector"),
    (edit(op="set", vector=[math.nan]), 422, "edits.0.vector"),
    (edit(op="set", vector=[math.inf] * WIDTH), 422, "edits.0.vector"),
    (edit(op="set", value=math.nan), 422, "edits.0.value"),
    (edit(op="add", value=1, scale=math.inf), 422, "edits.0.scale"),
    (edit(op="set", vector=tensor("AAAA", [0])), 422, "edits.0.vector.shape.0"),
    (edit(op="set", vector=tensor("AAAA", [1], "int8")), 422, "edits.0.vector.dtype"),
    # what does not fit the network or the prompt
    (edit(stage="nope"), 400, "edits.0.stage"),
    (edit(stage="blocks.2.resid_post"), 400, "edits.0.stage"),
    (edit(stage="probabilities"), 400, "edits.0.stage"),
    (edit(stage="loss"), 400, "edits.0.stage"),
    (edit(stage="*"), 400, "edits.0.stage"),
    (edit(heads=[0]), 400, "edits.0.heads"),
    (ZERO | {"heads": [HEADS]}, 400, "edits.0.heads"),
    (ZERO | {"heads": [0, 0]}, 400, "edits.0.heads"),
    (edit(keys="last"), 400, "edits.0.keys"),
    (edit(positions=[6]), 400, "edits.0.positions"),
    (edit(positions=[-7]), 400, "edits.0.positions"),
    (edit(positions=[2**200]), 400, "edits.0.positions"),
    (edit(positions=[[2, 1]]), 400, "edits.0.positions"),
    (edit(positions=[1, 1]), 400, "edits.0.positions"),
    (edit(positions="generated"), 400, "edits.0.positions"),
    (edit(op="set"), 400, "edits.0.vector"),
    (edit(op="set", vector=[1] * WIDTH, value=1), 400, "edits.0.vector"),
    (edit(op="set", vector=[1] * (WIDTH + 1)), 400, "edits.0.vector"),
    (edit(op="set", vector=[[1] * WIDTH] * 2), 400, "edits.0.vector"),
    (edit(op="add", vector=[1e38] * WIDTH, scale=100), 400, "edits.0.vector"),
    (edit(op="project", vector=[0] * WIDTH), 400, "edits.0.vector"),
    (edit(op="cap"), 400, "edits.0.min"),
    (edit(op="cap", min=2, max=1), 400, "edits.0.min"),
    (edit(op="noise", std=-1), 400, "edits.0.std"),
    (edit(op="set", vector=tensor("?", [1])), 400, "edits.0.vector.data"),
    (edit(op="set", vector=tensor("AAAA", [1])), 400, "edits.0.vector.data"),
    (edit(op="set", vector=tensor("AADAfw==", [1])), 400, "edits.0.vector"),  # NaN
    (edit(op="set", vector=tensor("AAAAAA==", [2**30])), 400, "edits.0.vector.data"),
    (edit(op="set", vector=tensor("AAAAAA==", [10**4000])), 422, "edits.0.vector.shape.0"),
    (edit(op="patch", source={"prompt": []}), 400, "edits.0.source.prompt"),
    (edit(op="patch", source={"prompt": [VOCAB_SIZE]}), 400, "edits.0.source.prompt.0"),
    (edit(op="patch", source={"prompt": [1] * (CONTEXT + 1)}), 400, "edits.0.source.prompt"),
    (edit(op="patch", source={"prompt": [1, 2]}), 400, "edits.0.source.positions"),
    (edit(op="patch", source={"prompt": [1, 2], "positions": [2]}), 400, "edits.0.source.positions"),
    (edit(op="mean", source={"prompt": [1, 2], "positions": "generated"}), 400, "edits.0.source.positions"),
    # conditions
    (edit(when=3), 422, "edits.0.when"),
    (edit(when={"token": [3]}), 422, "edits.0.when.token"),
    (edit(when={"tokens": []}), 422, "edits.0.when.tokens"),
    (edit(when={}), 400, "edits.0.when"),
    (edit(when={"tokens": [3], "above": 1}), 400, "edits.0.when"),
    (edit(when={"tokens": [VOCAB_SIZE]}), 400, "edits.0.when.tokens"),
    (edit(when={"tokens": [3], "positions": [6]}), 400, "edits.0.when.positions"),
    (edit(when=PROBE | {"vector": "happy"}), 400, "edits.0.when.vector"),
    (edit(when=PROBE | {"vector": tensor("?", [1])}), 400, "edits.0.when.vector.data"),
    (edit(when=PROBE | {"above": 1e39}), 400, "edits.0.when.above"),
]


@pytest.mark.parametrize(("wrong", "status", "param"), BAD, ids=str)
def test_a_wrong_edit_is_an_error_that_names_its_field(tiny: Running, wrong: Any, status: int, param: str) -> None:
    content = json.dumps({"prompt": IDS, "edits": [wrong]}).encode()
    for path in ROUTES[:2]:
        response = tiny.client.post(path, content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert len(error["message"]) > len(param) + 10


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_refuses_an_edit_that_fits_nothing_and_says_what_fits(tiny: Running, path: str) -> None:
    edits = [STEER, edit(op="set", vector=[1, 2])]
    response = tiny.post(path, {"prompt": IDS, "edits": edits})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "edits.1.vector")
    assert "takes [24] (d_model)" in error["message"]


@pytest.mark.parametrize("path", ["/forward", "/logits", "/v1/completions"])
def test_the_error_names_the_prompt_of_a_list_that_an_edit_does_not_fit(tiny: Running, path: str) -> None:
    body = {"prompt": [IDS, IDS[:3]], "edits": [edit(positions=[5])], "max_tokens": 1}
    response = tiny.post(path, body if path == "/v1/completions" else {k: body[k] for k in ("prompt", "edits")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "edits.0.positions")
    assert response.json()["error"]["message"].endswith("(for prompt.1)")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("/v1/responses", {"input": "the cat"}),
        ("/v1/completions", {"prompt": ["the cat"]}),
    ],
)
def test_the_error_of_an_edit_names_no_prompt_if_there_is_only_one(
    tiny: Running, path: str, body: dict[str, Any]
) -> None:
    response = tiny.post(path, body | {"edits": [edit(positions=[70])]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "edits.0.positions")
    assert "(for" not in response.json()["error"]["message"]


def test_no_step_computes_digests_of_edits(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, content = list[str](), StageEdit.content

    def watched(edited: StageEdit) -> Iterable[bytes]:
        threads.append(threading.current_thread().name)
        return content(edited)

    monkeypatch.setattr(StageEdit, "content", watched)
    body = {"prompt": [1, 2], "max_tokens": 3, "edits": [edit(stage="*.resid_post", op="scale", factor=2.0)] * 40}
    tiny.answer("/generate", **body)
    assert threads
    assert "network" not in threads


def test_too_many_edits_are_refused(tiny: Running) -> None:
    response = tiny.post("/logits", {"prompt": IDS, "edits": [STEER] * 65})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "edits")


def test_worked_examples_take_no_edits(tiny: Running) -> None:
    response = tiny.post("/forward", {"prompt": "AI rocks", "model": "ai-rocks", "edits": [edit(stage="embed")]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "edits")
    assert "cannot change the worked example" in response.json()["error"]["message"]


# What the routes compute


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        (ZERO, Edit(stage="blocks.0.attn.z", op="zero", heads=[1])),
        (STEER, Edit(stage=RESIDUAL, op="add", vector=torch.ones(WIDTH))),
        (
            edit(op="set", vector=tensor("AACAPwAAAEA=", [2]), heads=[0, 3], stage="blocks.1.attn.q"),
            Edit(stage="blocks.1.attn.q", op="set", vector=torch.tensor([1.0, 2.0]), heads=[0, 3]),
        ),
        (
            edit(op="cap", min=-0.5, max=0.5, positions=[[1, 2], -1]),
            Edit(stage=RESIDUAL, op="cap", min=-0.5, max=0.5, positions=[(1, 2), 5]),
        ),
        (
            edit(stage="blocks.1.attn.pattern", op="scale", factor=0, keys=[0], positions="last"),
            Edit(stage="blocks.1.attn.pattern", op="scale", factor=0.0, keys=[0], positions=[5]),
        ),
    ],
    ids=["zero", "add", "set", "cap", "scale"],
)
def test_forward_returns_the_stages_of_the_edited_pass(tiny: Running, body: dict[str, Any], declared: Edit) -> None:
    if body["stage"] == "blocks.1.attn.q":  # the tiny heads have four numbers
        body, declared = (
            body | {"vector": [1, 2, 3, 4]},
            Edit(stage="blocks.1.attn.q", op="set", vector=torch.tensor([1.0, 2, 3, 4]), heads=[0, 3]),
        )
    expected = edited_stages(tiny, IDS, declared)
    stages = [name for name in expected if not name.endswith(("scores", "loss", "probabilities"))]
    answer = tiny.answer("/forward", prompt=IDS, edits=[body], stages=stages, detail="values")
    for name in stages:
        assert torch.equal(values(answer, name), expected[name].flatten(0, -2)), name
    plain = tiny.answer("/forward", prompt=IDS, stages=["logits"], detail="values")
    assert not torch.equal(values(answer, "logits"), values(plain, "logits"))


def test_the_answer_says_what_each_edit_matched(tiny: Running) -> None:
    edits = [
        edit(stage="*.resid_post", positions="last"),
        edit(stage="blocks.1.hook_resid_pre", positions=[-1, 0, [1, 2]]),
        edit(stage="blocks.0.mlp_out"),
        edit(stage="blocks.0.attn_out", positions="prompt"),
    ]
    expected = [
        {"stages": [RESIDUAL, "blocks.1.resid_post"], "positions": [5]},
        {"stages": ["blocks.1.resid_pre"], "positions": [[0, 2], 5]},
        {"stages": ["blocks.0.mlp_out"], "positions": [[0, 5]]},
        {"stages": ["blocks.0.attn_out"], "positions": [[0, 5]]},
    ]
    assert tiny.answer("/forward", prompt=IDS, edits=edits, stages="embed")["edits"] == expected
    assert tiny.answer("/logits", prompt=IDS, edits=edits, top_k=1)["edits"] == expected
    assert tiny.answer("/generate", prompt=IDS, edits=edits[:2], max_tokens=2)["edits"] == expected[:2]
    open_ended = tiny.answer("/generate", prompt=IDS, edits=[*edits[2:], NOISE], max_tokens=2)["edits"]
    assert [each["positions"] for each in open_ended] == ["all", [[0, 5]], "generated"]
    assert "edits" not in tiny.answer("/logits", prompt=IDS, edits=[], top_k=1)
    validate(Generation, tiny.answer("/generate", prompt=IDS, edits=edits, max_tokens=2))


def test_an_edit_applies_from_where_its_condition_holds(tiny: Running) -> None:
    """With a token, and with a probe whose vector is encoded."""
    stage = str(PROBE["stage"])
    rows = values(tiny.answer("/forward", prompt=IDS, stages=[stage], detail="values"), stage)
    vector = rows[3].numpy() / 10
    above = float((rows.double() @ torch.tensor(vector).double())[:3].max()) + 1e-6
    probe = PROBE | {"vector": tensor(base64.b64encode(vector.tobytes()).decode(), [WIDTH]), "above": above}
    fields: dict[str, Any] = {"prompt": IDS, "max_tokens": 9, "seed": 2, "n": 2, "ignore_eos": True, "logprobs": 0}
    for when in ({"tokens": [IDS[3], 250]}, probe):
        found, expected = (
            [
                tiny.answer("/logits", prompt=IDS, positions="all", edits=[each])["positions"],
                tiny.answer("/generate", edits=[each], **fields)["choices"],
            ]
            for each in (STEER | {"when": when}, STEER | {"positions": [[3, None]]})
        )
        assert found == expected


@pytest.mark.parametrize("edits", [[ZERO], [STEER], [ZERO, STEER, edit(op="scale", factor=3, positions=[2])]])
def test_the_logits_are_those_of_forward_with_the_same_edits(tiny: Running, edits: list[dict[str, Any]]) -> None:
    found = tiny.answer("/logits", prompt=IDS, edits=edits, positions=[1, -1])
    whole = tiny.answer("/forward", prompt=IDS, edits=edits, stages=["logits"], detail="values")
    torch.testing.assert_close(
        torch.tensor([each["logits"] for each in found["positions"]]), values(whole, "logits")[[1, 5]]
    )


@pytest.mark.parametrize("op", ["patch", "mean"])
def test_values_come_from_the_unedited_pass_of_another_prompt(tiny: Running, op: str) -> None:
    source = {"prompt": OTHER, "positions": [2, 3]}
    edits = [edit(op=op, source=source, positions=[4, 1]), edit(stage="embed", op="scale", factor=2)]
    found = tiny.answer("/forward", prompt=IDS, edits=edits, stages=[RESIDUAL], detail="values")
    other = values(tiny.answer("/forward", prompt=OTHER, stages=[RESIDUAL], detail="values"), RESIDUAL)[[2, 3]]
    expected = other if op == "patch" else other.mean(0).expand(2, -1)
    torch.testing.assert_close(values(found, RESIDUAL)[[4, 1]], expected, atol=1e-6, rtol=0)


def test_a_mean_without_a_source_is_that_of_the_own_prompt(tiny: Running) -> None:
    prompts = [IDS, OTHER]
    answers = tiny.answer(
        "/forward", prompt=prompts, edits=[edit(op="mean", positions="last")], stages=[RESIDUAL], detail="values"
    )["results"]
    for ids, answer in zip(prompts, answers, strict=True):
        plain = values(tiny.answer("/forward", prompt=ids, stages=[RESIDUAL], detail="values"), RESIDUAL)
        torch.testing.assert_close(values(answer, RESIDUAL)[5], plain.mean(0), atol=1e-6, rtol=0)


def test_a_source_may_be_a_text_and_has_the_adapter_of_the_request(adapted: Running) -> None:
    text = {"prompt": "the cat sat", "positions": "last"}
    edits = [edit(op="patch", source=text, positions="last")]
    for adapter in ({}, {"adapter": "first"}):
        found = adapted.answer("/forward", prompt=IDS, edits=edits, stages=[RESIDUAL], detail="values", **adapter)
        other = adapted.answer("/forward", prompt="the cat sat", stages=[RESIDUAL], detail="values", **adapter)
        assert torch.equal(values(found, RESIDUAL)[-1], values(other, RESIDUAL)[-1])


@pytest.mark.parametrize("positions", ["all", "prompt", "generated", "last", [2, [5, 8]]])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 4, "n": 3}], ids=["greedy", "sampled"])
def test_a_generation_computes_what_forward_computes_with_the_same_edits(
    tiny: Running, positions: Any, fields: dict[str, Any]
) -> None:
    edits = [STEER | {"positions": positions}, ZERO | {"positions": positions}]
    trace = {"stages": [RESIDUAL, "logits"], "detail": "values", "positions": list(range(6 + 7))}
    answer = tiny.answer(
        "/generate", prompt=IDS, edits=edits, max_tokens=8, ignore_eos=True, logprobs=0, trace=trace, **fields
    )
    for choice in answer["choices"] or [answer]:
        ids = [*IDS, *choice["tokens"][:-1]]
        words = {"all": "all", "prompt": [[0, 5]], "generated": [[6, 12]], "last": [5]}
        absolute = positions if isinstance(positions, list) else words[positions]
        same = [each | {"positions": absolute} for each in edits]
        whole = tiny.answer("/forward", prompt=ids, edits=same, stages=[RESIDUAL, "logits"], detail="values")
        for name in (RESIDUAL, "logits"):
            steps = [values(step, name) for step in choice["trace"]]
            torch.testing.assert_close(torch.cat(steps), values(whole, name), atol=1e-4, rtol=0)
        logprobs = values(whole, "logits")[5:].log_softmax(-1)
        for row, entry in zip(logprobs, choice["logprobs"], strict=True):
            assert entry["logprob"] == pytest.approx(float(row[entry["id"]]), abs=1e-4)


@pytest.mark.parametrize("edits", [[STEER], [NOISE], [ZERO, STEER | {"positions": "generated"}]])
def test_a_stream_has_the_tokens_of_the_whole_answer_and_says_at_its_end_what_matched(
    tiny: Running, edits: list[dict[str, Any]]
) -> None:
    body = {"prompt": IDS, "edits": edits, "max_tokens": 9, "seed": 2, "n": 2, "ignore_eos": True}
    whole = tiny.answer("/generate", **body)
    events = tiny.stream(**body)
    for choice in whole["choices"]:
        *tokens, end = [event for event in events if event["choice"] == choice["choice"]]
        assert [event["token"]["id"] for event in tokens] == choice["tokens"]
        validate(FinishEvent, end)
        assert end["edits"] == whole["edits"]
        assert not any("edits" in event for event in tokens)
    plain = tiny.answer("/generate", **(body | {"edits": []}))
    assert "edits" not in plain
    assert [each["tokens"] for each in plain["choices"]] != [each["tokens"] for each in whole["choices"]]


def test_openai_routes_compute_with_edits_and_describe_them_at_the_end_of_each_choice(tiny: Running) -> None:
    body: dict[str, Any] = {
        "prompt": [IDS, OTHER[:3]],
        "edits": [STEER | {"positions": "last"}],
        "max_tokens": 4,
        "seed": 1,
        "n": 2,
    }
    body |= {"return_token_ids": True, "ignore_eos": True}
    whole = tiny.answer("/v1/completions", **body)
    for index, choice in enumerate(whole["choices"]):
        same = tiny.answer("/generate", **(body_of_generate(body) | {"prompt": body["prompt"][index // 2]}))
        assert choice["token_ids"] == same["choices"][index % 2]["tokens"]
        assert choice["edits"] == same["edits"] == [{"stages": [RESIDUAL], "positions": [5 if index < 2 else 2]}]
    chat = {"messages": [{"role": "user", "content": "the cat"}], "edits": [STEER], "max_tokens": 4, "seed": 1}
    (choice,) = tiny.answer("/v1/chat/completions", **chat)["choices"]
    assert choice["edits"] == [{"stages": [RESIDUAL], "positions": "all"}]
    (plain,) = tiny.answer("/v1/chat/completions", **(chat | {"edits": []}))["choices"]
    assert "edits" not in plain
    assert plain["message"] != choice["message"]
    for path, request in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        chunks = [
            json.loads(line.removeprefix("data: "))["choices"][0]
            for line in tiny.post(path, request | {"stream": True}).text.splitlines()
            if line.startswith("data: {")
        ]
        assert [("edits" in chunk) == (chunk["finish_reason"] is not None) for chunk in chunks] == [True] * len(chunks)


def body_of_generate(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "return_token_ids"}


def test_cached_prompts_are_shared_where_edits_change_nothing_and_between_equal_edits(
    start: Start, tiny_directory: Path
) -> None:
    service = start(model=str(tiny_directory))
    prompt = [(7 * index) % 250 + 20 for index in range(40)]

    def num_cached(*edits: dict[str, Any]) -> int:
        answer = service.answer("/generate", prompt=prompt, edits=list(edits), max_tokens=2)
        cached: int = answer["usage"]["cached_tokens"]
        return cached

    assert [num_cached(), num_cached()] == [0, 32]
    assert num_cached(STEER | {"positions": "generated"}) == 32
    assert num_cached(STEER | {"positions": [[16, 39]]}) == 16
    assert [num_cached(STEER), num_cached(STEER)] == [0, 32]
    assert num_cached(STEER | {"scale": 3}) == 0
    assert num_cached() == 32


# Baselines


@pytest.mark.parametrize("detail", ["none", "summary", "values"])
def test_a_baseline_of_forward_is_the_plain_answer_and_the_changes_follow_from_both(tiny: Running, detail: str) -> None:
    body = {"prompt": IDS, "stages": ["*"], "positions": [5, 2], "heads": [1, 3], "top_k": 2}
    answer = tiny.answer("/forward", edits=[STEER | {"positions": [2]}], baseline=True, detail=detail, **body)
    validate(Trace, answer)
    plain = tiny.answer("/forward", detail=detail, **body)
    assert answer["baseline"] == {name: plain[name] for name in ("stages", "predictions", "loss")}
    edited = tiny.answer("/forward", edits=[STEER | {"positions": [2]}], detail=detail, **body)
    assert {name: answer[name] for name in ("stages", "predictions", "loss")} == {
        name: edited[name] for name in ("stages", "predictions", "loss")
    }
    changes = {change["name"]: change for change in answer["changes"]}
    assert list(changes) == [stage["name"] for stage in plain["stages"]]
    before = [name for name in changes if name.startswith(("embed", "blocks.0")) and name != RESIDUAL]
    assert all(changes[name]["norm"] == 0 for name in before)
    assert changes[RESIDUAL]["norm"] == pytest.approx(WIDTH**0.5, rel=1e-5)
    if detail == "values":
        for name in (RESIDUAL, "blocks.1.attn.z", "logits"):
            own, other = values(edited, name).double(), values(plain, name).double()
            assert changes[name]["norm"] == pytest.approx(float((own - other).norm()), rel=1e-5)
            assert changes[name]["relative"] == pytest.approx(float((own - other).norm() / other.norm()), rel=1e-5)


def test_a_baseline_of_logits_has_the_plain_rows(tiny: Running) -> None:
    body = {"prompt": [IDS, OTHER], "positions": [0, 5], "top_k": 3, "logprobs": True}
    results = tiny.answer("/logits", edits=[STEER], baseline=True, **body)["results"]
    plain = tiny.answer("/logits", **body)["results"]
    edited = tiny.answer("/logits", edits=[STEER], **body)["results"]
    for answer, before, after in zip(results, plain, edited, strict=True):
        validate(Logits, answer)
        assert answer["baseline"]["positions"] == before["positions"]
        assert answer["positions"] == after["positions"]
        ((change),) = answer["changes"]
        assert (change["name"], change["norm"] > 0, change["relative"] > 0) == ("logits", True, True)


@pytest.mark.parametrize("path", ["/forward", "/logits"])
def test_the_tensors_of_a_baseline_have_names_of_their_own(tiny: Running, path: str) -> None:
    fields = {"stages": [RESIDUAL, "logits"]} if path == "/forward" else {"positions": "all"}
    body = {"prompt": [IDS, OTHER], "edits": [STEER], "baseline": True} | fields
    tensors = load(tiny.post(path, body, headers=AS_SAFETENSORS).content)
    plain = load(tiny.post(path, {"prompt": [IDS, OTHER]} | fields, headers=AS_SAFETENSORS).content)
    names = {name.partition("/")[2] for name in plain}
    assert set(tensors) == {f"{index}/{part}{name}" for index in (0, 1) for part in ("", "baseline/") for name in names}
    for name, expected in plain.items():
        index, _, own = name.partition("/")
        assert torch.equal(tensors[f"{index}/baseline/{own}"], expected)
        assert not torch.equal(tensors[name], expected)


def test_a_baseline_of_generate_has_the_plain_choices_and_the_change_of_each_residual(tiny: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 6, "n": 2, "seed": 5, "logprobs": 1, "ignore_eos": True}
    edits = [STEER | {"stage": "blocks.1.resid_pre", "positions": "generated"}]
    answer = tiny.answer("/generate", edits=edits, baseline=True, **body)
    validate(Generation, answer)
    plain = tiny.answer("/generate", **body)
    edited = tiny.answer("/generate", edits=edits, **body)

    def essence(choices: list[dict[str, Any]]) -> list[Any]:
        return [(each["choice"], each["tokens"], each["text"], each["finish_reason"]) for each in choices]

    assert essence(answer["baseline"]["choices"]) == essence(plain["choices"])
    assert essence(answer["choices"]) == essence(edited["choices"])
    assert [change["choice"] for change in answer["changes"]] == [0, 1]
    for choice, changes in zip(answer["choices"], answer["changes"], strict=True):
        ids = [*IDS, *choice["tokens"][:-1]]
        same = [edits[0] | {"positions": [[6, 10]]}]
        both = tiny.answer("/forward", prompt=ids, edits=same, baseline=True, stages=["*.resid_post"])
        assert [each["name"] for each in changes["stages"]] == [each["name"] for each in both["changes"]]
        assert changes["stages"][0]["norm"] == 0
        assert changes["stages"][1]["norm"] == pytest.approx(both["changes"][1]["norm"], rel=1e-4)
        assert changes["stages"][1]["norm"] > 1


def test_without_a_seed_both_runs_of_a_baseline_draw_alike(tiny: Running) -> None:
    nothing = edit(op="scale", factor=1)
    answer = tiny.answer("/generate", prompt=IDS, edits=[nothing], baseline=True, max_tokens=20, ignore_eos=True)
    assert answer["tokens"] == answer["baseline"]["choices"][0]["tokens"]
    assert {stage["norm"] for change in answer["changes"] for stage in change["stages"]} == {0}


@pytest.mark.parametrize("path", ["/forward", "/logits", "/generate"])
def test_a_baseline_needs_edits(tiny: Running, path: str) -> None:
    response = tiny.post(path, {"prompt": IDS, "baseline": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "baseline")


def test_a_baseline_cannot_be_streamed(tiny: Running) -> None:
    response = tiny.post("/generate", {"prompt": IDS, "baseline": True, "edits": [STEER], "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "baseline")


# Numbers that are not finite


@pytest.mark.parametrize("stage", ["blocks.0.attn.k", "blocks.0.attn.v", RESIDUAL, "logits"])
def test_an_overflow_is_the_error_of_its_own_request_and_no_other_request_sees_its_numbers(
    start: Start, tiny_directory: Path, stage: str
) -> None:
    service = start(model=str(tiny_directory), cache_bytes=6 * BLOCK_BYTES)
    fields = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    plain = {"prompt": IDS, "logprobs": 1} | fields

    def essence(answer: dict[str, Any]) -> Any:
        return answer["tokens"], answer["logprobs"]

    expected = essence(service.answer("/generate", **plain))
    overflow = {"stage": stage, "op": "scale", "factor": 3e38}
    edits = [{"stage": stage, "op": "set", "value": 3e38}, overflow, overflow]
    body = {"prompt": [7 * index % 250 + 20 for index in range(40)], "edits": edits} | fields
    for _ in range(2):  # its blocks are then all over the cache
        response = service.post("/generate", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "edits"), response.text
        assert "not finite; use smaller numbers" in response.json()["error"]["message"]
        assert essence(service.answer("/generate", **plain)) == expected
    assert "event: error" in service.post("/generate", body | {"stream": True}).text
    for path in ("/forward", "/logits"):
        assert service.post(path, {"prompt": IDS, "edits": edits, "baseline": True}).status_code == 200


# Limits


def test_passes_that_are_too_large_are_refused_before_anything_runs(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_tokens=8)
    patch = edit(op="patch", positions=[0], source={"prompt": [1] * 9, "positions": [0]})
    for path in ROUTES:
        response = service.post(path, {"prompt": IDS, "edits": [patch]})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (413, "prompt_too_long")
        assert "a source has 9 tokens, but one pass takes at most 8" in error["message"]
    body = {"prompt": IDS, "edits": [STEER], "baseline": True, "max_tokens": 4}
    response = service.post("/generate", body)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "baseline")
    assert service.post("/generate", body | {"max_tokens": 3}).status_code == 200
    assert service.metric("prompt_tokens_total") == 2 * len(IDS)


def test_stages_of_sources_and_baselines_count_in_the_limit_of_a_pass(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_bytes=40_000)
    ids = [1] * 30
    assert service.post("/forward", {"prompt": ids, "stages": ["*.resid_post"], "top_k": 0}).status_code == 413
    assert service.post("/logits", {"prompt": ids}).status_code == 200
    patch = edit(op="patch", stage="*.ln?.*", positions="last", source={"prompt": 2 * ids})
    response = service.post("/logits", {"prompt": ids, "edits": [patch]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "pass_too_large")
    assert "the stages of edits with a source" in error["message"]


def test_the_scores_of_an_edited_pattern_count_in_the_limit_of_a_pass(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_bytes=40_000)
    ids = [1] * 30
    for stage, status in (("*.attn.z", 200), ("*.attn.pattern", 413)):
        for path in ("/logits", "/generate"):
            body = {"prompt": ids, "edits": [edit(op="zero", stage=stage, heads=[0])]}
            response = service.post(path, body)
            assert response.status_code == status, (stage, path, response.text)
            if status == 413:
                assert "reduce the edits of scores and patterns" in response.json()["error"]["message"]


def test_a_request_that_alone_exceeds_the_buffers_is_413(start: Start, tiny_directory: Path) -> None:
    service = start(
        model=str(tiny_directory), max_body_bytes=1 << 17, max_response_bytes=1 << 17, max_buffered_bytes=1 << 18
    )
    sources = [{"prompt": [1 + index] * 60, "positions": "all"} for index in range(16)]
    edits = [edit(op="patch", stage="blocks.*.mlp.*", source=source) for source in sources]
    response = service.post("/logits", {"prompt": [1] * 60, "edits": edits})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "request_too_large")


def test_the_logits_of_a_source_are_counted_only_if_they_are_kept(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_bytes=40_000)
    for stage, status in (("blocks.0.resid_pre", 200), ("ln_final.out", 413)):
        mean = edit(op="mean", stage=stage, positions="last", source={"prompt": [2] * 60})
        response = service.post("/logits", {"prompt": IDS, "edits": [mean]})
        assert response.status_code == status, response.text


def test_the_vectors_of_very_many_plans_need_room(start: Start, tiny_directory: Path) -> None:
    service = start(
        model=str(tiny_directory), max_body_bytes=1 << 20, max_response_bytes=1 << 20, max_buffered_bytes=2 << 20
    )
    body = {
        "prompt": [[1] * size for size in range(10, 60)],
        "edits": [edit(op="set", positions=[[0, 9]], vector=[[0.5] * WIDTH] * 10)] * 20,
        "top_k": 1,
    }
    response = service.post("/logits", body)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert service.post("/logits", body | {"prompt": [[1] * 20] * 50}).status_code == 200  # one plan for all
    wait_until(lambda: service.metric("buffered_bytes") == 0, "nothing is held")


@pytest.mark.parametrize("route", ["/logits", "/v1/completions"])
def test_the_stages_that_all_prompts_change_together_are_limited(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(service_edits, "MAX_PLANNED_STAGES", 30)
    edits = [edit(stage="blocks.*.resid_post", op="scale", factor=0.5)] * 5
    num_stages = tiny.checkpoint.model.config.num_layers * 5
    most = 30 // num_stages
    prompts = [[1] * size for size in range(1, most + 1)]
    fields = {"edits": edits} if route == "/logits" else {"edits": edits, "max_tokens": 1}
    assert tiny.post(route, fields | {"prompt": prompts * 3}).status_code == 200  # each length has one plan
    response = tiny.post(route, fields | {"prompt": [*prompts, [1] * (most + 1)]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "edits")
    assert "30 stages for all prompts together" in error["message"]


@pytest.mark.parametrize("headers", [{}, AS_SAFETENSORS], ids=["json", "safetensors"])
@pytest.mark.parametrize("edits", [[STEER], [edit(stage="blocks.0.[!m]*")] * 32], ids=["one", "many"])
@pytest.mark.parametrize("fields", [{"detail": "none"}, {"detail": "values"}, {"stages": "embed", "top_k": 0}], ids=str)
def test_no_answer_with_a_baseline_is_larger_than_its_estimate(
    tiny: Running,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    edits: list[dict[str, Any]],
    headers: dict[str, str],
) -> None:
    estimates = []

    async def note(*arguments: Any, budget: Budget, **options: Any) -> Any:
        estimates.append(budget.response_bytes)
        return await passes.answer_passes(*arguments, budget=budget, **options)

    async def plan(*arguments: Any) -> Any:
        found = await generation_plan.plan_generation(*arguments)
        estimates.append(found.budget.response_bytes)
        return found

    monkeypatch.setattr("service.answers.prompt_passes.answer_passes", note)
    monkeypatch.setattr("service.answers.generation.plan_generation", plan)
    body = {"prompt": IDS, "edits": edits, "baseline": True}
    responses = [
        tiny.post("/forward", body | fields, headers=headers),
        tiny.post("/logits", body | {"positions": "all"}, headers=headers),
        tiny.post("/generate", body | {"max_tokens": 5, "n": 3, "logprobs": 4, "ignore_eos": True}),
    ]
    for response, estimate in zip(responses, estimates, strict=True):
        assert response.status_code == 200, response.text
        assert len(response.content) <= estimate


def test_a_disconnect_stops_the_passes_of_sources(
    start: Start, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(model=str(tiny_directory))
    computed = note_sources(monkeypatch)
    # So few that they are planned in the event loop: the request then waits only for its first pass.
    patches = [edit(op="patch", positions=[0], source={"prompt": [index]}) for index in range(1, 10)]
    with service.blocked():
        client = service.send("/generate", {"prompt": IDS, "edits": patches})
        wait_until(lambda: service.metric("num_requests_waiting") == 1, "the first pass waits")
        client.close()
        wait_until(lambda: service.metric("num_requests_waiting") == 0, "nothing waits")
    service.answer("/logits", prompt=[1, 2, 3])
    assert computed == []
    assert service.metric("prompt_tokens_total") == 3
    wait_until(lambda: service.metric("buffered_bytes") == 0, "nothing is held")


def note_sources(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> list[tuple[int, ...]]:
    """A list to which the token ids of each source are added when its pass runs, which takes `seconds` more."""
    computed: list[tuple[int, ...]] = []

    def note(network: Any, source: Any) -> Any:
        computed.append(tuple(source.ids))
        time.sleep(seconds)
        return compute_source(network, source)

    monkeypatch.setattr(source_passes, "compute_source", note)
    return computed


def test_equal_sources_are_computed_once(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = note_sources(monkeypatch)
    patches = [edit(op="patch", positions=[at], source={"prompt": OTHER, "positions": [at]}) for at in (0, 1, 2)]
    tiny.answer("/logits", prompt=[IDS, OTHER, IDS[:3]], edits=patches, top_k=1)
    assert computed == [tuple(OTHER)]


def test_other_requests_are_served_between_the_passes_of_sources(
    tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = note_sources(monkeypatch, seconds=0.02)
    sources = [edit(op="patch", positions=[0], source={"prompt": [index]}) for index in range(1, 13)]
    with ThreadPoolExecutor(2) as pool:
        with tiny.blocked():
            many = pool.submit(tiny.answer, "/logits", prompt=IDS, edits=sources, top_k=1)
            wait_until(lambda: tiny.metric("num_requests_waiting") == 1, "the first pass waits")
            other = pool.submit(tiny.answer, "/logits", prompt=[1], top_k=1)
            wait_until(lambda: tiny.metric("num_requests_waiting") == 2, "both wait")
        other.result(PATIENCE_SECONDS)
        assert 1 <= len(computed) < 12
        assert len(many.result(PATIENCE_SECONDS)["edits"]) == 12 == len(computed)


def test_the_metrics_count_requests_with_edits_by_route(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory))

    def has_two_requests(route: str) -> bool:
        return service.metric(f'edited_requests_total{{route="{route}"}}') == 2

    for path in (*ROUTES, "/v1/chat/completions"):
        assert service.metric(f'edited_requests_total{{route="{path}"}}') == 0
    for path in ROUTES:
        for edits in ([], [STEER], [ZERO]):
            assert service.post(path, {"prompt": IDS, "edits": edits}).status_code == 200
        assert service.post(path, {"prompt": IDS, "edits": [edit(stage="nope")]}).status_code == 400
    for path in ROUTES:
        wait_until(partial(has_two_requests, path), path)
        assert service.metric(f'edited_request_seconds_count{{route="{path}"}}') == 2
        assert service.metric(f'edited_request_seconds_sum{{route="{path}"}}') > 0


# The Python client


def test_the_client_sends_edits_and_reads_both_runs(tiny: Running) -> None:
    vector = np.full(WIDTH, 0.5, np.float32)
    edits = [{"stage": RESIDUAL, "op": "add", "vector": vector, "scale": 2, "positions": [(1, 2), -1]}]
    with Client(f"http://127.0.0.1:{tiny.address[1]}") as client:
        trace = client.run(IDS, ["*.resid_post", "logits"], edits=edits, baseline=True)
        plain = client.run(IDS, ["*.resid_post", "logits"])
        assert trace.edits[0].stages == (RESIDUAL,)
        assert trace.edits[0].positions == ((1, 2), 5)
        assert trace.baseline is not None
        assert np.array_equal(trace.baseline.logits, plain.logits)
        assert trace.baseline.loss.mean == plain.loss.mean
        moved = (trace[RESIDUAL] - trace.baseline[RESIDUAL])[0]
        assert np.allclose(moved[[1, 2, 5]], 1, atol=1e-5)
        assert trace.changes[RESIDUAL].norm == pytest.approx(float(np.linalg.norm(moved)), rel=1e-5)
        logits = client.logits(IDS, edits=edits, baseline=True)
        assert logits.baseline is not None
        assert np.allclose(logits.baseline.logits[0], plain.logits[-1], atol=1e-5)
        found = client.generate(IDS, edits=edits, baseline=True, max_tokens=3, seed=1, n=2)
        assert [each.choice for each in found.baseline] == [0, 1]
        assert found.changes[1][RESIDUAL].norm > 0
        assert found.edits == trace.edits
        *_, last = client.stream(IDS, edits=edits, max_tokens=3)
        assert last.finish is not None
        assert last.finish.edits == trace.edits
        assert client.chat("the cat", edits=edits[:1], max_tokens=2).edits[0].stages == (RESIDUAL,)


def test_a_patch_of_the_client_may_have_ids_as_an_array(tiny: Running) -> None:
    source = EditSource(ids=OTHER)
    edits = [{"stage": RESIDUAL, "op": "patch", "positions": range(2), "source": {"prompt": np.array(source.ids)}}]
    with Client(f"http://127.0.0.1:{tiny.address[1]}") as client:
        trace = client.run(IDS, RESIDUAL, edits=edits)
        assert np.array_equal(trace[RESIDUAL][0, :2], client.run(OTHER, RESIDUAL)[RESIDUAL][0, :2])
