"""POST /patterns answers with the attention stages of /forward: bit by bit, or the largest number of each block."""

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forwardscope.results.passes import Patterns
from model.worked_examples import WORKED_EXAMPLES
from tests.service.checkpoints import VOCAB_SIZE
from tests.service.running import Running, Start, validate
from tests.service.test_forward import DTYPES, from_base64
from tests.tiny import random_ids

PROMPT = random_ids(VOCAB_SIZE, 37)[0].tolist()
STAGES = ("pattern", "attn_scores", "scores")
# With a window (shorter than the prompt), experts, a softcap, and positions of each kind.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "mixtral": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {},
    "gpt_neox": {},
}


def read_maps(answer: dict[str, Any]) -> dict[tuple[int, int], Tensor]:
    """The maps by layer and head."""
    validate(Patterns, answer)
    dtype, size = {"uint8": torch.uint8, **DTYPES}[answer["dtype"]], answer["size"]
    return {
        (each["layer"], each["head"]): torch.frombuffer(
            bytearray(base64.b64decode(each["values"], validate=True)), dtype=dtype
        ).reshape(size, size)
        for each in answer["maps"]
    }


def read_forward(service: Running, stage: str, **body: Any) -> dict[tuple[int, int], Tensor]:
    """The same stage from /forward, by layer and head."""
    answer = service.answer(
        "/forward", stages=[f"blocks.*.attn.{stage}"], detail="values", encoding="base64", top_k=0, **body
    )
    return {
        (int(each["name"].split(".")[1]), head): values
        for each in answer["stages"]
        for head, values in enumerate(from_base64(each)[0])
    }


def largest_of_blocks(values: Tensor, block: int) -> Tensor:
    """Computed without PyTorch's pooling."""
    numbers = values.double().numpy()
    starts = range(0, len(numbers), block)
    return torch.tensor([[numbers[i : i + block, j : j + block].max() for j in starts] for i in starts])


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path: Path, start: Start) -> Running:
    from tests.parity.reference import config_of
    from tests.tiny import write_reference

    write_reference(config_of(request.param, FAMILIES[request.param]), tmp_path)
    return start(model=str(tmp_path))


def test_without_max_size_the_maps_are_the_stages_of_forward_bit_by_bit(family: Running) -> None:
    prompt = random_ids(71, 37)[0].tolist()
    for stage in STAGES:
        answer = family.answer("/patterns", prompt=prompt, stage=stage)
        assert (answer["size"], answer["block"], answer["scale"]) == (37, 1, 1.0)
        found, expected = read_maps(answer), read_forward(family, stage, prompt=prompt)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("max_size", [4, 5, 12, 36])
