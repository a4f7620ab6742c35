"""OpenAI's SDK against POST /v1/completions and GET /v1/models."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion, Model

from model.text.sampling import token_logprobs
from tests.service.running import Running

Complete = Callable[..., Any]
PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture
def complete(client: openai.OpenAI, service: Running) -> Complete:
    """Send a completion request for the served model."""
    return partial(client.completions.create, model=service.checkpoint.name)


def strict(completion: Completion) -> Completion:
    """The same answer, validated: the SDK itself builds its objects without validation.

    In two places OpenAI's API has nulls that the SDK's types do not know: the first token of an echo has no prediction,
    and a choice that goes on has no reason for its end.
    """
    content = completion.model_dump(warnings=False)
    for choice in content["choices"]:
        if completion.usage is None and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        for name, value in (("token_logprobs", 0.0), ("top_logprobs", {})):
            entries = (choice["logprobs"] or {}).get(name)
            if entries and entries[0] is None:
                entries[0] = value
    Completion.model_validate(content, strict=True)
    return completion


def test_the_models_are_listed_and_found_by_name(client: openai.OpenAI, service: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == service.checkpoint.name
    assert Model.model_validate(model.model_dump(), strict=True) == client.models.retrieve(model.id)
    with pytest.raises(openai.NotFoundError, match=model.id):
        client.models.retrieve("gpt-4o")


def test_a_completion_is_that_of_generate(complete: Complete, service: Running) -> None:
    fields = {"temperature": 0.7, "seed": 3, "max_tokens": 12}
    expected = service.answer("/generate", prompt=PROMPT, top_k=40, **fields)
    found = complete(prompt=PROMPT, extra_body={"top_k": 40, "return_token_ids": True}, **fields)
    (choice,) = strict(found).choices
    assert choice.text == expected["text"]
    assert choice.finish_reason == expected["finish_reason"]
    assert choice.to_dict()["token_ids"] == expected["tokens"]
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert found.usage.total_tokens == expected["usage"]["prompt_tokens"] + 12


def test_choices_come_in_the_order_of_the_prompts(complete: Complete, service: Running) -> None:
    prompts = ["The king", PROMPT, "Once upon a time"]
    found = strict(complete(prompt=prompts, n=2, seed=1, max_tokens=6))
    assert [choice.index for choice in found.choices] == list(range(6))
    for index, choice in enumerate(found.choices):
        alone = complete(prompt=prompts[index // 2], n=2, seed=1, max_tokens=6)
        assert choice.text == alone.choices[index % 2].text
    as_ids = [service.checkpoint.tokenizer.encode(prompt) for prompt in prompts]  # type: ignore[union-attr]  # it has one
    by_ids = complete(prompt=as_ids, n=2, seed=1, max_tokens=6)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in found.choices]


def test_an_echo_has_the_logprobs_of_one_pass_over_the_prompt(complete: Complete, service: Running) -> None:
    found = strict(complete(prompt=PROMPT, echo=True, logprobs=3, max_tokens=0))
    (choice,) = found.choices
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs is not None
    checkpoint = service.checkpoint
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode(PROMPT)
    logits = service.on_network(lambda: checkpoint.model(torch.tensor([ids]))[0].detach()).result()
    expected = token_logprobs(logits[:-1], ids[1:], 3)
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([entry.chosen for entry in expected], abs=1e-4)
    assert logprobs.top_logprobs is not None
    for entry, top in zip(expected, logprobs.top_logprobs[1:], strict=True):
        assert len(top) in (3, 4)
        assert max(top.values()) == pytest.approx(entry.top[0][1], abs=1e-4)
    assert found.usage is not None
    assert found.usage.completion_tokens == 0


def test_the_chosen_token_is_in_the_top_list_with_exactly_the_same_number(complete: Complete) -> None:
    found = complete(prompt="A naïve café 😀 in", echo=True, logprobs=1, max_tokens=24, temperature=1.5, seed=5)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    for token, logprob, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        1:
    ]:
        assert top[token] == logprob
        assert max(top.values()) >= logprob
    text = found.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)


def test_the_best_of_several_choices_has_the_highest_mean_logprob(complete: Complete) -> None:
    fields = {"prompt": PROMPT, "temperature": 1.0, "seed": 11, "max_tokens": 8, "logprobs": 0}
    every = complete(n=5, **fields)
    best = strict(complete(n=2, best_of=5, **fields))

    def mean(choice: openai.types.CompletionChoice) -> float:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        return math.fsum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens


@pytest.mark.parametrize("includes_usage", [True, False])
def test_the_chunks_of_a_stream_join_to_the_whole_answer(complete: Complete, includes_usage: bool) -> None:
    fields = {
        "prompt": [PROMPT, "The sea"],
        "n": 2,
        "seed": 4,
        "max_tokens": 9,
        "logprobs": 2,
        "echo": True,
    }
    whole = complete(**fields)
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    chunks = [strict(chunk) for chunk in complete(stream=True, **fields, **options)]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    if includes_usage:
        assert usages == [chunks[-1].usage] == [whole.usage]
        assert chunks.pop().choices == []
    else:
        assert usages == []
    for expected in whole.choices:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        reasons = [part.finish_reason for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected.finish_reason]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [entry for part in parts for entry in getattr(part.logprobs, name)]
            assert joined == getattr(expected.logprobs, name)


def test_prompt_logprobs_have_the_form_of_vllm(complete: Complete, service: Running) -> None:
    assert service.checkpoint.tokenizer is not None
    ids = service.checkpoint.tokenizer.encode(PROMPT)
    found = complete(prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    entries = found.choices[0].to_dict()["prompt_logprobs"]
    assert isinstance(entries, list)
    assert entries[0] is None
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert isinstance(entry, dict)
        assert [each["rank"] for key, each in entry.items() if key != str(token_id)] in ([1, 2], [1], [2])
        own = entry[str(token_id)]
        assert sum(each["logprob"] > own["logprob"] for each in entry.values()) == min(own["rank"] - 1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [[1], [10**6]]}, "prompt.1.0"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"max_new_tokens": 3}}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_named(complete: Complete, fields: dict[str, object], param: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)) as caught:
        complete(**({"prompt": "a"} | fields))
    assert caught.value.param == param
    assert param in caught.value.message


def test_neutral_fields_and_nulls_change_nothing(service: Running) -> None:
    plain = {"prompt": PROMPT, "seed": 1, "max_tokens": 5}
    neutral = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"}
    nulls = dict.fromkeys(["stop", "n", "temperature", "logit_bias", "stream", "suffix", "best_of", "echo", "logprobs"])
    expected = service.answer("/v1/completions", **plain)["choices"]
    assert service.answer("/v1/completions", **plain, **neutral, **nulls)["choices"] == expected
