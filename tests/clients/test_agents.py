"""Agents of LangChain and LlamaIndex: the model calls a tool, gets its result and answers, over several turns.

The model is SmolLM2-135M-Instruct, which is small: the first call of each turn is demanded, and its form is checked.
"""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import SecretStr

from tests.service.running import Running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # of the packages themselves
]
City = Literal["Paris", "Rome"]


def get_weather(city: City) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}."


def test_an_agent_of_langchain_calls_a_tool_in_each_turn(instruct: Running) -> None:
    agents: Any = pytest.importorskip("langchain.agents", reason="needs LangChain: pip install '.[clients]'")
    middleware: Any = pytest.importorskip("langchain.agents.middleware")
    langchain_openai: Any = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model=instruct.checkpoint.name,
        base_url=f"{instruct.client.base_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=60,
        max_retries=0,
    )

    def demand_a_call(request: Any, handler: Any) -> Any:
        """Demand a call after a message of the user; the agent ends with the first answer without one."""
        is_first = request.messages[-1].type == "human"
        return handler(request.override(tool_choice="get_weather" if is_first else "none"))

    demands = [middleware.wrap_model_call(demand_a_call)]
    agent = agents.create_agent(chat, [get_weather], system_prompt="Be brief.", middleware=demands)
    messages: list[Any] = []
    for question in ("What is the weather in Rome?", "And in Paris?", "Where is it wet?"):
        messages = agent.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
        user, called, result, answer = messages[-4:]
        assert (user.type, called.type, result.type, answer.type) == ("human", "ai", "tool", "ai")
        (call,) = called.tool_calls
        assert result.tool_call_id == call["id"]
        assert result.content == get_weather(**call["args"])
        assert answer.content
    assert len(messages) == 12
    streamed = list(agent.stream({"messages": messages[:1]}, stream_mode="messages"))
    assert any(getattr(chunk, "tool_call_chunks", None) for chunk, _ in streamed)


def test_an_agent_of_llamaindex_calls_a_tool(instruct: Running) -> None:
    openai_like: Any = pytest.importorskip(
        "llama_index.llms.openai_like", reason="needs llama-index-llms-openai-like, which excludes openai>=3"
    )
    workflow: Any = pytest.importorskip("llama_index.core.agent.workflow")
    tools: Any = pytest.importorskip("llama_index.core.tools")
    llm = openai_like.OpenAILike(
        model=instruct.checkpoint.name,
        api_base=f"{instruct.client.base_url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )
    calls: list[str] = []

    def get_weather_of(city: City) -> str:
        """Return the weather in a city."""
        calls.append(city)
        return f"It rains in {city}."

    tool = tools.FunctionTool.from_defaults(get_weather_of)
    agent = workflow.FunctionAgent(
        tools=[tool], llm=llm, system_prompt="Be brief.", initial_tool_choice="get_weather_of", streaming=True
    )

    async def ask() -> Any:
        try:
            return await agent.run("What is the weather in Rome?", max_iterations=4)
        finally:
            await llm._get_aclient().close()

    answer = asyncio.run(ask())
    assert set(calls) <= {"Paris", "Rome"}
    assert calls
    assert str(answer.response.content or "") or answer.tool_calls
    whole = llm.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
    (selection, *_) = llm.get_tool_calls_from_response(whole)
    assert selection.tool_name == "get_weather_of"
    assert selection.tool_kwargs["city"] in ("Paris", "Rome")
    llm._get_client().close()
