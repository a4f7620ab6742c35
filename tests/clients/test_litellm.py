"""LiteLLM against the OpenAI routes, with SmolLM2-135M-Instruct."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.test_openai_chat import FRANCE, WEATHER
from tests.service.running import Running

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import downloads a list of prices
litellm: Any = pytest.importorskip("litellm", reason="needs LiteLLM: pip install '.[clients]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*:DeprecationWarning:litellm",
        "ignore:Pydantic serializer warnings:UserWarning",  # LiteLLM's own objects have fields of other types
    ),
]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all tests: LiteLLM looks for one even in synchronous calls, and keeps it."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        yield runner.get_loop()
        runner.run(litellm.close_litellm_async_clients())
    asyncio.set_event_loop(None)


@pytest.fixture
def target(instruct: Running, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """The arguments that lead LiteLLM to the service."""
    return {
        "model": f"openai/{instruct.checkpoint.name}",
        "api_base": f"{instruct.client.base_url}/v1",
        "api_key": "none",
        "max_retries": 0,
    }


def test_a_question_is_answered(target: dict[str, Any]) -> None:
    found = litellm.completion(messages=FRANCE, temperature=0, max_tokens=30, **target)
    (choice,) = found.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_concurrent_answers_are_those_of_single_requests(
    target: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> None:
    questions = [[{"role": "user", "content": f"What is {a} + {a}?"}] for a in range(4)]
    fields = {"temperature": 0.8, "seed": 2, "max_tokens": 12} | target

    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(messages=question, **fields) for question in questions))

    texts = [answer.choices[0].message.content for answer in loop.run_until_complete(ask())]
    assert texts == [litellm.completion(messages=q, **fields).choices[0].message.content for q in questions]


def test_the_chunks_of_a_stream_join_to_the_whole_answer(target: dict[str, Any]) -> None:
    fields = {"messages": FRANCE, "temperature": 0, "max_tokens": 30} | target
    whole = litellm.completion(**fields)
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1:] in (["stop"], [None])
    built = litellm.stream_chunk_builder(chunks, messages=FRANCE)
    assert built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_an_asynchronous_stream_has_the_same_text(target: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
    fields = {"messages": FRANCE, "temperature": 0, "max_tokens": 30} | target

    async def read() -> str:
        stream = await litellm.acompletion(stream=True, **fields)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert loop.run_until_complete(read()) == "The capital of France is Paris."


def test_an_enforced_call_has_arguments_of_the_schema(target: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {
        "messages": messages,
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 60,
    }
    fields |= target
    found = litellm.completion(tool_choice="required", **fields)
    (call,) = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    chunks = list(litellm.completion(tool_choice="required", stream=True, **fields))
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_a_completion_is_that_of_generate(target: dict[str, Any], instruct: Running) -> None:
    target = target | {"model": f"text-completion-openai/{instruct.checkpoint.name}"}
    found = litellm.text_completion(prompt="The capital of France is", temperature=0, max_tokens=8, **target)
    expected = instruct.answer("/generate", prompt="The capital of France is", temperature=0, max_tokens=8)
    assert found.choices[0].text == expected["text"]
    assert found.choices[0].finish_reason == expected["finish_reason"]


def test_a_field_that_cannot_be_used_is_named(target: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=FRANCE, temperature=-1, **target)
