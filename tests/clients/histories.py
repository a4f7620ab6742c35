"""Requests in the middle of a session, as real programs send them: the fields, roles and forms that each one uses.

The model must see the `texts` of each request. The fields of `ignored` are left out and named.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class History:
    """The body of a request, the texts of it that must be in the prompt, and the fields that are left out."""

    body: dict[str, Any]
    texts: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(call_id: str, name: str, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


# A coding agent on the Vercel AI SDK: calls with their results, text parts, and reasoning of an earlier answer.
OPENCODE = History(
    {
        "model": None,
        "max_tokens": 32,
        "temperature": 0,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You are a coding agent that runs in a terminal."},
            {"role": "system", "content": "<env>Working directory: /home/ada/project</env>"},
            {"role": "user", "content": [{"type": "text", "text": "Why does the build fail?"}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I should look at the file first.",
                "tool_calls": [
                    call("call_a1", "read", '{"filePath":"/home/ada/project/Makefile"}'),
                    call("call_a2", "glob", '{"pattern":"**/*.c"}'),
                ],
            },
            {"role": "tool", "tool_call_id": "call_a1", "content": "<file>\n00001| all: app\n</file>"},
            {"role": "tool", "tool_call_id": "call_a2", "content": "No files found"},
            {"role": "assistant", "content": "There is no source file."},
            {"role": "user", "content": "Then write one."},
        ],
        "tools": [
            function("read", "Reads a file", filePath={"type": "string"}),
            function("glob", "Finds files", pattern={"type": "string"}),
            function("todowrite", "Keeps a list of tasks", todos={"type": "array", "items": {"type": "object"}}),
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt_cache_key": "ses_1",
        "reasoning_effort": "medium",
        "usage": {"include": True},
    },
    (
        "You are a coding agent",
        "/home/ada/project</env>",
        "Why does the build fail?",
        "/home/ada/project/Makefile",
        "**/*.c",
        "00001| all: app",
        "No files found",
        "There is no source file.",
        "Then write one.",
        "todowrite",
    ),
    ("usage", "reasoning_effort"),
)
# An agent that writes its calls as XML in the text, and repeats the whole environment with each message of the user.
CLINE = History(
    {
        "model": None,
        "messages": [
            {"role": "system", "content": "You are Cline.\n\n## read_file\n<read_file><path>...</path></read_file>"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<task>\nRename the function\n</task>"},
                    {"type": "text", "text": "<environment_details>\nmain.py\n</environment_details>"},
                ],
            },
            {
                "role": "assistant",
                "content": "<thinking>I read it.</thinking>\n<read_file>\n<path>main.py</path>\n</read_file>",
                "reasoning_details": [{"type": "reasoning.text", "text": "I read it.", "index": 0}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "[read_file for 'main.py'] Result:"},
                    {
                        "type": "text",
                        "text": "def old_name():\n    return 1",
                        "cache_control": {"type": "ephemeral"},
                    },
                ],
            },
            {"role": "assistant", "content": None},
            {"role": "user", "content": "[ERROR] You did not use a tool in your previous response!"},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": -1,
        "reasoning": {"max_tokens": 1024},
    },
    ("You are Cline.", "Rename the function", "main.py", "<read_file>", "def old_name():", "[ERROR] You did not use"),
    ("reasoning", "messages.2.reasoning_details", "messages.3.content.1.cache_control"),
)
# The SDK's own objects, dumped with all their fields, as many frameworks store them.
SDK_DUMPS = History(
    {
        "model": None,
        "max_tokens": 16,
        "messages": [
            {"role": "user", "content": "What is the weather in Paris?", "name": None},
            {
                "content": None,
                "refusal": None,
                "role": "assistant",
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [
                    {
                        "id": "call_b1",
                        "function": {
                            "arguments": '{"city": "Paris"}',
                            "name": "get_weather",
                            "parsed_arguments": {"city": "Paris"},
                        },
                        "type": "function",
                        "index": 0,
                    }
                ],
                "parsed": None,
            },
            {"role": "tool", "tool_call_id": "call_b1", "content": "rain", "name": "get_weather"},
            {"role": "assistant", "content": "It rains.", "refusal": None, "parsed": {"text": "It rains."}},
            {"role": "user", "content": "And tomorrow?"},
        ],
        "tools": [function("get_weather", "The weather in a city", city={"type": "string"})],
        "response_format": None,
        "parallel_tool_calls": None,
        "stop": None,
    },
    ("What is the weather in Paris?", '"city": "Paris"', "rain", "It rains.", "And tomorrow?"),
    ("messages.1.tool_calls.0.function.parsed_arguments", "messages.3.parsed"),
)
# A proxy for several providers, which keeps what each of them has added to a message.
LITELLM = History(
    {
        "model": None,
        "max_tokens": 16,
        "messages": [
            {"role": "user", "content": "Look it up"},
            {
                "role": "assistant",
                "content": "",
                "provider_specific_fields": {"refusal": None},
                "thinking_blocks": [{"type": "thinking", "thinking": "…"}],
                "tool_calls": [
                    call("call_c1", "search", '{"q": "x"}', extra_content={"google": {"thought_signature": "abc"}})
                ],
            },
            {"role": "tool", "tool_call_id": "call_c1", "content": [{"type": "text", "text": "found it"}]},
        ],
        "tools": [function("search", "Searches the web", q={"type": "string"}) | {"cache_control": {"type": "x"}}],
        "metadata": {"trace_id": "1"},
        "num_retries": 3,
        "drop_params": True,
    },
    ("Look it up", '"q": "x"', "found it", "Searches the web"),
    (
        "num_retries",
        "drop_params",
        "messages.1.provider_specific_fields",
        "messages.1.thinking_blocks",
        "messages.1.tool_calls.0.extra_content",
        "tools.0.cache_control",
    ),
)
# A chat page whose settings are those of Ollama.
OPEN_WEBUI = History(
    {
        "model": None,
        "stream": True,
        "messages": [
            {"role": "user", "content": "Hello", "id": "m1", "timestamp": 1, "models": ["m"]},
            {"role": "assistant", "content": "Hi!", "id": "m2", "parentId": "m1", "done": True},
            {"role": "user", "content": "Go on", "files": None},
        ],
        "num_ctx": 4096,
        "think": False,
        "keep_alive": "5m",
        "max_tokens": 16.0,
        "stop": "",
        "metadata": {"chat_id": "7"},
    },
    ("Hello", "Hi!", "Go on"),
    (
        "num_ctx",
        "think",
        "keep_alive",
        "messages.0.id",
        "messages.0.timestamp",
        "messages.0.models",
        "messages.1.id",
        "messages.1.parentId",
        "messages.1.done",
    ),
)
# A flow of boxes: the agent sends whole numbers as decimals, and an empty list where an object is meant.
N8N = History(
    {
        "model": None,
        "n": 1.0,
        "max_tokens": 12.0,
        "temperature": 0.7,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "logit_bias": [],
        "stream": False,
        "timeout": 60000,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "Add 2 and 3"},
            {"role": "assistant", "content": None, "tool_calls": [call("call_d1", "calculator", '{"input":"2+3"}')]},
            {"role": "tool", "content": "5", "tool_call_id": "call_d1", "name": "calculator"},
        ],
        "tools": [function("calculator", "Computes", input={"type": "string"})],
        "tool_choice": {"type": "auto"},
    },
    ("You are a helpful assistant", "Add 2 and 3", '"2+3"', "calculator"),
    ("timeout",),
)
# An agent whose model reached the limit of tokens inside of a call.
CUT_CALL = History(
    {
        "model": None,
        "max_tokens": 8,
        "top_p": 0,
        "timeout": 60000,
        "messages": [
            {"role": "user", "content": "Write the report"},
            {"role": "assistant", "tool_calls": [call("call_e1", "write", '{"path": "a.txt", "content')]},
            {"role": "tool", "content": "Error: arguments are not JSON", "tool_call_id": "call_e1", "name": "write"},
        ],
        "tools": [function("write", "Writes", path={"type": "string"}, content={"type": "string"})],
    },
    ("Write the report", "a.txt", "arguments are not JSON"),
    ("timeout",),
)
# A tool that takes any text, which the model of another server called. Nobody here runs such tools.
CUSTOM_CALL = History(
    {
        "model": None,
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "Run the program"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_f1", "type": "custom", "custom": {"name": "code", "input": "print(6 * 7)"}},
                    call("call_f2", "look", "{}"),
                ],
            },
            {"role": "tool", "tool_call_id": "call_f1", "content": "forty-two"},
            {"role": "tool", "tool_call_id": "call_f2", "content": [{"type": "text", "text": "nothing"}]},
        ],
        "tools": [{"type": "custom", "custom": {"name": "code"}}, function("look", "Looks")],
    },
    ("Run the program", "code", "print(6 * 7)", "forty-two", "nothing"),
    ("tools.0.custom", "tools.0"),
)
HISTORIES = {
    "opencode": OPENCODE,
    "Cline": CLINE,
    "dumps of the SDK": SDK_DUMPS,
    "LiteLLM": LITELLM,
    "Open WebUI": OPEN_WEBUI,
    "n8n": N8N,
    "a cut call": CUT_CALL,
    "a custom call": CUSTOM_CALL,
}
