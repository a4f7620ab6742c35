"""POST /v1/responses: the same text as a chat, events in order, and conversations that the server keeps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from forwardscope.results.responses import ModelResponse, ResponseStreamEvent
from model.engine.request import Output
from model.text.transcript import TokenOutput
from service.answers.conversations import read_message
from service.answers.response_input import chat_request, placed_items, read_conversation
from service.http.bodies import parse
from service.http.openai_schemas import ChatRequest
from service.http.responses_schemas import ResponsesRequest
from service.request_stream import RequestStream
from service.stored_responses import ResponseStore, StoredResponse
from tests.service.checkpoints import NUM_TOKENS, write_checkpoint
from tests.service.running import Running, Start, running

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
LOGPROBS = ["message.output_text.logprobs"]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE = TypeAdapter(ModelResponse)
# Requests for the same answer: fields of /v1/responses, and those of a chat.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {}),
    "instructions": (
        {"instructions": "b", "input": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]},
    ),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    "json": ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    "call": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "function": {**TOOL, "type": None}}], "tool_choice": "required"},
    ),
    "named": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [{"type": "function", "function": {**TOOL, "type": None}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "short": ({"max_output_tokens": 3}, {"max_tokens": 3}),
    "own fields": (
        {"top_k": 5, "stop": ["e"], "edits": [{"stage": "blocks.0.attn_out", "op": "zero"}]},
        {"top_k": 5, "stop": ["e"], "edits": [{"stage": "blocks.0.attn_out", "op": "zero"}]},
    ),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose context has room for the description of a function, and which keeps three responses."""
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=2048)
    with running(model=str(directory), max_stored_responses=3) as found:
        yield found


