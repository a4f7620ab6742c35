"""Negative positions count from the end of the prompt, and one glob needs no list."""

from typing import Any

import pytest

from tests.service.running import Running

PROMPT = [257, 69, 270, 273, 264]


def stages_of_steps(service: Running, **trace: Any) -> list[list[dict[str, Any]]]:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "seed": 1, "trace": trace | {"detail": "values"}}
    return [step["stages"] for step in service.answer("/generate", **body)["trace"]]


@pytest.mark.parametrize(("negative", "positive"), [([-1], [4]), ([-5, 2, -2], [0, 2, 3])])
def test_a_negative_position_is_that_many_tokens_before_the_end(
    tiny: Running, negative: list[int], positive: list[int]
) -> None:
    body = {"prompt": PROMPT, "detail": "values", "stages": ["*"], "top_k": 2}
    expected = tiny.answer("/forward", **body, positions=positive)
    found = tiny.answer("/forward", **body, positions=negative)
    assert (found["stages"], found["predictions"]) == (expected["stages"], expected["predictions"])
    rows = tiny.answer("/logits", prompt=PROMPT, positions=negative)["positions"]
    assert rows == tiny.answer("/logits", prompt=PROMPT, positions=positive)["positions"]
    assert [row["position"] for row in rows] == positive


def test_the_last_position_of_each_prompt_of_a_list_is_minus_one(tiny: Running) -> None:
    results = tiny.answer("/logits", prompt=[PROMPT, PROMPT[:2]], positions=[-1])["results"]
    assert [result["positions"][0]["position"] for result in results] == [4, 1]


def test_negative_positions_of_a_generation_count_from_the_end_of_the_prompt(tiny: Running) -> None:
    found = stages_of_steps(tiny, stages=["embed"], positions=[-1, 6, -5])
    assert found == stages_of_steps(tiny, stages=["embed"], positions=[4, 6, 0])
    assert sum(stage["shape"][1] for stages in found for stage in stages) == 3


def test_an_error_says_how_negative_positions_count(tiny: Running) -> None:
    error = tiny.post("/logits", {"prompt": PROMPT, "positions": [-6]}).json()["error"]
    assert error["message"] == (
        "positions.0: -6 is out of range; there are 5 tokens; a negative position is at least -5"
    )


def test_one_glob_means_the_same_as_a_list_of_it(tiny: Running) -> None:
    found = tiny.answer("/forward", prompt=PROMPT, stages="*.resid_post", detail="values")["stages"]
    assert found == tiny.answer("/forward", prompt=PROMPT, stages=["*.resid_post"], detail="values")["stages"]
    assert len(found) == 2
    assert stages_of_steps(tiny, stages="*.hook_resid_post") == stages_of_steps(tiny, stages=["*.resid_post"])