@pytest.mark.parametrize("stage", STAGES)
def test_a_reduced_map_has_the_largest_number_of_each_block(tiny: Running, stage: str, max_size: int) -> None:
    answer = tiny.answer("/patterns", prompt=PROMPT, stage=stage, max_size=max_size)
    block = -(-37 // max_size)
    assert (answer["block"], answer["size"]) == (block, -(-37 // block))
    assert answer["size"] <= max_size
    found, expected = read_maps(answer), read_forward(tiny, stage, prompt=PROMPT)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key].double(), largest_of_blocks(values, block))


@pytest.mark.parametrize("max_size", [37, 38, 1000])
def test_a_map_that_is_small_enough_is_not_reduced(tiny: Running, max_size: int) -> None:
    answer = tiny.answer("/patterns", prompt=PROMPT, max_size=max_size)
    assert (answer["size"], answer["block"]) == (37, 1)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32", "float64"])
def test_the_numbers_have_the_dtype_of_the_request(tiny: Running, dtype: str) -> None:
    answer = tiny.answer("/patterns", prompt=PROMPT, dtype=dtype)
    assert answer["dtype"] == dtype
    assert answer["scale"] == (1 / 255 if dtype == "uint8" else 1.0)
    exact = read_forward(tiny, "pattern", prompt=PROMPT)
    for key, values in read_maps(answer).items():
        expected = (exact[key] * 255).round() if dtype == "uint8" else exact[key].to(DTYPES[dtype])
        assert torch.equal(values.double(), expected.double())


def test_the_means_say_where_the_weight_of_a_head_goes_whatever_the_size_of_its_map(tiny: Running) -> None:
    answer = tiny.answer("/patterns", prompt=PROMPT, max_size=4)
    exact = read_forward(tiny, "pattern", prompt=PROMPT)
    queries = torch.arange(1, len(PROMPT))
    for each in answer["maps"]:
        weights = exact[each["layer"], each["head"]].double()
        keys = {"previous": queries - 1, "first": 0 * queries, "itself": queries}
        expected: dict[str, float | None] = {name: float(weights[queries, key].mean()) for name, key in keys.items()}
        expected["induction"] = induction(weights, PROMPT)
        assert each["means"] == pytest.approx(expected, abs=1e-12)


def induction(weights: Tensor, ids: list[int]) -> float | None:
    """The weight on the tokens after earlier copies of each query's token, computed without masks."""
    after = [[key for key in range(1, query) if ids[key - 1] == ids[query]] for query in range(len(ids))]
    sums = [float(weights[query, keys].sum()) for query, keys in enumerate(after) if keys]
    return sum(sums) / len(sums) if sums else None


@pytest.mark.parametrize("ids", [[7, 9, 11, 7, 9, 11, 7], [5, 5, 5], [5, 5], [1, 2, 3, 4]])
def test_the_mean_of_induction_counts_only_queries_with_an_earlier_copy(tiny: Running, ids: list[int]) -> None:
    exact = read_forward(tiny, "pattern", prompt=ids)
    for each in tiny.answer("/patterns", prompt=ids)["maps"]:
        expected = induction(exact[each["layer"], each["head"]].double(), ids)
        assert (expected is None) == (len(set(ids)) in (1, 4) and len(ids) != 3)
        assert each["means"]["induction"] == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_scores_and_a_single_token_have_no_means(tiny: Running) -> None:
    for body in ({"prompt": PROMPT, "stage": "scores"}, {"prompt": PROMPT[:1]}):
        assert all(each["means"] is None for each in tiny.answer("/patterns", **body)["maps"])


def test_layers_and_heads_are_returned_in_the_order_of_the_request(tiny: Running) -> None:
    answer = tiny.answer("/patterns", prompt=PROMPT, layers=[1, 0], heads=[4, 2])
    found, expected = read_maps(answer), read_forward(tiny, "pattern", prompt=PROMPT)
    assert list(found) == [(1, 4), (1, 2), (0, 4), (0, 2)]
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_worked_example_has_maps_too(empty: Running, name: str, stage: str) -> None:
    prompt = WORKED_EXAMPLES[name].prompt_ids
    answer = empty.answer("/patterns", model=name, prompt=prompt, stage=stage)
    expected = read_forward(empty, stage, model=name, prompt=prompt)
    found = read_maps(answer)
    assert answer["dtype"] == "float64"
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_edits_change_the_maps_as_those_of_forward(tiny: Running) -> None:
    edits = [
        {"stage": "blocks.0.attn.pattern", "op": "zero", "heads": [3], "keys": [0]},
        {"stage": "logits", "op": "zero"},
    ]
    answer = tiny.answer("/patterns", prompt=PROMPT, edits=edits)
    expected = read_forward(tiny, "pattern", prompt=PROMPT, edits=edits)
    found, plain = read_maps(answer), read_forward(tiny, "pattern", prompt=PROMPT)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not torch.equal(found[0, 3], plain[0, 3])
    assert not torch.equal(found[1, 0], plain[1, 0])
    assert answer["edits"][0]["stages"] == ["blocks.0.attn.pattern"]


@pytest.mark.parametrize("factor", [3.0, -1.0])
def test_numbers_that_uint8_cannot_hold_are_an_error(tiny: Running, factor: float) -> None:
    edits = [{"stage": "blocks.0.attn.pattern", "op": "scale", "factor": factor}]
    response = tiny.post("/patterns", {"prompt": PROMPT, "edits": edits, "dtype": "uint8"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "dtype")
    assert tiny.post("/patterns", {"prompt": PROMPT, "edits": edits, "dtype": "float16"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"layers": [2]}, "layers.0"),
        ({"layers": [0, 0]}, "layers"),
        ({"heads": [1, 6]}, "heads.1"),
        ({"stage": "scores", "dtype": "uint8"}, "dtype"),
        ({"model": "ai-rocks", "prompt": [1], "edits": [{"stage": "embed", "op": "zero"}]}, "edits"),
    ],
)
def test_a_wrong_field_is_400(tiny: Running, body: dict[str, Any], param: str) -> None:
    response = tiny.post("/patterns", {"prompt": PROMPT} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{"max_size": 3}, {"layers": []}, {"layers": [-1]}, {"stage": "z"}, {"dtype": "int8"}])
def test_a_wrong_shape_is_422(tiny: Running, body: dict[str, Any]) -> None:
    assert tiny.post("/patterns", {"prompt": PROMPT} | body).status_code == 422


def test_a_large_answer_is_refused_before_the_pass_and_a_reduced_one_is_not(tiny_directory: Path, start: Start) -> None:
    service = start(model=str(tiny_directory), max_response_bytes=60_000)
    response = service.post("/patterns", {"prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "response_too_large")
    assert "max_size" in response.json()["error"]["message"]
    service.answer("/patterns", prompt=PROMPT, max_size=12, dtype="uint8")


def test_the_bound_of_the_answer_is_not_far_above_its_size(stories: Running) -> None:
    prompt = random_ids(500, 400)[0].tolist()
    body = {"prompt": prompt, "max_size": 64, "dtype": "uint8"}
    size = len(stories.post("/patterns", body).content)
    num_maps = len(stories.answer("/patterns", **body)["maps"])
    assert size < num_maps * (4 / 3 * 58**2 + 100) + 400 * 60