def events_of(service: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, in the order in which the protocol allows them. Each has its own type as its kind."""
    response = service.post(RESPONSES, body | {"stream": True})
    assert response.status_code == 200, response.text
    *frames, rest = response.content.split(b"\n\n")
    assert rest == b""
    events = []
    for frame in frames:
        kind, _, data = frame.partition(b"\ndata: ")
        events.append(json.loads(data))
        EVENT.validate_python(events[-1])
        assert kind == b"event: " + events[-1]["type"].encode()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream. Each begins and ends once, and its pieces add up to it."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete")
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    place = 2
    while place < len(events) - 1:
        index, added = len(items), events[place]["item"]
        end = next(each for each in range(place, len(events)) if kinds[each] == "output_item.done")
        item = events[end]["item"]
        assert all(event.get("output_index") == index for event in events[place : end + 1])
        assert all(event["item_id"] == item["id"] for event in events[place + 1 : end])
        assert (kinds[place], added["id"], added["status"]) == ("output_item.added", item["id"], "in_progress")
        if item["type"] == "function_call":
            begin, name, after = place + 1, "function_call_arguments", 1
            text, done = item["arguments"], events[end - 1]["arguments"]
            assert added["arguments"] == ""
        else:
            begin, name, after = place + 2, "output_text" if item["type"] == "message" else "reasoning_text", 2
            (part,) = item["content"]
            text, done = part["text"], events[end - 2]["text"]
            assert added["content"] == []
            assert kinds[place + 1] == "content_part.added"
            assert (kinds[end - 1], events[end - 1]["part"]) == ("content_part.done", part)
            logprobs = [each for event in events[begin : end - after] for each in event.get("logprobs", [])]
            assert events[end - after].get("logprobs", []) == part.get("logprobs", []) == logprobs
        assert kinds[begin : end - after + 1] == [f"{name}.delta"] * (end - after - begin) + [f"{name}.done"]
        assert "".join(event["delta"] for event in events[begin : end - after]) == text == done
        items.append(item)
        place = end + 1
    assert events[-1]["response"]["output"] == items
    return items


def without_null(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log-probabilities of a chat as those of a response, in which a token without bytes has an empty list."""
    return [
        each | {"bytes": each["bytes"] or [], "top_logprobs": without_null(each.get("top_logprobs", []))}
        if "top_logprobs" in each
        else each | {"bytes": each["bytes"] or []}
        for each in logprobs
    ]


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is new in each one: ids and times."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "output": items, "id": "", "created_at": 0, "completed_at": 0, "usage": None}


@pytest.mark.parametrize("case", SAME)
def test_a_response_has_the_text_of_the_chat_and_its_events_add_up_to_it(service: Running, case: str) -> None:
    own, chat = SAME[case]
    for seed in range(2):
        common = {"seed": seed, "temperature": 1.0}
        body = {"input": "a", "max_output_tokens": 80, "include": LOGPROBS, "top_logprobs": 2} | own | common
        found = service.answer(RESPONSES, **body)
        RESPONSE.validate_python(found)
        fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 80, "logprobs": True, "top_logprobs": 2}
        expected = service.answer(CHAT, **fields | chat | common)
        (choice,) = expected["choices"]
        content, calls, logprobs = "", [], []
        for item in found["output"]:
            if item["type"] == "message":
                content += item["content"][0]["text"]
                logprobs += item["content"][0]["logprobs"]
            else:
                calls.append((item["name"], item["arguments"]))
        wanted = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert content == (choice["message"]["content"] or "")
        assert calls == [(call["name"], call["arguments"]) for call in wanted]
        if not calls:
            assert without_null(choice["logprobs"]["content"]) == logprobs
        assert (found["status"] == "incomplete") == (choice["finish_reason"] == "length")
        assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
        assert found["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
        counted = service.answer(f"{RESPONSES}/input_tokens", **body)
        assert counted == {"object": "response.input_tokens", "input_tokens": found["usage"]["input_tokens"]}
        assert found.get("edits") == choice.get("edits")
        events = events_of(service, **body)
        check_order(events)
        assert plain(events[-1]["response"]) == plain(found)


def test_each_text_of_a_stream_has_the_logprobs_of_its_tokens_if_a_step_gives_several(
    thinking: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with accepted drafts do. Here, one step gives the thinking and the answer."""
    put, held = RequestStream.put, list[TokenOutput]()

    def put_together(stream: RequestStream, output: Output) -> None:
        held.extend(output.tokens)
        if output.end is not None:
            put(stream, replace(output, tokens=held))

    body = {"input": "a", "seed": 1, "logit_bias": {str(NUM_TOKENS): 5}, "max_output_tokens": 60, "include": LOGPROBS}
    whole = thinking.answer(RESPONSES, **body)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert len(whole["output"][1]["content"][0]["logprobs"]) > 5
    monkeypatch.setattr(RequestStream, "put", put_together)
    events = events_of(thinking, **body)
    check_order(events)
    assert plain(events[-1]["response"]) == plain(whole)


def test_thinking_is_an_item_before_the_answer(thinking: Running) -> None:
    common = {"seed": 1, "logit_bias": {str(NUM_TOKENS): 5}}  # the bias ends the thinking soon
    chat = thinking.answer(CHAT, messages=[{"role": "user", "content": "the cat"}], max_tokens=60, **common)
    events = events_of(thinking, input="the cat", max_output_tokens=60, **common)
    reasoning, message = check_order(events)
    expected = chat["choices"][0]["message"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", expected["reasoning_content"])
    assert message["content"][0]["text"] == expected["content"]
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details == chat["usage"]["completion_tokens_details"] != {"reasoning_tokens": 0}
    off = thinking.answer(RESPONSES, input="the cat", max_output_tokens=60, reasoning={"effort": "none"}, **common)
    assert [item["type"] for item in off["output"]] == ["message"]


def test_the_settings_of_a_request_come_back_with_integers_of_any_size(service: Running) -> None:
    """JSON has no largest integer, but many encoders have one."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**70}}}
    answer = service.answer(RESPONSES, input="a", max_output_tokens=1, tools=[TOOL | {"parameters": parameters}])
    assert answer["tools"][0]["parameters"] == parameters


def test_a_stream_begins_before_the_first_token(service: Running) -> None:
    with service.blocked(), service.client.stream("POST", RESPONSES, json={"input": "a", "stream": True}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)][::3] == ["event: response.created", "event: response.in_progress"]


def test_a_choice_that_fails_ends_the_stream_with_its_error(service: Running) -> None:
    """The edit makes numbers that are not finite, but only after the first tokens."""
    edit = {"stage": "blocks.*.resid_post", "op": "scale", "factor": 3e38, "positions": [12]}
    *_, last = events_of(service, input="a", max_output_tokens=40, edits=[edit], ignore_eos=True)
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "invalid_prompt")
    assert "edits" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_the_steps_of_a_stream_have_their_traces(service: Running) -> None:
    body = {"input": "a", "max_output_tokens": 3, "temperature": 0, "trace": {"stages": "embed"}}
    whole = service.answer(RESPONSES, **body)
    streamed = [event["trace"] for event in events_of(service, **body) if event["type"] == "response.trace"]
    assert len(streamed) == len(whole["trace"]) >= 3
    assert [step["positions"] for step in streamed] == [step["positions"] for step in whole["trace"]]


