"""Conversations of POST /v1/chat/completions: convert messages for the chat template, and to token ids."""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from model.checkpoints.load import Checkpoint
from model.errors import InvalidField
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import TooManyTokens
from service.answers.openai_answers import check_implemented
from service.answers.prompts import check_prompt_ids, too_long
from service.answers.tool_calls import refuse_constant, without_tools
from service.http.disconnects import unless_disconnected
from service.http.errors import invalid
from service.http.json_values import check_values, max_values
from service.http.openai_schemas import ChatRequest, JsonObject, Message
from service.state import State, get_reservation
from service.worker import SHORT_TEXT


def find_template(checkpoint: Checkpoint) -> ChatTemplate:
    """The chat template of the model. Raises 400 if it has none."""
    if checkpoint.tokenizer is None:
        raise invalid("messages", "this checkpoint has no tokenizer.json, so it cannot chat", "no_tokenizer")
    if checkpoint.chat_template is None:
        reason = (
            f"the model {checkpoint.name!r} has no chat template; start the server with --chat-template FILE, or use "
            "POST /v1/completions"
        )
        raise invalid("messages", reason, "no_chat_template")
    return checkpoint.chat_template


async def conversation_ids(
    body: ChatRequest, request: Request, state: State, checkpoint: Checkpoint, template: ChatTemplate
) -> list[int]:
    """The token ids of a conversation. Raises 400 for fields that the chat template refuses or does not use.

    The messages are read, rendered and tokenized outside of the event loop. Their size is that of the request.
    """
    variables = read_variables(body, template)
    begins_message = body.add_generation_prompt
    if begins_message is None:
        begins_message = not body.continue_final_message
    elif begins_message and body.continue_final_message:
        raise invalid("add_generation_prompt", "must be false with continue_final_message, which continues a message")

    def encode() -> list[int]:
        check_arguments(body.messages, max_values(state.settings.max_body_bytes))
        messages = [read_message(message, index) for index, message in enumerate(body.messages)]
        tools = offered_tools(body)
        if not template.uses("tools"):
            messages, tools = without_tools(messages, tools), []
        return template.encode(
            messages,
            tools=tools or None,
            documents=body.documents,
            add_generation_prompt=begins_message,
            continue_final_message=body.continue_final_message,
            variables=variables,
            allow_special_tokens=body.allow_special_tokens,
            max_tokens=checkpoint.model.config.max_positions,
        )

    num_bytes = get_reservation(request).num_bytes
    state.worker.check_room(0)  # refuse before the work of tokenizing, not after it
    job = state.worker.run_text(encode, num_bytes)
    try:
        ids = await (job if num_bytes <= SHORT_TEXT else unless_disconnected(request, job))
    except InvalidField as error:
        raise invalid(error.field, error.reason) from None
    except TooManyTokens as error:
        raise too_long("messages", f"at least {error.num_tokens}", checkpoint.model.config.max_positions) from None
    check_prompt_ids(ids, checkpoint, "messages")
    return ids


def offered_tools(body: ChatRequest) -> list[JsonObject]:
    """The functions that the model may call, with the fields that the client has sent."""
    return [] if body.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in body.tools]


def read_message(message: Message, index: int) -> dict[str, Any]:
    """A message for chat templates: with its text parts joined, and with the arguments of calls as objects."""
    where = f"messages.{index}."
    check_implemented(message, where)
    result: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(message.role, message.role)}
    result["content"] = read_content(message, where)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": read_arguments(call.function.arguments, f"{where}tool_calls.{place}"),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return result


def read_content(message: Message, where: str) -> str:
    """The text of a message. Raises 400 for a part that is no text, such as an image."""
    content = message.content
    if content is None:
        if not message.tool_calls and message.refusal is None:
            raise invalid(f"{where}content", "is missing; send a text")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        kind, text = part.get("type"), part.get("text", part.get("refusal"))
        if kind not in ("text", "refusal") or not isinstance(text, str):
            reason = f"is {kind!r}" if isinstance(kind, str) and kind != "text" else "is no text part"
            raise invalid(f"{where}content.{place}", f"{reason[:100]}; this model reads only parts of type 'text'")
        texts.append(text)
    return "\n".join(texts)


def check_arguments(messages: Sequence[Message], limit: int) -> None:
    """Raise 413 for more than `limit` values in the arguments of all calls together, and 400 for too deep ones.

    A text that is no JSON can hide values of later texts, but the texts are parsed in their order, and it ends them.
    """
    texts = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    check_values(",".join(texts).encode(), limit, "messages")


def read_arguments(text: str, where: str) -> Any:
    """The arguments of a call in an earlier message, as an object."""
    try:
        arguments = json.loads(text, parse_constant=refuse_constant) if text.strip() else {}
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        raise invalid(where, "function.arguments is not valid JSON") from None
    return arguments


def read_variables(body: ChatRequest, template: ChatTemplate) -> JsonObject:
    """The variables for the chat template. Raises 400 for a variable that the template does not use."""
    variables = dict(body.chat_template_kwargs)
    for name, value in variables.items():
        if not template.uses(name) and value is not False:  # for a template, a variable without a value is false
            reason = f"the chat template of this model does not use {name[:100]!r}, so it would have no effect"
            raise invalid("chat_template_kwargs", reason, "unknown_variable")
    if body.documents is not None and not template.uses("documents"):
        raise invalid("documents", "the chat template of this model does not use documents", "unknown_variable")
    if body.reasoning_effort is not None:
        if not template.uses("reasoning_effort") and body.reasoning_effort != "none":
            reason = "the chat template of this model does not use it, so it would have no effect"
            raise invalid("reasoning_effort", reason, "not_implemented")
        variables["reasoning_effort"] = body.reasoning_effort
    return variables
