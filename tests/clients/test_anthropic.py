"""Anthropic's SDK against POST /v1/messages: answers, streams, tools, counts, errors, and the texts of other routes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.running import Running

anthropic: Any = pytest.importorskip("anthropic", reason="needs Anthropic's SDK: pip install '.[clients]'")
pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0.0}  # the SDK has no argument for it
MODEL = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(instruct: Running) -> Iterator[Any]:
    base_url = str(instruct.client.base_url)
    with anthropic.Anthropic(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found


def test_the_events_of_a_stream_make_the_whole_answer(client: Any) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "max_tokens": 30, "system": "Be brief.", "extra_body": GREEDY}
    whole = client.messages.create(**fields)
    assert [(block.type, block.text) for block in whole.content] == [("text", "The capital of France is Paris.")]
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        streamed = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.content[0].text == whole.content[0].text
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens == total
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE, system="Be brief.")
    assert counted.input_tokens == total


def test_the_list_of_models_has_the_fields_of_this_api(client: Any) -> None:
    page = client.models.list()
    assert [model.id for model in page] == [MODEL]
    assert (page.first_id, page.last_id, page.has_more) == (MODEL, MODEL, False)
    model = client.models.retrieve(MODEL)
    assert (model.type, model.display_name, model.lifecycle) == ("model", MODEL, "active")
    assert model.created_at.utcoffset().total_seconds() == 0
    assert model.max_input_tokens > 0


def test_a_session_with_tools_goes_on_after_their_results(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {"model": MODEL, "tools": [WEATHER], "max_tokens": 120, "extra_body": GREEDY}
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    called = client.messages.create(messages=messages, tool_choice=choice, **fields)
    (call,) = called.content
    assert (called.stop_reason, call.type, call.name, list(call.input)) == (
        "tool_use",
        "tool_use",
        "get_weather",
        ["city"],
    )
    with client.messages.stream(
        messages=messages, tool_choice={**choice, "type": "any", "name": None}, **fields
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert len(pieces) > 1
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text


def test_a_stop_sequence_a_limit_and_a_schema_end_the_text(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "extra_body": GREEDY}
    stopped = client.messages.create(max_tokens=30, stop_sequences=[" Paris"], **fields)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " Paris")
    assert stopped.content[0].text == "The capital of France is"
    assert client.messages.create(max_tokens=2, **fields).stop_reason == "max_tokens"
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    format = {"type": "json_schema", "schema": schema}
    found = client.messages.create(max_tokens=30, output_config={"format": format}, **fields)
    assert json.loads(found.content[0].text)["city"] in ("Paris", "Rome")
    prefill: list[Any] = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    continued = client.messages.create(**fields | {"messages": prefill}, max_tokens=30)
    assert continued.content[0].text == " Paris."


def test_errors_are_those_of_the_sdk(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", messages=FRANCE, max_tokens=2)
    assert missing.value.body["error"]["type"] == missing.value.type == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: is 'image'"):
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=2)
    with pytest.raises(anthropic.BadRequestError, match="messages: "):
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": "a " * 9000}], max_tokens=2)


def test_the_same_request_gives_the_same_text_on_all_routes(client: Any, instruct: Running) -> None:
    own = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "top_k": 40, "edits": [], "min_p": 0.01}
    found = client.messages.create(model=MODEL, messages=FRANCE, max_tokens=16, extra_body=own)
    chat = instruct.answer("/v1/chat/completions", messages=FRANCE, return_token_ids=True, **own)
    ids = chat["prompt_token_ids"]
    texts = {
        found.content[0].text,
        chat["choices"][0]["message"]["content"],
        instruct.answer("/v1/completions", prompt=ids, **own)["choices"][0]["text"],
        instruct.answer("/generate", prompt=ids, **own)["text"],
    }
    assert len(texts) == 1
