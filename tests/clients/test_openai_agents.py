"""OpenAI's Agents SDK, which speaks the Responses API: tools, streams, and conversations that the server keeps."""

import asyncio
from typing import Any, Literal

import openai
import pytest

from tests.service.running import Running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # of the package itself
]


def test_an_agent_calls_a_tool_and_goes_on_where_it_was(instruct: Running) -> None:
    """Each turn is a call, which is demanded, and the answer to its result."""
    agents: Any = pytest.importorskip("agents", reason="needs OpenAI's Agents SDK: pip install '.[clients]'")
    agents.set_tracing_disabled(True)
    called: list[str] = []

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather in a city."""
        called.append(city)
        return f"It rains in {city}."

    async def talk() -> tuple[Any, set[str]]:
        base_url = f"{instruct.client.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="Weather",
                instructions="Be brief.",
                tools=[agents.function_tool(get_weather)],
                model=agents.OpenAIResponsesModel(instruct.checkpoint.name, client),
                model_settings=agents.ModelSettings(
                    tool_choice="required", temperature=0.0, max_tokens=60, parallel_tool_calls=False, top_logprobs=1
                ),
            )
            first = await agents.Runner.run(agent, "What is the weather in Rome?")
            assert first.final_output
            later = agents.Runner.run_streamed(agent, "And in Paris?", previous_response_id=first.last_response_id)
            return later, {event.type async for event in later.stream_events()}

    later, kinds = asyncio.run(talk())
    assert len(called) == 2
    assert later.final_output
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