def messages_of(**body: Any) -> list[dict[str, Any]]:
    """The messages for the chat template, from the items of an input."""
    request = parse(json.dumps({"input": "a"} | body).encode(), ResponsesRequest, 1 << 16, [])
    assert isinstance(request, ResponsesRequest)
    items, _ = placed_items(request, ResponseStore(0, 0), 0)
    chat = chat_request(request, read_conversation(items, request.instructions))
    ChatRequest.model_validate(chat.model_dump(by_alias=True, exclude_unset=True))
    return [read_message(message, index, []) for index, message in enumerate(chat.messages)]


def test_items_become_the_messages_of_a_chat() -> None:
    part = {"type": "output_text", "text": "t", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "i"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "p"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert messages_of(input=items, instructions="i") == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "t"}],
            "reasoning_content": "r",
            "tool_calls": [call("1", "f", {"a": 1}), call("2", "g", {"input": "i"})],
        },
        {"role": "tool", "content": "o", "tool_call_id": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "p"}], "tool_call_id": "2"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]


def test_what_clients_send_by_habit_is_left_out_and_named(service: Running) -> None:
    """The kinds of tools, items and settings of Codex that no model here can use."""
    body = {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "user", "content": "b"},
        ],
        "tools": [TOOL, {"type": "web_search"}, {"type": "custom", "name": "a b", "format": {"type": "text"}}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "client_metadata": {"a": "b"},
        "store": True,
        "max_output_tokens": 2,
    }
    response = service.post(RESPONSES, body)
    assert response.status_code == 200, response.text
    named = response.headers["x-ignored-fields"].split(", ")
    assert {*named} == {
        *("client_metadata", "input.1", "input.1.encrypted_content", "input.2", "tools.1", "tools.2"),
        *("tools.2.format", "include.0", "reasoning.effort", "reasoning.summary", "text.verbosity"),
        "truncation",
    }
    strict = service.client.post(RESPONSES, json=body, headers={"Prefer": "handling=strict"})
    assert strict.status_code == 422


IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "[" * 200}
RESULT = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}, IMAGE]}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE]}]}, 400, "input.1.content.0"),
        ({"input": [RESULT]}, 400, "input.0.output.1"),
        ({"input": [THOUGHT, {"role": "assistant", "content": [IMAGE]}]}, 400, "input.1.content.0"),
        ({"input": [{"type": "dance"}]}, 400, "input.0.type"),
        ({"input": [{"role": "tool", "content": "a"}]}, 422, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 422, "input.0.call_id"),
        ({"input": [{"id": "msg_1"}]}, 400, "input.0"),
        ({"input": [CALL]}, 400, "input"),
        ({"input": "a" * 9000}, 400, "input"),
        ({"max_output_tokens": 9000}, 400, "max_output_tokens"),
        ({"max_tokens": 4}, 400, "max_tokens"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"background": True}, 400, "background"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "cat"}}}}, 400, "text.format"),
        ({"tools": [TOOL, TOOL]}, 400, "tools.1"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, 400, "tool_choice"),
        ({"metadata": {"a": 1}}, 422, "metadata"),
        ({"n": 2}, 400, "n"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_named(
    service: Running, fields: dict[str, Any], status: int, param: str
) -> None:
    response = service.post(RESPONSES, {"input": "a", "max_output_tokens": 4} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert param in error["message"]


@pytest.mark.slow
def test_a_conversation_that_the_server_keeps_is_the_one_that_the_client_sends(service: Running) -> None:
    """Also with references to items, in place of the items themselves."""
    own = {"max_output_tokens": 400, "seed": 1, "tools": [TOOL], "parallel_tool_calls": False}
    question = {"role": "user", "content": "the cat"}
    first = service.answer(RESPONSES, input=[question], **own, tool_choice="required", instructions="i")
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "o"}
    by_id = service.answer(RESPONSES, input=[result], previous_response_id=first["id"], **own)
    whole = service.answer(RESPONSES, input=[question, call, result], store=False, **own)
    reference = {"type": "item_reference", "id": call["id"]}
    referring = service.answer(RESPONSES, input=[question, reference, result], store=False, **own)
    assert plain(by_id) == plain(whole) | {"previous_response_id": first["id"], "store": True}
    assert plain(referring) == plain(whole)
    assert by_id["usage"]["input_tokens"] == whole["usage"]["input_tokens"] == referring["usage"]["input_tokens"]
    assert service.get(f"{RESPONSES}/{by_id['id']}").json() == by_id
    items = service.get(f"{RESPONSES}/{by_id['id']}/input_items?limit=2").json()
    assert [item["type"] for item in items["data"]] == ["function_call_output", "function_call"]
    assert (items["data"][1], items["has_more"]) == (call, True)
    rest = service.get(f"{RESPONSES}/{by_id['id']}/input_items?after={items['last_id']}").json()
    assert [(item["role"], item["content"][0]["text"]) for item in rest["data"]] == [("user", "the cat")]
    assert not rest["has_more"]
    *_, last = events_of(service, input="b", previous_response_id=by_id["id"], **own)
    assert service.get(f"{RESPONSES}/{last['response']['id']}").json() == last["response"]
    assert service.metric("stored_response_bytes") > 0
    assert service.client.delete(f"{RESPONSES}/{by_id['id']}").json() == {
        "id": by_id["id"],
        "object": "response",
        "deleted": True,
    }
    for method in ("GET", "DELETE"):
        assert service.client.request(method, f"{RESPONSES}/{by_id['id']}").status_code == 404
    assert service.get(f"{RESPONSES}/{whole['id']}").status_code == 404


def test_stored_responses_are_bounded_by_their_number_and_their_bytes() -> None:
    def response(name: str, size: int) -> StoredResponse:
        item = parse(
            json.dumps({"input": [{"id": f"i{name}", "role": "user", "content": "a"}]}).encode(), ResponsesRequest, 99
        )
        assert isinstance(item, ResponsesRequest)
        return StoredResponse(name, b"a" * size, item.input, {f"i{name}": (item.input[0], 1)}, size)  # type: ignore[arg-type,dict-item]

    store = ResponseStore(3, 10_000)
    for name in "abcd":
        store.add(response(name, 100))
    assert [store.find(name).id for name in "bcd"] == ["b", "c", "d"]
    with pytest.raises(Exception, match="keeps the last 3"):
        store.find("a")
    with pytest.raises(Exception, match="keeps the last 3"):
        store.find_item("ia", "input.0")
    store.add(response("e", 3000))
    assert store.num_bytes == sum(store.find(name).num_bytes for name in "cde")
    store.add(response("f", 4000))
    assert store.num_bytes == store.find("f").num_bytes
    store.add(response("g", 5000))
    assert store.num_bytes == 0


def test_a_stored_conversation_counts_as_a_part_of_the_request(tmp_path: Any, start: Start) -> None:
    service = start(
        model=str(write_checkpoint(tmp_path / "long", max_position_embeddings=8192)),
        max_stored_responses=9,
        max_body_bytes=6000,
    )
    first = service.answer(RESPONSES, input="a" * 2000, max_output_tokens=1)
    second = service.answer(RESPONSES, input="a" * 2000, max_output_tokens=1, previous_response_id=first["id"])
    body = {"input": "a" * 2000, "max_output_tokens": 1, "previous_response_id": second["id"]}
    response = service.post(RESPONSES, body)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "previous_response_id")


def test_a_server_that_stores_nothing_says_so(tiny: Running) -> None:
    answer = tiny.answer(RESPONSES, input="a", max_output_tokens=2, store=True)
    assert answer["store"] is False
    later = tiny.post(RESPONSES, {"input": "a", "previous_response_id": answer["id"]})
    assert (later.status_code, later.json()["error"]["param"]) == (400, "previous_response_id")
    assert "--max-stored-responses" in later.json()["error"]["message"]
    assert "--max-stored-responses" in tiny.get(f"{RESPONSES}/{answer['id']}").json()["error"]["message"]
