"""The thinking of a model in POST /v1/chat/completions: apart from the answer, counted, and free of its grammar."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from model.text.constraint import GrammarState, has_bit, num_words
from model.text.grammar.grammars import Grammars
from model.text.thinking import Thoughts
from model.text.tokenizer import Tokenizer
from tests.service.checkpoints import NUM_TOKENS, VOCAB_SIZE
from tests.service.running import Running, read_events

CHAT = "/v1/chat/completions"
# With this bias, the random model ends its thinking after about ten tokens.
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the cat"}],
    "max_tokens": 60,
    "seed": 1,
    "logit_bias": {str(NUM_TOKENS): 5},
}


def test_the_thinking_is_apart_from_the_answer_in_streams_and_whole(thinking: Running) -> None:
    whole = thinking.answer(CHAT, **BODY, return_token_ids=True)
    message, ids = whole["choices"][0]["message"], whole["choices"][0]["token_ids"]
    assert message["reasoning_content"]
    assert message["content"]
    text = thinking.answer("/detokenize", tokens=ids)["text"]
    thought, _, answer = text.partition("</think>")
    assert (message["reasoning_content"], message["content"]) == (thought.strip(), answer.lstrip())
    streamed = thinking.post(CHAT, BODY | {"stream": True, "stream_options": {"include_usage": True}})
    events = read_events(streamed.content)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    end = next(place for place, token_id in enumerate(ids) if str(token_id) in BODY["logit_bias"])
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": end + 1}
    assert events[-1]["usage"] == whole["usage"]


def test_the_thinking_can_be_left_out_of_the_answer(thinking: Running) -> None:
    (whole,) = thinking.answer(CHAT, **BODY)["choices"]
    (hidden,) = thinking.answer(CHAT, **BODY, include_reasoning=False)["choices"]
    del whole["message"]["reasoning_content"]
    assert hidden == whole


def test_a_grammar_constrains_the_answer_and_not_the_thinking(thinking: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    for seed in range(3):
        answer = thinking.answer(CHAT, **BODY | {"response_format": schema, "max_tokens": 200, "seed": seed})
        message = answer["choices"][0]["message"]
        assert json.loads(message["content"]) in ("yes", "no")
        assert message["reasoning_content"]


def test_a_prompt_whose_thinking_is_over_is_answered_at_once(thinking: Running) -> None:
    for setting in (
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        answer = thinking.answer(CHAT, **BODY | setting)
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_settings_of_thinking_without_effect_are_named_and_never_an_error(tiny: Running, thinking: Running) -> None:
    settings = {"reasoning_effort": "high", "enable_thinking": True, "chat_template_kwargs": {"thinking": True}}
    for name, value in settings.items():
        response = tiny.post(CHAT, BODY | {"logit_bias": {}, "max_tokens": 1, name: value})
        assert response.status_code == 200, response.text
        path = "chat_template_kwargs.thinking" if name == "chat_template_kwargs" else name
        assert response.headers["x-ignored-fields"] == path
    refused = thinking.post(CHAT, BODY | {"reasoning_effort": "absurd"})
    assert (refused.status_code, refused.headers["x-ignored-fields"]) == (200, "reasoning_effort")


def test_a_grammar_begins_after_the_thinking_also_in_drafts(tiny_directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(tiny_directory)
    constraint = Grammars(tokenizer, VOCAB_SIZE).choice("choice", ["aa"])
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    stop = next(each for each in range(VOCAB_SIZE) if tokenizer.special_name(each))

    def allowed(state: GrammarState, draft: list[int]) -> list[tuple[bool, ...]]:
        """Whether a, b and the stop token are allowed after the text, and after each token of the draft."""
        words = np.zeros((1 + len(draft), num_words(VOCAB_SIZE)), dtype=np.int32)
        assert state.fill_masks(words, draft) is None
        return [tuple(has_bit(row, each) for each in (a, b, stop)) for row in words]

    thinks, answers, ends = (True, True, False), (True, False, False), (False, False, True)
    # "ab" is the mark at the end of the thinking.
    inside = GrammarState(
        constraint.after_thinking(Thoughts(True, None, None, b"ab", tokenizer.streamed_bytes)), [stop]
    )
    assert allowed(inside, [b, a, b, a, a]) == [thinks, thinks, thinks, answers, answers, ends]
    for token_id in (a, b):
        inside.append(token_id)
    assert allowed(inside, [a]) == [answers, answers]
    # The token "b" begins and ends the thinking, which the model may leave out.
    before = GrammarState(constraint.after_thinking(Thoughts(False, b, b, b"b", tokenizer.streamed_bytes)), [stop])
    assert allowed(before, [b, a, b, a]) == [(True, True, False), thinks, thinks, answers, answers]
    assert allowed(before, [a, a]) == [(True, True, False), answers, ends]
    for token_id in (b, a, b, a):
        before.append(token_id)
    assert allowed(before, [a]) == [answers, ends]
