"""The constraint on the text of a chat answer, from `response_format`, `tool_choice` and strict functions."""

import re

from model.text.grammar.grammars import EmbeddedSchema
from model.text.json_keys import JsonPlace
from model.text.tokenizer import Tokenizer
from service.answers.call_forms import FORMS, Form
from service.answers.call_rules import argument_schemas, call_rules, enforced_rules, layout_of
from service.answers.constraints import Compile, structured_output
from service.answers.offered_tools import OfferedTools
from service.http.errors import invalid
from service.http.openai_schemas import ChatRequest


def chat_constraint(body: ChatRequest, tools: OfferedTools, form: Form, tokenizer: Tokenizer | None) -> Compile | None:
    """How to compile the constraint of a chat; None without one.

    Raises 400 for fields that contradict each other.
    """
    enforced = tools.enforced
    schema = response_schema(body)
    has_one_call = bool(tools.offered and body.functions)  # the answer has no place for another one
    if body.structured_outputs is not None and (enforced or schema is not None or has_one_call):
        other = "response_format" if schema is not None else "functions" if has_one_call else "tool_choice"
        raise invalid("structured_outputs", f"cannot be combined with {other}, which also constrains the answer")
    several = body.parallel_tool_calls and not (tools.has_name or has_one_call)
    if enforced:
        call_lines, schemas = enforced_rules(form, enforced, tokenizer, several=several)
        return lambda grammars: grammars.lark("tools", lines("start: calls", *call_lines), schemas)
    offered = tools.offered
    if schema is not None and not offered:
        return lambda grammars: grammars.json_schema("response_format", schema.schema, is_closed=schema.is_closed)
    if schema is not None:
        rules = lines("start: calls | content", *call_rules(form, offered, several=several))
        with_content = {"content": schema, **argument_schemas(offered)}
        return lambda grammars: grammars.lark("tools", rules, with_content)
    if (has_one_call or any(function.is_strict for function in offered)) and body.structured_outputs is None:
        rules = lines(free_text(form), *call_rules(form, offered, several=several))
        return lambda grammars: grammars.lark("tools", rules, argument_schemas(offered), json_begin(form))
    return None if body.structured_outputs is None else structured_output(body.structured_outputs)


def lines(*rules: str) -> str:
    return "\n".join(rules)


def response_schema(body: ChatRequest) -> EmbeddedSchema | None:
    """The JSON schema of the answer; None if it may be any text."""
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    asked = response_format.json_schema
    if asked is not None and asked.schema_ is not None and response_format.type == "json_schema":
        return EmbeddedSchema(asked.schema_, "response_format", is_closed=asked.strict)
    if response_format.schema_ is not None:
        return EmbeddedSchema(response_format.schema_, "response_format")
    if response_format.type == "json_schema":
        raise invalid("response_format", "has the type json_schema, so it needs the field json_schema.schema")
    return EmbeddedSchema({"type": "object"}, "response_format")


def free_text(form: Form) -> str:
    """Rules for a text that may contain calls, in which only the calls are constrained.

    The text before calls is none that `ToolCallParser` reads as calls: it has no mark, and in the forms whose
    calls need no mark, it does not begin like JSON.
    """
    mark, layout = FORMS[form].begin[0], layout_of(form)
    anything = r"/(.|\n)*/" if layout == "tagged" else r"/[ \t\r\n]*[^ \t\r\n\[{](.|\n)*/"
    prose = rf"({anything} & ~/(.|\n)*{re.escape(mark)}(.|\n)*/)"
    lead = f'{prose}? "{mark}"' if layout == "bare" else f'{prose} "{mark}"'
    start = "TEXT | LEAD marked" if layout == "tagged" else "TEXT | LEAD? SPACE? calls"
    return lines(f"start: {start}", f"TEXT: {prose}", f"LEAD: {lead}", r"SPACE: /[ \t\r\n]{1,40}/")


def json_begin(form: Form) -> JsonPlace:
    """The beginning of a text of `free_text`: calls follow a mark, or may be the whole text if they need none."""
    mark = FORMS[form].begin[0].encode()
    return JsonPlace(mark, b"" if layout_of(form) == "tagged" else mark)
