"""The forms in which models write calls of functions. The chat template of a model shows its form.

| form | example | models |
|---|---|---|
| tagged | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Hermes, Qwen, SmolLM3, Granite 4 |
| xml | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` | Qwen3-Coder |
| list | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}` | Mistral |
| piped | `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>` | Granite 3, Phi-4-mini |
| functools | `functools[{"name": ..., "arguments": {...}}]` | Phi-4-mini |
| function_call | `<function_call> {"name": ..., "arguments": {...}}` | Granite 20B |
| bare | `{"name": ..., "parameters": {...}}` as the whole text | Llama 3 |
| pythonic | `[NAME(KEY=VALUE)]` as the whole text | Llama 3.2, Llama 4 |
| block | a code block of the language `tool_code` with `NAME(KEY=VALUE)` | Gemma |

A template without tools has no form: the system message then describes the tagged one (tools_as_text.py).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Form = Literal["tagged", "xml", "list", "piped", "functools", "function_call", "bare", "pythonic", "block"]


@dataclass(frozen=True)
class Marks:
    """The marks before calls, the one after them, if there is one, and whether calls may begin the text without one."""

    begin: tuple[str, ...]
    end: str = ""
    is_optional: bool = False


BEGIN, END = "<tool_call>", "</tool_call>"
FORMS: dict[Form, Marks] = {
    "tagged": Marks((BEGIN,), END),
    "xml": Marks((BEGIN, "<function="), END),
    "list": Marks(("[TOOL_CALLS]",), is_optional=True),
    "piped": Marks(("<|tool_call|>",), "<|/tool_call|>", is_optional=True),
    "functools": Marks(("functools",), is_optional=True),
    "function_call": Marks(("<function_call>",), is_optional=True),
    "bare": Marks(("<|python_tag|>",), is_optional=True),
    "pythonic": Marks(("<|python_start|>", "<|python_tag|>"), "<|python_end|>", is_optional=True),
    "block": Marks(("```tool_code",), "```", is_optional=True),
}
MARK_TOKENS = ("[ARGS]", "[CALL_ID]", *(mark for marks in FORMS.values() for mark in (*marks.begin, marks.end) if mark))
"""Marks that are special tokens in some vocabularies, which have no text there."""
SYSTEM_TOOLS = "<|tool|>"  # before the functions in a system message of Phi-4-mini
PYTHONIC = re.compile(r"\[\w+\(\w+=")  # an example of the form, such as [func_name(params_name=params_value)]


@lru_cache(maxsize=16)
def form_of(template: str) -> Form:
    """The form of calls that the source of a chat template shows."""
    if "<function=" in template:
        return "xml"
    if BEGIN in template:
        return "tagged"
    if PYTHONIC.search(template):
        return "pythonic"
    if SYSTEM_TOOLS in template:
        return "piped"
    others: tuple[Form, ...] = ("list", "piped", "function_call", "block", "bare")
    for form in others:
        if FORMS[form].begin[0].lstrip("`") in template:
            return form
    return "functools" if "functools[" in template else "tagged"
