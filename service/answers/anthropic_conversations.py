"""Conversations of Anthropic's API as those of POST /v1/chat/completions, and the fields of one for the other."""

import json
from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import ValidationError

from service.http.anthropic_schemas import Block, ConversationRequest, InputMessage, MessagesRequest, ResultBlock
from service.http.bodies import shape_error
from service.http.encoding import open_json
from service.http.errors import invalid
from service.http.generate_schemas import GenerationRequest
from service.http.openai_schemas import ChatRequest, JsonObject

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
}


class ChatConversion:
    """The chat that a request means. Raises 400 for a block that the model cannot read, such as an image.

    `left_out` are the places of blocks and fields that the chat does not have.
    """

    def __init__(self, body: ConversationRequest) -> None:
        self.left_out: list[str] = []
        self._places: list[str] = []  # of each message of the chat in the request
        messages: list[JsonObject] = []
        entries = ((f"messages.{index}", message) for index, message in enumerate(body.messages))
        if body.system:
            messages.append({"role": "system", "content": text_of(body.system, "system")})
            self._places.append("system")
        for place, message in entries:
            found = list(self._convert(message, place))
            messages += found
            self._places += [place] * len(found)
        fields: dict[str, Any] = {"messages": messages, **self._settings(body)}
        if isinstance(body, MessagesRequest):
            sent = body.model_fields_set & GenerationRequest.model_fields.keys()
            fields |= {name: getattr(body, name) for name in sent}
            fields |= {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs}
            fields["stop"] = [*([body.stop] if isinstance(body.stop, str) else body.stop), *body.stop_sequences]
        try:
            self.chat = ChatRequest.model_validate(fields)
        except ValidationError as error:  # too many results of tools, for example
            raise shape_error(error, ChatRequest) from None

    def name(self, field: str) -> str:
        """The name that a field of the chat, or its place, has in the request."""
        first, _, rest = field.partition(".")
        if first == "messages" and rest:
            index, _, inner = rest.partition(".")
            return self._places[int(index)] if not inner else f"{self._places[int(index)]}.{inner}"
        return f"{NAMES[first]}{'.' if rest else ''}{rest}" if first in NAMES else field

    def _settings(self, body: ConversationRequest) -> dict[str, Any]:
        """The fields of the chat besides its messages."""
        fields: dict[str, Any] = {
            "model": body.model,
            "adapter": body.adapter,
            "chat_template_kwargs": body.chat_template_kwargs,
            "continue_final_message": is_prefilled(body.messages[-1]),
            "tools": [self._tool(body, index) for index in range(len(body.tools))],
        }
        if (choice := body.tool_choice) is not None:
            fields["tool_choice"] = {"type": "tool", "name": choice.name} if choice.type == "tool" else choice.type
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if body.thinking is not None:
            fields["enable_thinking"] = body.thinking.type != "disabled"
            self.left_out += ["thinking.budget_tokens"] if body.thinking.budget_tokens is not None else []
        output_format = body.output_format
        if (config := body.output_config) is not None:
            fields["reasoning_effort"] = config.effort
            output_format = config.format or output_format
        if output_format is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": output_format.schema_}}
        return fields

    def _tool(self, body: ConversationRequest, index: int) -> JsonObject:
        tool = body.tools[index]
        if tool.type not in (None, "custom"):
            return {"type": tool.type}  # a chat leaves it out
        function: JsonObject = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
        return {"function": function | ({} if tool.description is None else {"description": tool.description})}

    def _convert(self, message: InputMessage, place: str) -> Iterator[JsonObject]:
        """The messages of the chat: results of tools are messages of their own."""
        if isinstance(message.content, str) or not message.content:
            yield {"role": message.role, "content": message.content or ""}
            return
        texts: list[JsonObject] = []
        calls: list[JsonObject] = []
        thinking: list[str] = []
        for index, block in enumerate(message.content):
            where = f"{place}.content.{index}"
            if block.type == "tool_result" and message.role == "user":
                if texts:
                    yield {"role": "user", "content": texts}
                    texts = []
                result = text_of(block.content, f"{where}.content")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
            elif block.type == "tool_use" and message.role == "assistant":
                calls.append(call_of(block, where))
            elif block.type == "thinking":
                thinking.append(block.thinking or "")
            elif block.type == "redacted_thinking":
                self.left_out.append(where)
            else:
                texts.append({"type": "text", "text": read_text(block, where)})
        if texts or calls or thinking:
            content = texts[0]["text"] if len(texts) == 1 else texts
            found = {"role": message.role, "content": content or None, "tool_calls": calls or None}
            yield found | {"reasoning_content": "".join(thinking) or None}


def is_prefilled(message: InputMessage) -> bool:
    """Whether the answer continues this message, the last one."""
    blocks = message.content
    is_text = isinstance(blocks, str) or (bool(blocks) and all(block.type == "text" for block in blocks))
    return message.role == "assistant" and is_text


def call_of(block: Block, where: str) -> JsonObject:
    if block.name is None:
        raise invalid(where, "has no name; send the name of the function that was called")
    return {"id": block.id, "function": {"name": block.name, "arguments": block.input}}


def text_of(content: str | list[ResultBlock], where: str) -> str:
    """The text of some content. Raises 400 for a block that has none, such as an image."""
    if isinstance(content, str):
        return content
    return "\n\n".join(read_text(block, f"{where}.{index}") for index, block in enumerate(content))


def read_text(block: ResultBlock, where: str) -> str:
    """The text of a block. Raises 400 if it has none."""
    if block.type != "text":
        raise invalid(where, f"is {block.type[:40]!r}; this model reads only blocks of the type 'text'")
    if block.text is None:
        raise invalid(where, "has no text; send the field text")
    return block.text


def input_of(arguments: str) -> Any:
    """The arguments of a call as the JSON of an object."""
    try:
        found = json.loads(arguments or "{}")
        content = open_json(found if isinstance(found, dict) else {"invalid_json": arguments})
    except (ValueError, RecursionError):
        content = open_json({"invalid_json": arguments})
    return orjson.Fragment(content)
