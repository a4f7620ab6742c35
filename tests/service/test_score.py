"""POST /score: the log-probabilities of continuations are those that other routes report for the same tokens."""

import pytest

from forwardscope.results.scores import Scores
from tests.service.running import Running, validate
from tests.service.test_bad_input import check_error

PROMPT = "the cat sat on"
CONTINUATIONS = [" the mat", " the log and that was that", " dogs"]
STEER = {"stage": "blocks.0.resid_post", "op": "add", "vector": [0.5] * 24, "scale": 2, "positions": "prompt"}


@pytest.mark.parametrize("edits", [[], [STEER]], ids=["plain", "edited"])
def test_the_score_of_a_continuation_is_the_sum_of_its_log_probabilities(
    tiny: Running, edits: list[dict[str, object]]
) -> None:
    answer = tiny.answer("/score", prompt=PROMPT, continuations=CONTINUATIONS, edits=edits)
    found = validate(Scores, answer)
    num_prompt = found.usage.prompt_tokens
    for text, score in zip(CONTINUATIONS, found.scores, strict=True):
        ids = [token["id"] for token in tiny.answer("/tokenize", text=PROMPT + text)["tokens"]]
        own = [edit | {"positions": [[0, num_prompt - 1]]} for edit in edits]
        rows = tiny.answer("/logits", prompt=ids, positions="all", logprobs=True, edits=own)["positions"]
        expected = [rows[place - 1]["logprobs"][ids[place]] for place in range(num_prompt, len(ids))]
        assert [token.id for token in score.tokens] == ids[num_prompt:]
        assert [token.logprob for token in score.tokens] == pytest.approx(expected, abs=1e-5)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-5)
        assert score.mean_logprob == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert found.usage.completion_tokens == sum(len(score.tokens) for score in found.scores)
    assert len(found.edits) == len(edits)


def test_the_tokens_of_a_greedy_generation_are_greedy(tiny: Running) -> None:
    ids = [5, 9, 77, 200, 31]
    body = {"prompt": ids, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    generated = tiny.answer("/generate", **body)
    greedy, other = generated["tokens"], [*generated["tokens"][:-1], (generated["tokens"][-1] + 1) % 280]
    first, second = tiny.answer("/score", prompt=ids, continuations=[greedy, other])["scores"]
    assert (first["is_greedy"], second["is_greedy"]) == (True, False)
    expected = [each["logprob"] for each in generated["logprobs"]]
    assert [each["logprob"] for each in first["tokens"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"continuations": []}, 422, "continuations"),
        ({"continuations": "a"}, 422, "continuations"),
        ({"continuations": [" a", ""]}, 400, "continuations.1"),
        ({"continuations": ["t on"]}, 400, "continuations.0"),
        ({"continuations": [[5]], "prompt": ""}, 400, "prompt"),
        ({"continuations": [[5], []]}, 400, "continuations.1"),
        ({"continuations": [[5], [284]]}, 400, "continuations.1.0"),
        ({"continuations": [[5], ["a"]]}, 422, "continuations.1.0"),
        ({"continuations": [" a"], "prompt": [5]}, 400, "continuations"),
        ({"continuations": [[5], [5] * 63], "prompt": [5, 6]}, 400, "continuations.1"),
        ({"continuations": [" a"] * 257}, 422, "continuations"),
    ],
)
def test_a_wrong_continuation_is_named(tiny: Running, body: dict[str, object], status: int, param: str) -> None:
    check_error(tiny.post("/score", {"prompt": "the ca"} | body), status, param)
