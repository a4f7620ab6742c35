"""POST /v1/messages with a random model that thinks: blocks, events, our own fields, what is left out, and errors."""

import json
import re
from typing import Any

import pytest

from service.answers.anthropic_conversations import ChatConversion, input_of
from service.http.anthropic_schemas import MessagesRequest
from service.http.encoding import to_json
from tests.service.running import Running, Start
from tests.service.test_chat_thinking import BODY

MESSAGES = "/v1/messages"
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, IMAGE]}


def read_stream(content: bytes) -> list[dict[str, Any]]:
    """The JSON of the events. Checks that each event is named by its type."""
    events = []
    for frame in content.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = frame.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def test_the_events_join_to_the_blocks_of_the_whole_answer(thinking: Running) -> None:
    whole = thinking.answer(MESSAGES, **BODY)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    chat = thinking.answer("/v1/chat/completions", **BODY)["choices"][0]["message"]
    thought, text = whole["content"]
    assert (thought["thinking"], text["text"]) == (chat["reasoning_content"], chat["content"])
    events = read_stream(thinking.post(MESSAGES, BODY | {"stream": True}).content)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            name = event["delta"]["type"].removesuffix("_delta")
            blocks[event["index"]][name] += event["delta"][name]
    assert blocks == whole["content"]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 2


def test_our_own_fields_work_here_too(thinking: Running) -> None:
    own = {
        "trace": {"stages": ["embed"], "detail": "none"},
        "edits": [{"stage": "blocks.0.mlp_out", "op": "scale", "factor": 0.5}],
        "max_tokens": 3,
        "top_k": 5,
        "logprobs": 2,
    }
    whole = thinking.answer(MESSAGES, **BODY | own)
    events = read_stream(thinking.post(MESSAGES, BODY | own | {"stream": True}).content)
    assert len(whole["trace"]) == 3
    pings = [event for event in events if event["type"] == "ping"]
    assert [event["trace"] for event in pings] == whole["trace"]
    assert [token for event in pings for token in event["logprobs"]] == whole["logprobs"]
    assert [len(token["top"]) for token in whole["logprobs"]] == [2, 2, 2]
    (described,) = whole["edits"]
    assert described["stages"] == ["blocks.0.mlp_out"]
    assert events[-2]["edits"] == whole["edits"]


def test_values_that_mean_none_to_other_servers_are_allowed(tiny: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    greedy = tiny.answer(MESSAGES, **body, temperature=0)["content"]
    assert tiny.answer(MESSAGES, **body, top_p=0, top_k=-1, seed=-1)["content"] == greedy


def test_what_has_no_effect_is_left_out_and_named(tiny: Running) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
        ],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "x"},
        "mcp_servers": [],
        "max_tokens": 1,
    }
    response = tiny.post(MESSAGES, body)
    assert response.status_code == 200, response.text
    names = "tools.0.max_uses, mcp_servers, thinking.budget_tokens, tools.0, thinking, output_config.effort"
    assert sorted(response.headers["x-ignored-fields"].split(", ")) == sorted(names.split(", "))


def test_a_conversation_becomes_a_chat_whose_places_keep_their_names() -> None:
    thinking, text = {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So:"}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}]}
    body = MessagesRequest.model_validate(
        {
            "system": "Be kind.",
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [thinking, text, call],
                },
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ],
            "stop_sequences": ["x"],
            "max_tokens": 3,
        }
    )
    conversion = ChatConversion(body)
    chat = conversion.chat
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "user"]
    assert (chat.messages[2].content, chat.messages[2].reasoning_content) == ("So:", "Hm.")
    assert [each.function.arguments for each in chat.messages[2].tool_calls or ()] == [{"a": 1}]
    assert (chat.messages[3].content, chat.messages[3].tool_call_id) == ("rain", "t")
    assert (chat.stop, chat.max_tokens, chat.continue_final_message) == (["x"], 3, False)
    places = [conversion.name(f"messages.{index}") for index in range(5)]
    assert places == ["system", "messages.0", "messages.1", "messages.2", "messages.2"]
    assert conversion.name("stop") == "stop_sequences"


def test_a_message_without_blocks_is_an_empty_text() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": []}, {"role": "user", "content": []}]
    chat = ChatConversion(MessagesRequest.model_validate({"messages": messages})).chat
    assert [message.content for message in chat.messages] == ["a", "", ""]


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}], ids=str)
def test_the_format_of_the_answer_has_two_names(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    response_format = ChatConversion(MessagesRequest.model_validate(body)).chat.response_format
    assert response_format is not None
    assert response_format.json_schema is not None
    assert response_format.json_schema.schema_ == FORMAT["schema"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": [TEXT, IMAGE]}, "system.1"),
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "messages.0.content.1"),
        ({"messages": [{"role": "user", "content": [TEXT, RESULT]}]}, "messages.0.content.1.content.1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
    ],
    ids=str,
)
def test_a_block_without_text_is_named(tiny: Running, fields: dict[str, Any], param: str) -> None:
    response = tiny.post(MESSAGES, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}),
        (f'{{"a": {2**70}}}', {"a": 2**70}),
        ('{"a', {"invalid_json": '{"a'}),
        ("[]", {"invalid_json": "[]"}),
        ('{"a": 1e999}', {"invalid_json": '{"a": 1e999}'}),
    ],
)
def test_the_input_of_a_call_is_always_an_object(arguments: str, found: Any) -> None:
    assert json.loads(to_json(input_of(arguments))) == found


def test_every_error_has_the_form_of_the_api(tiny: Running, start: Start) -> None:
    locked = start(model="none", api_key="secret")
    question = {"messages": [{"role": "user", "content": "a"}]}
    answers = [
        (locked.client.post(MESSAGES, json={}), 401, "authentication_error"),
        (tiny.post(MESSAGES, {"messages": []}), 422, "invalid_request_error"),
        (
            tiny.post(MESSAGES, {"messages": [{"role": "user", "content": "a"}], "top_p": 7}),
            422,
            "invalid_request_error",
        ),
        (tiny.post(MESSAGES, question | {"model": "other"}), 404, "not_found_error"),
        (tiny.client.get(f"{MESSAGES}/x"), 404, "not_found_error"),
    ]
    for response, status, kind in answers:
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["error"]["message"]


def test_a_request_that_is_too_long_is_answered_in_the_words_of_the_api(tiny: Running) -> None:
    """Claude Code looks for these words, and sends the request again with a smaller max_tokens, or a summary."""
    question = {"messages": [{"role": "user", "content": "a"}]}
    numbers = tiny.answer(f"{MESSAGES}/count_tokens", **question)["input_tokens"]
    error = tiny.post(MESSAGES, question | {"max_tokens": 32_000}).json()["error"]
    assert f"input length and `max_tokens` exceed context limit: {numbers} + 32000 > 64" in error["message"]
    error = tiny.post(MESSAGES, {"messages": [{"role": "user", "content": "a" * 100}]}).json()["error"]
    assert re.search(r"prompt is too long: \d+ tokens > 64 maximum", error["message"])
    assert error["code"] == "context_length_exceeded"
