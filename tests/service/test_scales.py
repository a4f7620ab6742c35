"""`scales`: one request runs its edits with several strengths, and answers what single requests answer."""

import json
from typing import Any

import pytest
from safetensors.torch import load

from forwardscope import Client
from model.errors import InvalidField
from model.tracing.edits.declared import Edit, scaled
from tests.service.running import Running
from tests.service.test_edits import IDS, NOISE, OTHER, RESIDUAL, STEER, WIDTH, ZERO
from tests.service.test_forward import AS_SAFETENSORS

SCALES = [0, 1, -0.5]
ADD = {"stage": RESIDUAL, "op": "add", "vector": [float(index % 5) for index in range(WIDTH)], "scale": 3}
FACTOR = {"stage": "blocks.1.mlp_out", "op": "scale", "factor": 4.0}
PROJECT = {"stage": "blocks.1.resid_pre", "op": "project", "vector": [1.0] * WIDTH, "coeff": 0.0}
EDITS = [ADD, FACTOR, PROJECT, NOISE | {"positions": "all"}]


def by_hand(scale: float) -> list[dict[str, Any]]:
    """The edits with a scale, written out."""
    return [
        ADD | {"scale": 3 * scale},
        FACTOR | {"factor": 1 + scale * 3},
        PROJECT | {"coeff": 1 - scale},
        NOISE | {"positions": "all", "std": 0.5 * abs(scale)},
    ]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("timings", "id")}


@pytest.mark.parametrize(("path", "fields"), [("/forward", {"stages": ["*"]}), ("/logits", {})])
@pytest.mark.parametrize("prompts", [IDS, [IDS, OTHER[:4]]], ids=["one prompt", "two"])
def test_a_pass_of_each_scale_is_that_of_the_edits_written_out(
    tiny: Running, path: str, fields: dict[str, Any], prompts: list[Any]
) -> None:
    answers = tiny.answer(path, prompt=prompts, edits=EDITS, scales=SCALES, **fields)["results"]
    each = [prompts] if prompts is IDS else prompts
    alone = [tiny.answer(path, prompt=ids, edits=by_hand(scale), **fields) for ids in each for scale in SCALES]
    assert [without_times(answer) for answer in answers] == [without_times(answer) for answer in alone]
    plain = tiny.answer(path, prompt=IDS, **fields)
    key = "stages" if path == "/forward" else "positions"
    assert answers[0][key] == plain[key], "the scale 0 changes nothing"
    assert answers[1][key] != plain[key]


def test_safetensors_have_the_tensors_of_each_scale(tiny: Running) -> None:
    body = {"prompt": IDS, "edits": [STEER]}
    found = load(tiny.client.post("/logits", json=body | {"scales": [0, 1]}, headers=AS_SAFETENSORS).content)
    plain = load(tiny.client.post("/logits", json={"prompt": IDS}, headers=AS_SAFETENSORS).content)["logits"]
    edited = load(tiny.client.post("/logits", json=body, headers=AS_SAFETENSORS).content)["logits"]
    assert sorted(found) == ["0/logits", "1/logits"]
    assert found["0/logits"].equal(plain)
    assert found["1/logits"].equal(edited)
    assert not plain.equal(edited)


@pytest.mark.parametrize("n", [1, 2])
def test_a_generation_has_the_choices_of_each_scale(tiny: Running, n: int) -> None:
    body = {"prompt": IDS, "max_tokens": 6, "seed": 7, "n": n, "ignore_eos": True, "trace": {"stages": [RESIDUAL]}}
    answer = tiny.answer("/generate", **body, edits=EDITS, scales=SCALES)
    alone = [tiny.answer("/generate", **body, edits=by_hand(scale)) for scale in SCALES]
    expected = [choice for each in alone for choice in (each["choices"] or [each])]
    for name in ("text", "tokens", "finish_reason", "usage"):
        found = [choice[name] for choice in answer["choices"]]
        assert found == [choice[name] for choice in expected], name
    assert [choice["choice"] for choice in answer["choices"]] == list(range(3 * n))
    assert [len(choice["trace"]) for choice in answer["choices"]] == [6] * 3 * n
    assert answer["edits"] == alone[0]["edits"]
    assert len({json.dumps(each["tokens"]) for each in alone}) > 1


def test_a_stream_has_the_tokens_of_each_scale(tiny: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 5, "seed": 3, "edits": EDITS, "scales": SCALES}
    whole = tiny.answer("/generate", **body)
    with Client(str(tiny.client.base_url)) as client:
        with client.stream(IDS, max_tokens=5, seed=3, edits=EDITS, scales=SCALES) as events:
            found = list(events)
        generated = client.generate(IDS, max_tokens=5, seed=3, edits=EDITS, scales=SCALES)
    expected = [choice["tokens"] for choice in whole["choices"]]
    streamed = [
        [event.token.id for event in found if event.choice == index and event.token is not None] for index in range(3)
    ]
    assert streamed == expected
    assert sum(event.finish is not None for event in found) == 3
    assert [list(choice.tokens) for choice in generated.choices] == expected


def test_without_a_seed_all_scales_draw_alike(tiny: Running) -> None:
    answer = tiny.answer("/generate", prompt=IDS, max_tokens=8, edits=[STEER], scales=[0, 0, 0])
    assert len({tuple(choice["tokens"]) for choice in answer["choices"]}) == 1


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/logits", {"edits": [], "scales": [1]}, 400, "scales"),
        ("/generate", {"edits": [], "scales": [1]}, 400, "scales"),
        ("/forward", {"edits": [STEER, ZERO], "scales": [1]}, 400, "edits.1.op"),
        ("/generate", {"edits": [STEER], "scales": []}, 422, "scales"),
        ("/logits", {"edits": [STEER], "scales": [0, 1], "prompt": [[1]] * 129}, 400, "scales"),
        ("/generate", {"edits": [STEER], "scales": [1] * 65}, 422, "scales"),
        ("/generate", {"edits": [STEER], "scales": ["1"]}, 422, "scales.0"),
        ("/generate", {"edits": [STEER], "scales": [1e300]}, 400, "edits.0.scale"),
        ("/generate", {"edits": [STEER], "scales": [1], "baseline": True}, 400, "baseline"),
        ("/forward", {"model": "ai-rocks", "prompt": [1], "scales": [1]}, 400, "scales"),
    ],
)
def test_wrong_scales_are_errors_that_name_their_field(
    tiny: Running, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    response = tiny.client.post(path, json={"prompt": IDS} | fields)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_a_call_for_one_pass_takes_no_scales(tiny: Running) -> None:
    with Client(str(tiny.client.base_url)) as client:
        for call in (client.run, client.logits):
            with pytest.raises(TypeError, match="call `batch`"):
                call(IDS, edits=[STEER], scales=[1])


def test_edits_without_a_size_cannot_be_scaled() -> None:
    for op in ("zero", "set", "mean", "patch", "cap"):
        with pytest.raises(InvalidField, match="cannot be multiplied; `scales` are for add, scale, project, noise"):
            scaled(Edit(stage="embed", op=op), 2.0, "edits.0")
