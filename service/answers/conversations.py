"""Conversations of POST /v1/chat/completions: convert messages for the chat template, and to token ids."""

import json
from collections.abc import Sequence
from typing import Any

from model.checkpoints.load import Checkpoint
from model.errors import InvalidField
from model.text.chat_template import ChatTemplate
from model.text.roles import standard_role
from service.answers.call import ModelCall
from service.answers.call_forms import SYSTEM_TOOLS
from service.answers.call_ids import demands_short_ids, with_short_ids
from service.answers.json_calls import refuse_constant
from service.answers.offered_tools import OfferedTools
from service.answers.prompts import tokenize
from service.answers.tools_as_text import in_system_message, without_tools
from service.http.bodies import check_values, max_values
from service.http.errors import invalid
from service.http.openai_schemas import ChatRequest, JsonObject, Message, check_implemented

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
# Reasoning of earlier answers, which chat templates do not show again, as parts of other APIs.
REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


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
    body: ChatRequest, tools: OfferedTools, call: ModelCall, template: ChatTemplate
) -> list[int]:
    """The token ids of a conversation. Raises 400 for fields that the chat template refuses.

    The messages are read, rendered and tokenized outside of the event loop. Their size is that of the request.
    """
    variables, unused = read_variables(body, template)
    reason = "the chat template of this model does not use it, so it would have no effect; leave it out"
    call.leave_out(unused, lambda name: invalid(name, reason, "unknown_variable"))
    begins_message = body.add_generation_prompt
    if begins_message is None:
        begins_message = not body.continue_final_message
    elif begins_message and body.continue_final_message:
        raise invalid("add_generation_prompt", "must be false with continue_final_message, which continues a message")

    def encode() -> list[int]:
        check_arguments(body.messages, max_values(call.state.settings.max_body_bytes))
        ignored: list[str] = []
        messages = [read_message(message, index, ignored) for index, message in enumerate(body.messages)]
        call.notes.ignored_fields += ignored
        definitions = tools.definitions
        if not template.uses("tools"):
            if template.uses("xml_tools"):  # of SmolLM3
                variables["xml_tools"], definitions = definitions, []
            has_place = SYSTEM_TOOLS in template.source_for(with_tools=False)  # of Phi-4-mini
            messages = without_tools(messages, [] if has_place else definitions)
            if has_place and definitions:
                messages = in_system_message(messages, definitions)
            definitions = []
        elif demands_short_ids(template.source_for(with_tools=bool(definitions))):
            messages = with_short_ids(messages)

        def encode_messages() -> list[int]:
            return template.encode(
                template.adapted(messages, with_tools=bool(definitions)),
                tools=definitions or None,
                documents=body.documents,
                add_generation_prompt=begins_message,
                continue_final_message=body.continue_final_message,
                variables=variables,
                allow_special_tokens=body.allow_special_tokens,
                max_tokens=call.checkpoint.model.config.max_positions,
            )

        try:
            return encode_messages()
        except InvalidField:
            effort = variables.pop("reasoning_effort", None)  # templates refuse values that they do not know
            if effort is not None and body.reasoning_effort is not None:
                call.notes.ignored_fields.append("reasoning_effort")
            elif not replace_broken_arguments(messages):
                raise
            return encode_messages()

    return await tokenize(call, encode, call.reservation.num_bytes, "messages")


def read_message(message: Message, index: int, ignored: list[str]) -> dict[str, Any]:
    """A message for chat templates: with the arguments of calls as objects.

    The places of parts that are left out are added to `ignored`.
    """
    where = f"messages.{index}."
    check_implemented(message, where)
    result: dict[str, Any] = {"role": standard_role(message.role)}
    result["content"] = read_content(message, where, ignored)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.function_call is not None and message.tool_calls:
        raise invalid(f"{where}function_call", "cannot be combined with tool_calls; send only one of them")
    if message.calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": read_arguments(call.function.arguments),
                },
            }
            for call in message.calls
        ]
    return result


def read_content(message: Message, where: str, ignored: list[str]) -> str | list[JsonObject]:
    """The text of a message, or its text parts. Raises 400 for a part that is no text, such as an image.

    An answer or the result of a tool may have no content. The places of parts with reasoning are added to `ignored`.
    """
    content = message.content
    if content is None:
        if message.role in ("system", "developer", "user"):
            raise invalid(f"{where}content", "is missing; send a text")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts: list[JsonObject] = []
    for place, part in enumerate(content):
        if part.type in REASONING_PARTS:
            ignored.append(f"{where}content.{place}")
            continue
        text = part.refusal if part.text is None else part.text
        if part.type not in TEXT_PARTS:
            reason = "has no type" if part.type is None else f"is {part.type!r}"
            raise invalid(f"{where}content.{place}", f"{reason[:100]}; this model reads only parts of type 'text'")
        texts.append({"type": "text", "text": text or ""})
    return texts


def check_arguments(messages: Sequence[Message], limit: int) -> None:
    """Raise 413 for more than `limit` values in the arguments of all calls together, and 400 for too deep ones."""
    num_values = 0
    for message in messages:
        for call in message.calls:
            if isinstance(call.function.arguments, str):
                num_values = check_values(call.function.arguments.encode(), limit, "messages", num_values)


def read_arguments(text: str | JsonObject) -> Any:
    """The arguments of a call in an earlier message, as an object.

    A text that is not JSON stays as it is: a model wrote it, and the conversation with its correction goes on.
    """
    if not isinstance(text, str):
        return text
    try:
        arguments = json.loads(text, parse_constant=refuse_constant) if text.strip() else {}
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        return text
    return arguments


def replace_broken_arguments(messages: Sequence[dict[str, Any]]) -> bool:
    """Make objects of arguments that are none, for a template that cannot write them. Returns whether there were any.

    A model wrote them, and the conversation goes on with the error that its program has reported.
    """
    is_changed = False
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, dict):
                call["function"]["arguments"] = {"invalid_json": arguments}
                is_changed = True
    return is_changed


def read_variables(body: ChatRequest, template: ChatTemplate) -> tuple[JsonObject, list[str]]:
    """The variables for the chat template, and the fields that it does not use: clients send them for any model.

    Raises 400 for documents that the template does not use, because they are content.
    """
    variables = dict(body.chat_template_kwargs)
    # For a template, a variable without a value is false.
    unused = [f"chat_template_kwargs.{name}" for name in variables if not template.uses(name) and variables[name]]
    if body.documents is not None and not template.uses("documents"):
        raise invalid("documents", "the chat template of this model does not use documents", "unknown_variable")
    if body.enable_thinking is not None:
        is_used = set_thinking(variables, template, body.enable_thinking)
        unused += ["enable_thinking"] if body.enable_thinking and not is_used else []
    effort = body.reasoning_effort
    if effort == "none" and set_thinking(variables, template, False):
        return variables, unused
    if effort is not None and template.uses("reasoning_effort"):
        variables["reasoning_effort"] = effort
    elif effort not in (None, "none") and not set_thinking(variables, template, True):
        unused.append("reasoning_effort")
    return variables, unused


def set_thinking(variables: JsonObject, template: ChatTemplate, value: bool) -> bool:
    """Switch the thinking on or off, unless the variables do already. Returns whether the template has a switch."""
    for name in ("enable_thinking", "thinking"):
        if template.uses(name):
            variables.setdefault(name, value)
            return True
    return False
