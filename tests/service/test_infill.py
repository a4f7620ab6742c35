"""POST /infill, and `suffix` of completions: prompts of models that fill in the middle."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from model.text.fill_in_middle import other_files
from model.text.tokenizer import Tokenizer
from tests.service.checkpoints import FIM_TOKENS, NUM_TOKENS, write_fim_checkpoint
from tests.service.running import Running, running
from tests.service.test_bad_input import check_error

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(NUM_TOKENS, NUM_TOKENS + len(FIM_TOKENS))
BODY: dict[str, Any] = {"input_prefix": "the cat", "input_suffix": " the mat", "n_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(model=str(write_fim_checkpoint(tmp_path_factory.mktemp("fim") / "fim"))) as service:
        yield service


def ids_of(service: Running, text: str) -> list[int]:
    return [token["id"] for token in service.answer("/tokenize", text=text)["tokens"]]


def test_a_suffix_follows_the_tokens_of_the_model(service: Running) -> None:
    body = {"suffix": " the mat", "max_tokens": 2, "return_token_ids": True}
    found = service.answer("/v1/completions", prompt=["the cat", ""], **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in found] == [
        [PREFIX, *ids_of(service, "the cat"), SUFFIX, *ids_of(service, " the mat"), MIDDLE],
        [PREFIX, SUFFIX, *ids_of(service, " the mat"), MIDDLE],
    ]
    check_error(service.post("/v1/completions", body | {"prompt": "a", "echo": True}), 400, "echo")


def test_the_middle_is_what_the_model_writes_after_prefix_suffix_and_other_files(service: Running) -> None:
    files = [{"filename": "f", "text": "the dog"}, {"text": "that", "time": 1}]
    ids = [REPOSITORY, *ids_of(service, "myproject\n")]
    ids += [
        FILE,
        *ids_of(service, "f\nthe dog\n"),
        FILE,
        *ids_of(service, "\nthat\n"),
        FILE,
        *ids_of(service, "filename\n"),
    ]
    ids += [PREFIX, *ids_of(service, "the cat"), SUFFIX, *ids_of(service, " the mat"), MIDDLE, *ids_of(service, "and")]
    expected = service.answer("/generate", prompt=ids, max_tokens=6, temperature=0, logprobs=2)
    body = BODY | {"input_extra": files, "prompt": "and", "n_probs": 2}
    whole = service.answer("/infill", **body, return_tokens=True)
    assert (whole["content"], whole["tokens"]) == (expected["text"], expected["tokens"])
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["stop_type"]) == (len(ids), 6, "limit")
    found = [[token, *token["top_logprobs"]] for token in whole["completion_probabilities"]]
    logprobs = [[token, *token["top"]] for token in expected["logprobs"]]
    assert [[(each["id"], each["logprob"]) for each in step] for step in found] == [
        [(each["id"], each["logprob"]) for each in step] for step in logprobs
    ]
    frames = service.post("/infill", body | {"stream": True}).content.removesuffix(b"\n\n").split(b"\n\n")
    parts = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["stop_type"] == "limit"


def test_what_editors_send_by_habit_is_left_out_and_named(service: Running) -> None:
    habits = {
        "samplers": ["top_k", "infill"],
        "n_indent": 2,
        "t_max_predict_ms": 500,
        "id_slot": 0,
        "cache_prompt": True,
    }
    response = service.post("/infill", BODY | habits | {"n_predict": 0, "stop": [], "seed": -1})
    assert (response.status_code, response.json()["content"]) == (200, "")
    assert set(response.headers["x-ignored-fields"].split(", ")) == set(habits)
    check_error(service.post("/infill", BODY | {"repeat_penalty": 1.3}), 400, "repeat_penalty")
    check_error(service.post("/infill", BODY | {"input_suffix": "the " * 80}), 400, "input_suffix")


def test_the_end_of_the_middle_is_named(service: Running) -> None:
    first = service.answer("/infill", **BODY, return_tokens=True)
    word = service.answer("/infill", **BODY, stop=[first["content"][1:3]])
    assert (word["stop_type"], word["stopping_word"]) == ("word", first["content"][1:3])
    ended = service.answer("/infill", **BODY, stop_token_ids=[first["tokens"][1]])
    assert (ended["stop_type"], ended["stopping_word"], ended["tokens_predicted"]) == ("eos", "", 2)


def test_without_tokens_for_files_their_texts_come_before_the_prompt(tiny: Running) -> None:
    tokenizer: Tokenizer | None = tiny.checkpoint.tokenizer
    assert tokenizer is not None
    ids = other_files(tokenizer, [("f", "the cat"), ("g", "sat")], 64)
    assert tokenizer.decode(ids) == "the cat\n\nsat\n\n"


def test_the_middle_needs_a_model_that_fills_it_in(tiny: Running) -> None:
    check_error(tiny.post("/v1/completions", {"prompt": "a", "suffix": "b"}), 400, "suffix")
    check_error(tiny.post("/infill", BODY), 400, "input_prefix")
