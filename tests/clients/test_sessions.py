"""OpenAI's SDK through a whole session: parsed answers and calls go back to the server as the SDK made them."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import sdk
from tests.service.running import Running


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


class Answer(BaseModel):
    is_wet: bool
    advice: Literal["umbrella", "hat"]


@pytest.fixture(params=["roomy", pytest.param("instruct", marks=pytest.mark.slow)])
def service(request: pytest.FixtureRequest) -> Running:
    """A random network with a long context, and a real model."""
    found: Running = request.getfixturevalue(request.param)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the SDK about its own parsed messages
@pytest.mark.parametrize("stream", [False, True])
def test_five_turns_with_calls_and_parsed_answers(service: Running, stream: bool) -> None:
    """Each message of the assistant goes back as the object that `parse()` has returned."""
    tools = [openai.pydantic_function_tool(Weather)]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    fields: dict[str, Any] = {"model": service.checkpoint.name, "temperature": 0, "max_completion_tokens": 400}
    num_prompt = 0
    with sdk(service) as client:

        def parse(**options: Any) -> Any:
            options = fields | {"messages": messages} | options
            if not stream:
                return client.chat.completions.parse(**options)
            options["stream_options"] = {"include_usage": True}
            with client.chat.completions.stream(**options) as events:
                return events.get_final_completion()

        for turn in range(5):
            messages.append({"role": "user", "content": f"Question {turn}: do I need an umbrella?"})
            called = parse(tools=tools, tool_choice="required", parallel_tool_calls=False)
            (call,) = called.choices[0].message.tool_calls
            assert called.choices[0].finish_reason == "tool_calls"
            assert isinstance(call.function.parsed_arguments, Weather)
            assert json.loads(call.function.arguments) == call.function.parsed_arguments.model_dump()
            messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
            found = parse(response_format=Answer, tools=tools, tool_choice="none")
            assert isinstance(found.choices[0].message.parsed, Answer)
            messages.append(found.choices[0].message)
            assert found.usage.prompt_tokens > num_prompt
            num_prompt = found.usage.prompt_tokens
    assert len(messages) == 1 + 4 * 5


def test_a_conversation_that_is_too_long_is_recognised(service: Running) -> None:
    long = "the cat sat on the mat " * 20_000
    with sdk(service) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=service.checkpoint.name, messages=[{"role": "user", "content": long}])
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {service.checkpoint.model.config.max_positions} tokens" in caught.value.message
