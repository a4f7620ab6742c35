"""OpenAI's SDK against POST /v1/chat/completions, with SmolLM2-135M-Instruct."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from model.text.tokenizer import Tokenizer
from tests.clients.conftest import sdk
from tests.published_models import smollm2
from tests.service.running import Running

pytestmark = pytest.mark.slow
Complete = Callable[..., Any]
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(instruct: Running) -> Iterator[openai.OpenAI]:
    with sdk(instruct) as client:
        yield client


@pytest.fixture
def chat(client: openai.OpenAI) -> Complete:
    """Send a chat request for the served model."""
    return partial(client.chat.completions.create, model="SmolLM2-135M-Instruct", temperature=0)


def first_of_a_call() -> dict[str, float]:
    """A bias towards the tokens that begin with `<`, so that the text begins like a call."""
    tokenizer = Tokenizer.from_directory(smollm2())
    return {str(tokenizer.encode(text)[0]): 100.0 for text in ("<tool_call>", "<")}


def strict(answer: ChatCompletion) -> ChatCompletion:
    """The same answer, validated: the SDK itself builds its objects without validation."""
    ChatCompletion.model_validate(answer.model_dump(warnings="error"), strict=True)
    return answer


def read_stream(chunks: Any) -> list[ChatCompletionChunk]:
    """All chunks, each validated."""
    return [ChatCompletionChunk.model_validate(chunk.model_dump(warnings="error"), strict=True) for chunk in chunks]


def test_a_question_is_answered(chat: Complete) -> None:
    found = strict(chat(messages=FRANCE, max_completion_tokens=30))
    (choice,) = found.choices
    assert choice.message.content == "The capital of France is Paris."
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    again = chat(messages=FRANCE, max_completion_tokens=30)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_chat_is_a_completion_of_the_rendered_conversation(chat: Complete, instruct: Running) -> None:
    """The ids that the chat uses, given to POST /v1/completions, continue with the same text."""
    fields = {"max_tokens": 12, "seed": 4, "temperature": 1.0}
    found = chat(messages=FRANCE, extra_body={"return_token_ids": True}, **fields).to_dict()
    by_ids = instruct.answer("/v1/completions", prompt=found["prompt_token_ids"], **fields)
    assert by_ids["choices"][0]["text"] == found["choices"][0]["message"]["content"]
    template = instruct.checkpoint.chat_template
    assert template is not None
    assert template.encode(FRANCE, add_generation_prompt=True) == found["prompt_token_ids"]


def test_the_chunks_of_a_stream_join_to_the_whole_answer(chat: Complete) -> None:
    fields = {"messages": FRANCE, "n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 12, "logprobs": True}
    whole = strict(chat(top_logprobs=2, **fields))
    chunks = read_stream(chat(top_logprobs=2, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1].choices == []
    assert chunks.pop().usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)
    for expected in whole.choices:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == expected.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert expected.logprobs is not None
        logprobs = [entry for part in parts if part.logprobs is not None for entry in part.logprobs.content or []]
        assert logprobs == expected.logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_the_bytes_of_the_tokens_join_to_the_text(chat: Complete) -> None:
    messages = [{"role": "user", "content": "Write only this: café 😀 naïve"}]
    choice = strict(chat(messages=messages, max_tokens=20, logprobs=True)).choices[0]
    assert choice.logprobs is not None
    joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or [])
    assert joined.decode(errors="replace") == choice.message.content


def test_text_parts_and_the_role_developer_are_understood(chat: Complete, instruct: Running) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the capital of France?"}]
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}]
    found = chat(messages=messages, max_tokens=1, extra_body={"return_token_ids": True}).to_dict()
    template = instruct.checkpoint.chat_template
    assert template is not None
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    assert found["prompt_token_ids"] == template.encode(plain, add_generation_prompt=True)


def test_special_tokens_in_a_text_are_plain_text_unless_they_are_allowed(chat: Complete, instruct: Running) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}]

    def num_special(**options: bool) -> int:
        fields = {"return_token_ids": True} | options
        ids = chat(messages=messages, max_tokens=1, extra_body=fields).to_dict()["prompt_token_ids"]
        return sum(token_id in (1, 2) for token_id in ids)  # <|im_start|> and <|im_end|>

    assert num_special() == 5
    assert num_special(allow_special_tokens=True) == 7


def test_the_final_message_is_continued(chat: Complete) -> None:
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    found = strict(chat(messages=messages, max_tokens=8, extra_body={"continue_final_message": True}))
    assert found.choices[0].message.content == " Paris."


def test_a_schema_is_followed_and_parsed(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int = Field(ge=0, le=150)

    answer = client.chat.completions.parse(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        max_completion_tokens=200,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_json_object_is_an_object(chat: Complete) -> None:
    choice = chat(messages=FRANCE, response_format={"type": "json_object"}, max_tokens=80, seed=3).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_enforced_follows_its_schema(chat: Complete, tool_choice: Any, stream: bool) -> None:
    fields = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER, TIME] if isinstance(tool_choice, dict) else [WEATHER],
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 120,
    }
    if stream:
        chunks = read_stream(chat(stream=True, **fields))
        begin, *rest = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert begin.id is not None
        assert begin.function is not None
        assert begin.function.arguments == ""
        assert all(call.index == 0 and call.id is None and call.function is not None for call in rest)
        name = begin.function.name
        arguments = "".join(call.function.arguments or "" for call in rest if call.function is not None)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = strict(chat(**fields)).choices[0]
        (whole,) = choice.message.tool_calls or []
        assert whole.type == "function"
        name, arguments = whole.function.name, whole.function.arguments
        content, reason = choice.message.content or "", choice.finish_reason
    assert name == "get_weather"
    assert list(json.loads(arguments)) == ["city"]
    assert (content, reason) == ("", "tool_calls")


def test_the_result_of_a_call_continues_the_conversation(chat: Complete) -> None:
    """The whole conversation goes back as the SDK writes it, with nulls in the message of the assistant."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = chat(messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    message = first.choices[0].message
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    found = strict(chat(messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=20))
    assert found.choices[0].message.content
    assert found.choices[0].message.tool_calls is None


def test_the_asynchronous_sdk_is_answered_many_times_at_once(instruct: Running) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{instruct.client.base_url}/v1", api_key="none") as client:
            create = partial(client.chat.completions.create, model="SmolLM2-135M-Instruct", temperature=0, max_tokens=9)
            answers = await asyncio.gather(*(create(messages=FRANCE) for _ in range(20)))
        return [answer.choices[0].message.content for answer in answers]

    assert set(asyncio.run(ask())) == {"The capital of France is Paris."}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}], "tools": [WEATHER]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "cat"}}}},
            "response_format",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 9000}, "max_completion_tokens"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_named(chat: Complete, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)) as caught:
        chat(**({"messages": FRANCE} | fields))
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert param in caught.value.message


def test_a_model_without_a_template_says_how_to_give_it_one(bundled: Running) -> None:
    with sdk(bundled) as client, pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
        client.chat.completions.create(model="bundled", messages=FRANCE)
