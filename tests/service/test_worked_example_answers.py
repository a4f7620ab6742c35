"""POST /forward with a worked example: the printed numbers of the article stand beside the computed ones."""

from typing import Any

import pytest

from forwardscope.results.passes import Trace
from tests.service.running import Running, validate
from tests.service.test_forward import as_tensor, stages_by_name

PROMPTS = {
    "ai-rocks": "AI rocks <EOS>",
    "a-tokens-journey": "the cat sat on",
    "i-like-transformers": "<BOS> I like transformers <EOS>",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_printed_numbers_have_the_stated_difference_from_the_computed_ones(empty: Running, name: str) -> None:
    body = {"model": name, "prompt": PROMPTS[name], "detail": "values"}
    answer = empty.answer("/forward", **body)
    validate(Trace, answer)
    assert answer["model"] == name
    published = [stage for stage in answer["stages"] if stage.get("published") is not None]
    assert len(published) >= 4
    for stage in published:
        computed, printed = as_tensor(stage["values"]), as_tensor(stage["published"]["values"])
        assert printed.shape == computed.shape
        if stage["published"]["squared"]:
            computed = computed.square()
        difference = (computed - printed).abs()
        assert not difference.isnan().all()
        assert difference.nan_to_num().max().item() == pytest.approx(stage["published"]["max_difference"], abs=1e-9)


@pytest.mark.parametrize("name", PROMPTS)
def test_the_selection_applies_to_printed_numbers_as_to_values(empty: Running, name: str) -> None:
    body = {"model": name, "prompt": PROMPTS[name], "detail": "values", "positions": [2, 0], "heads": [0]}
    for stage in empty.answer("/forward", **body)["stages"]:
        if stage.get("published") is not None:
            assert as_tensor(stage["published"]["values"]).shape == tuple(stage["shape"])


def test_the_answer_of_ai_rocks_lists_its_slips(empty: Running) -> None:
    answer = empty.answer("/forward", model="ai-rocks", prompt=PROMPTS["ai-rocks"])
    slips = answer["worked_example"]["slips"]
    assert {"blocks.0.attn.v", "blocks.0.resid_pre"} <= {slip["stage"] for slip in slips}
    for slip in slips:
        assert abs(float(slip["printed"]) - slip["from_printed"]) > slip["allowed"]
    stages = stages_by_name(answer)
    assert stages["blocks.0.attn.v"]["published"]["from_previous"]["agrees"] is False
    assert stages["blocks.0.attn.q"]["published"]["from_previous"]["agrees"] is True
    assert stages["blocks.0.attn_out"]["published"]["from_previous"] is None


def test_i_like_transformers_has_the_printed_loss_and_perplexity(empty: Running) -> None:
    answer = empty.answer("/forward", model="i-like-transformers", prompt=PROMPTS["i-like-transformers"])
    assert round(answer["loss"]["mean"], 4) == 1.8299
    assert round(answer["loss"]["perplexity"], 2) == 6.23
    results = {result["name"]: result for result in answer["worked_example"]["results"]}
    assert results["loss"]["published"] == results["loss"]["computed"] == "1.8299"
    assert results["perplexity"]["published"] == results["perplexity"]["computed"] == "6.23"
    published = [stage["published"] for stage in answer["stages"] if stage.get("published") is not None]
    assert all(stage["agrees"] for stage in published)
    assert answer["worked_example"]["slips"] == []


def test_a_tokens_journey_predicts_cat_with_the_printed_loss(empty: Running) -> None:
    answer = empty.answer("/forward", model="a-tokens-journey", prompt=PROMPTS["a-tokens-journey"])
    assert answer["predictions"][-1]["top"][0]["text"] == "cat"
    assert answer["loss"]["per_token"][:3] == [None] * 3
    assert round(answer["loss"]["per_token"][3], 2) == round(answer["loss"]["mean"], 2) == 1.89


def test_another_prompt_runs_and_has_no_printed_numbers(empty: Running) -> None:
    answer = empty.answer("/forward", model="a-tokens-journey", prompt="dog mat the")
    validate(Trace, answer)
    assert [token["text"] for token in answer["tokens"]] == ["dog", "mat", "the"]
    assert "worked_example" not in answer
    assert all("published" not in stage for stage in answer["stages"])
    assert answer["loss"]["per_token"][2] is None  # the default targets are the next words of the prompt
    assert None not in answer["loss"]["per_token"][:2]


def test_token_ids_give_the_same_answer_as_their_words(empty: Running) -> None:
    words = empty.answer("/forward", model="ai-rocks", prompt="AI rocks <EOS>", detail="values")
    ids = empty.answer("/forward", model="ai-rocks", prompt=[0, 1, 2], detail="values")
    assert {**words, "timings": None} == {**ids, "timings": None}


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ("the elephant", "prompt", "unknown_word"),
        ("", "prompt", "empty"),
        ("  \n ", "prompt", "empty"),
        ("the the the the the", "prompt", "context_length_exceeded"),
        ([6], "prompt.0", "token_id"),
    ],
)
def test_a_prompt_that_does_not_fit_the_example_is_an_error(empty: Running, prompt: Any, param: str, code: str) -> None:
    response = empty.post("/forward", {"model": "a-tokens-journey", "prompt": prompt})
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)


def test_a_checkpoint_and_the_examples_are_served_together(tiny: Running) -> None:
    names = [entry["name"] for entry in tiny.get("/models").json()["models"]]
    assert names == ["tiny", *PROMPTS]
    for name, prompt in {"tiny": "the cat", **PROMPTS}.items():
        assert tiny.answer("/forward", model=name, prompt=prompt)["model"] == name
