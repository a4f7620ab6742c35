"""OpenAI's SDK against POST /v1/responses: every answer and event is one of its own types."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.clients.conftest import sdk
from tests.service.running import Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
LOGPROBS: Any = ["message.output_text.logprobs"]
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"instructions": "Be short.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    "logprobs": {"include": LOGPROBS, "top_logprobs": 2, "temperature": 1.0, "top_p": 0.9},
    "call": {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    "allowed": {
        "tools": [WEATHER],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    },
    "named": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
    "json": {"text": {"format": {"type": "json_object"}}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "s", "schema": WEATHER["parameters"]}}},
}


def strict(response: Response) -> Response:
    """The same response, validated: the SDK itself builds its objects without validation."""
    Response.model_validate(response.model_dump(warnings="error", by_alias=True), strict=True)
    return response


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("num_tokens", [2, 80])
def test_every_answer_and_every_event_is_one_of_the_sdk(roomy: Running, name: str, num_tokens: int) -> None:
    body: Any = {
        "model": "roomy",
        "input": "What is the weather in Paris?",
        "max_output_tokens": num_tokens,
    } | REQUESTS[name]
    with sdk(roomy) as client:
        whole = strict(client.responses.create(**body, extra_body={"seed": 3}))
        events = list(client.responses.create(**body, stream=True, extra_body={"seed": 3}))
    for event in events:
        EVENT.validate_python(event.model_dump(warnings="error", by_alias=True), strict=True)
    assert events[-1].response.output_text == whole.output_text
    assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]
    raw = [json.loads(frame.partition("data: ")[2]) for frame in raw_stream(roomy, body)]
    for content in raw:
        EVENT.validate_python(content)


def raw_stream(service: Running, body: dict[str, Any]) -> list[str]:
    return service.post("/v1/responses", body | {"stream": True}).text.split("\n\n")[:-1]


# With SmolLM2-135M-Instruct, whose server keeps responses.


@pytest.mark.slow
def test_a_conversation_goes_on_by_the_id_of_its_last_response(instruct: Running) -> None:
    with sdk(instruct) as client:
        fields: dict[str, Any] = {"model": instruct.checkpoint.name, "temperature": 0, "max_output_tokens": 30}
        first = strict(client.responses.create(input="What is the capital of France?", **fields))
        assert first.output_text == "The capital of France is Paris."
        second = strict(client.responses.create(input="And of Italy?", previous_response_id=first.id, **fields))
        counted = client.responses.input_tokens.count(
            model=instruct.checkpoint.name, input="And of Italy?", previous_response_id=first.id
        )
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens
        history: Any = [{"role": "user", "content": "What is the capital of France?"}, *first.output]
        whole = client.responses.create(input=[*history, {"role": "user", "content": "And of Italy?"}], **fields)
        assert second.output_text == whole.output_text
        assert client.responses.retrieve(second.id) == second
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


@pytest.mark.slow
def test_the_helpers_of_the_sdk_read_streams_schemas_and_calls(instruct: Running) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int = Field(ge=0, le=150)

    with sdk(instruct) as client:
        fields: dict[str, Any] = {"model": instruct.checkpoint.name, "temperature": 0, "max_output_tokens": 120}
        person = client.responses.parse(input="Invent a person.", text_format=Person, **fields)
        assert isinstance(person.output_parsed, Person)
        question: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
        call: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        with client.responses.stream(input=question, **fields, **call) as stream:
            types = [event.type for event in stream]
            first = stream.get_final_response()
        assert "response.function_call_arguments.delta" in types
        (found,) = first.output
        assert found.type == "function_call"
        assert list(json.loads(found.arguments)) == ["city"]
        result = {"type": "function_call_output", "call_id": found.call_id, "output": "rain"}
        later = [*question, found, result]
        answer = strict(client.responses.create(input=later, tools=[WEATHER], tool_choice="none", **fields))
        assert answer.output_text
