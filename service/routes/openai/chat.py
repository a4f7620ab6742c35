"""POST /v1/chat/completions: answer a conversation, in the form of OpenAI's API."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Response

from forwardscope.results.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprob,
    ChatLogprobs,
    CompletionUsage,
    FunctionCall,
    FunctionCallDelta,
    Message,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from model.text.transcript import TokenOutput
from service.answers.call import CallDep, model_call
from service.answers.chat_pieces import CallArguments, CallBegin, Content, Piece, Reasoning, join_pieces, text_of
from service.answers.chat_stream import ChatEnd, ChatOutput, ChatStream
from service.answers.chats import start_chat
from service.answers.generation import ChoiceOutput
from service.answers.openai_answers import ChunkTemplate, OpenAIWriter, usage, with_top
from service.http.bodies import JsonRoute
from service.http.openai_schemas import ChatRequest
from service.http.openapi import EVENT, also
from service.http.sse import EventStream

router = APIRouter(route_class=JsonRoute, tags=["openai"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation, in OpenAI's form",
    response_model=ChatCompletion | ChatCompletionChunk,
    responses=also("text/event-stream", EVENT),
)
async def chat(body: ChatRequest, route: CallDep) -> Response:
    stream = await start_chat(body, model_call(body, route), id_prefix="chatcmpl-")
    generation, writer = stream.generation, Writer(body, stream)
    if body.stream:
        events = generation.events(stream.writing(writer.chunks), writer.last_chunks)
        return EventStream(events, on_close=generation.close)
    return await generation.respond(writer.answer)


class Writer(OpenAIWriter):
    """Writes the answer of a chat, whole or as the chunks of a stream."""

    def __init__(self, body: ChatRequest, stream: ChatStream) -> None:
        super().__init__(body, stream.generation, ChatCompletionChunk)
        self._body = body
        self._stream = stream
        has_plain_chunks = body.stream and not (body.logprobs or body.return_token_ids or self._has_running_usage)
        indices = range(body.n if has_plain_chunks else 0)
        self._templates = [ChunkTemplate(partial(self._text_chunk, index)) for index in indices]

    def answer(self, choices: list[ChoiceOutput]) -> ChatCompletion:
        outputs = [self._stream.read(choice) for choice in choices]
        return ChatCompletion(
            **self._head,
            choices=[self._choice(output) for output in outputs],
            usage=self._usage(),
            prompt_token_ids=self._prompt_ids(0),
            prompt_logprobs=self._prompt_logprobs(outputs[0].prompt_tokens),
        )

    def _choice(self, output: ChatOutput) -> ChatChoice:
        assert output.end is not None
        calls = [
            ToolCall(id=first.id, function=FunctionCall(first.name, text))
            for first, text in join_pieces(output.pieces)
            if isinstance(first, CallBegin)
        ]
        content = text_of(output.pieces, Content)
        message = Message(
            content=content or None if calls else content,
            refusal=None,
            reasoning_content=text_of(output.pieces, Reasoning) or None,
            tool_calls=() if self._body.functions else calls,
            function_call=calls[0].function if self._body.functions and calls else None,
        )
        return ChatChoice(message=message, finish_reason=self._finish_reason(output.end), **self._fields(output))

    def chunks(self, output: ChatOutput) -> Iterator[bytes]:
        """Write the chunks for the output of one step. The first chunk of each choice has the role."""
        index = output.index
        if not self._has_begun[index]:
            self._has_begun[index] = True
            yield self._text_chunk(index, "", role="assistant", prompt_token_ids=self._prompt_ids(index))
        has_more = output.end is not None or output.traces is not None or bool(output.prompt_tokens)
        if self._templates and not has_more and len(output.pieces) == 1:
            piece = output.pieces[0]
            if isinstance(piece, Content):
                yield self._templates[index].fill(piece.text)
                return
        describes_tokens = self._body.logprobs or self._body.return_token_ids  # also those without text
        if output.pieces or has_more or (output.tokens and describes_tokens):
            part = ChatChunkChoice(
                delta=delta_of(output.pieces, has_one_call=bool(self._body.functions)),
                finish_reason=None if output.end is None else self._finish_reason(output.end),
                **self._fields(output),
            )
            prompt_tokens = output.prompt_tokens if index == 0 else ()  # they are the same for all choices
            yield self._chunk(part, prompt_logprobs=self._prompt_logprobs(prompt_tokens))

    def _text_chunk(self, index: int, text: str, role: Literal["assistant"] | None = None, **fields: Any) -> bytes:
        """Write a chunk that has nothing but a text of one choice."""
        delta = MessageDelta(role=role, content=text)
        part = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None, stop_reason=None)
        return self._chunk(part, **fields)

    def _usage(self) -> CompletionUsage:
        return usage(self._generation, self._stream.num_reasoning)

    def _finish_reason(self, end: ChatEnd) -> ChatFinishReason:
        return "function_call" if end.finish_reason == "tool_calls" and self._body.functions else end.finish_reason

    def _fields(self, output: ChatOutput) -> dict[str, Any]:
        """The fields that whole choices and new parts of them have in common."""
        has_logprobs, end = self._body.logprobs, output.end
        return {
            "index": output.index,
            "logprobs": ChatLogprobs([*map(self._logprob, output.tokens)], None) if has_logprobs else None,
            "stop_reason": None if end is None else end.stop_reason,
            "token_ids": [token.token_id for token in output.tokens] if self._body.return_token_ids else None,
            "trace": output.traces,
            "edits": () if end is None else self._generation.edit_answers(output.index),
        }

    def _prompt_ids(self, index: int) -> Sequence[int] | None:
        """The ids of the prompt, if the request asks for them. They are the same for all choices."""
        return self._generation.prompts[0] if self._body.return_token_ids and index == 0 else None

    def _logprob(self, token: TokenOutput) -> ChatLogprob:
        return with_top(token, self._token, TopLogprob, ChatLogprob)

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        raw = self._strings.raw(token_id)
        return self._strings.text(token_id), logprob, None if raw is None else list(raw)


def delta_of(pieces: Iterable[Piece], *, has_one_call: bool = False) -> MessageDelta:
    """The change of a message by some pieces. With `has_one_call`, its call is a `function_call`."""
    calls = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            begin = FunctionCallDelta(name=piece.name, arguments="")
            calls.append(ToolCallDelta(index=piece.index, id=piece.id, type="function", function=begin))
        elif isinstance(piece, CallArguments):
            calls.append(ToolCallDelta(index=piece.index, function=FunctionCallDelta(arguments=piece.text)))
    function: FunctionCallDelta | None = None
    if has_one_call and calls:
        arguments = "".join(call.function.arguments for call in calls)
        function, calls = FunctionCallDelta(name=calls[0].function.name, arguments=arguments), []
    return MessageDelta(
        content=text_of(pieces, Content) or None,
        reasoning_content=text_of(pieces, Reasoning) or None,
        tool_calls=calls,
        function_call=function,
    )
