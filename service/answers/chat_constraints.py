"""The constraint on the text of a chat answer, from `response_format`, `tool_choice` and strict functions."""

from typing import Any

from model.text.grammar import embedded_schema
from service.answers.constraints import Compile, structured_output
from service.answers.conversations import offered_tools
from service.answers.tool_calls import BEGIN, Form, call_rules
from service.http.errors import invalid
from service.http.openai_schemas import ChatRequest, NamedTool


def chat_constraint(body: ChatRequest, form: Form) -> Compile | None:
    """How to compile the constraint of a chat; None if nothing but `structured_outputs` may constrain it.

    Raises 400 for fields that contradict each other.
    """
    check_tools(body)
    tools = enforced_tools(body)
    schema = response_schema(body)
    if body.structured_outputs is not None and (tools or schema is not None):
        other = "tool_choice" if tools else "response_format"
        raise invalid("structured_outputs", f"cannot be combined with {other}, which also constrains the answer")
    if tools:
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
        return lambda grammars: grammars.lark("tools", lines("start: calls", *call_rules(form, tools, several=several)))
    several = body.parallel_tool_calls
    offered = offered_tools(body)
    if schema is not None and not offered:
        return lambda grammars: grammars.json_schema("response_format", schema)
    if schema is not None:
        return lambda grammars: grammars.lark(
            "response_format",
            lines(
                "start: calls | content",
                f"content: %json {embedded_schema('response_format', schema)}",
                *call_rules(form, offered, several=several),
            ),
        )
    if any(tool["function"].get("strict") for tool in offered) and body.structured_outputs is None:
        return lambda grammars: grammars.lark(
            "tools", lines(free_text(form), *call_rules(form, offered, several=several))
        )
    return structured_output(body.structured_outputs)


def lines(*rules: str) -> str:
    return "\n".join(rules)


def check_tools(body: ChatRequest) -> None:
    """Raise 400 for two functions with one name, and for parameters that are not an object."""
    names = set()
    for index, tool in enumerate(body.tools):
        function = tool.function
        if function.name in names:
            raise invalid(f"tools.{index}", f"there are two functions with the name {function.name!r}")
        names.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise invalid(f"tools.{index}", "function.parameters must have the type 'object'")


def enforced_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The functions of which one must be called. Raises 400 if there is no such function."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if not body.tools:
        raise invalid("tool_choice", "there are no tools; send the functions in tools")
    tools = offered_tools(body)
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not named:
        known = ", ".join(tool["function"]["name"] for tool in tools[:5])
        raise invalid("tool_choice", f"there is no function {choice.function.name[:64]!r} in tools; known: {known}")
    return named


def response_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of the answer; None if it may be any text."""
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None:
        raise invalid("response_format", "has the type json_schema, so it needs the field json_schema")
    return response_format.json_schema.schema_


def free_text(form: Form) -> str:
    """Rules for a text that may contain calls, in which only the calls are constrained."""
    if form == "tagged":
        return f"start: TEXT | TEXT calls\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{BEGIN}(.|\\n)*/"
    return "start: TEXT | calls\nTEXT: /[^\\[{](.|\\n)*/"
