"""LangChain's ChatOpenAI against the OpenAI routes, with SmolLM2-135M-Instruct."""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.service.running import Running

langchain_openai: Any = pytest.importorskip("langchain_openai", reason="needs LangChain: pip install '.[clients]'")
pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    """A city and its size."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}."


@pytest.fixture
def chat(instruct: Running) -> Any:
    return langchain_openai.ChatOpenAI(
        model=instruct.checkpoint.name,
        base_url=f"{instruct.client.base_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=60,
        max_retries=0,
        stream_usage=True,
    )


def test_a_question_is_answered(chat: Any) -> None:
    found = chat.invoke(QUESTION)
    assert found.content == ANSWER
    assert found.response_metadata["finish_reason"] == "stop"
    assert found.usage_metadata["total_tokens"] > found.usage_metadata["output_tokens"] > 5


def test_a_conversation_goes_on(chat: Any) -> None:
    first = chat.invoke([("system", "Be short."), ("human", QUESTION)])
    second = chat.invoke([("system", "Be short."), ("human", QUESTION), first, ("human", "Are you sure?")])
    assert second.content
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0


def test_the_chunks_of_a_stream_join_to_the_whole_answer(chat: Any) -> None:
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == ANSWER
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.response_metadata["finish_reason"] == "stop"
    usage = chat.invoke(QUESTION).usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert joined.usage_metadata[name] == usage[name]


def test_concurrent_answers_are_equal(chat: Any) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(chat.ainvoke(QUESTION) for _ in range(4)))

    assert [answer.content for answer in asyncio.run(ask())] == [ANSWER] * 4


def test_log_probabilities_are_reported(chat: Any) -> None:
    found = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = found.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == ANSWER + "<|im_end|>"  # the token that ended the answer
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_has_the_class_that_was_asked_for(chat: Any, method: str) -> None:
    found = chat.with_structured_output(City, method=method).invoke("Tell me about Paris, as JSON.")
    assert isinstance(found, City)
    assert found.name


def test_json_mode_gives_an_object(chat: Any) -> None:
    found = chat.with_structured_output(None, method="json_mode").invoke("Paris as a JSON object, on one short line:")
    assert isinstance(found, dict)


def test_a_tool_is_called_and_its_answer_is_read(chat: Any) -> None:
    with_tools = chat.bind_tools([get_weather], tool_choice="get_weather")
    asked = ("human", "What is the weather in Rome?")
    found = with_tools.invoke([asked])
    (call,) = found.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    joined = None
    for chunk in with_tools.stream([asked]):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert [each["args"] for each in joined.tool_calls] == [call["args"]]
    result = {"role": "tool", "content": get_weather(**call["args"]), "tool_call_id": call["id"]}
    assert chat.bind_tools([get_weather]).invoke([asked, found, result]).response_metadata["finish_reason"]


def test_completions_work(instruct: Running) -> None:
    complete = langchain_openai.OpenAI(
        model=instruct.checkpoint.name,
        base_url=f"{instruct.client.base_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_tokens=8,
        max_retries=0,
    )
    expected = instruct.answer("/generate", prompt="The capital of France is", temperature=0, max_tokens=8)["text"]
    assert complete.invoke("The capital of France is") == expected
    assert "".join(complete.stream("The capital of France is")) == expected
