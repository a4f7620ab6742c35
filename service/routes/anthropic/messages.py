"""POST /v1/messages and POST /v1/messages/count_tokens: answer a conversation, in the form of Anthropic's API."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.local_results import describe_logprobs
from forwardscope.results.anthropic import (
    AssistantMessage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageBlock,
    MessageDelta,
    MessageEnd,
    MessagesError,
    MessageStart,
    MessageStop,
    MessageStopReason,
    MessageTokensCount,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from forwardscope.results.generations import TokenLogprob
from service.answers.anthropic_conversations import ChatConversion, input_of
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.chat_pieces import CallArguments, CallBegin, Content, Piece, Reasoning, block_key, join_pieces
from service.answers.chat_stream import ChatEnd, ChatOutput, ChatStream
from service.answers.chats import BYTES_PER_CHECK, count_prompt, start_chat
from service.answers.generation import ChoiceOutput
from service.answers.openai_answers import ChunkTemplate
from service.http.anthropic_schemas import ConversationRequest, CountTokensRequest, MessagesRequest
from service.http.bodies import JsonRoute
from service.http.encoding import json_response
from service.http.errors import anthropic_error
from service.http.openapi import MESSAGE_EVENT, also, error_answers
from service.http.sse import EventStream, event, event_of

router = APIRouter(route_class=JsonRoute, tags=["anthropic"])
SIGNATURE = "unsigned"


@router.post(
    "/v1/messages",
    summary="Answer a conversation, in Anthropic's form",
    response_model=AssistantMessage,
    responses=also("text/event-stream", MESSAGE_EVENT, MessagesError),
)
async def messages(body: MessagesRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    conversion = await convert(body, call)
    with call.renamed(conversion.name):
        stream = await start_chat(conversion.chat, call, id_prefix="msg_")
    generation, writer = stream.generation, Writer(stream)
    if body.stream:
        events = generation.events(stream.writing(writer.events), write_error=write_error, done=b"")
        return EventStream(events, on_close=generation.close, keep_alive=event_of(Ping()))
    return await generation.respond(writer.answer)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation, in Anthropic's form",
    response_model=MessageTokensCount,
    responses=error_answers(model=MessagesError),
)
async def count_tokens(body: CountTokensRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    conversion = await convert(body, call)
    with call.renamed(conversion.name):
        return json_response(MessageTokensCount(await count_prompt(conversion.chat, call)))


async def convert(body: ConversationRequest, call: ModelCall) -> ChatConversion:
    """Convert a request to a chat; a large one outside of the event loop."""
    num_checks = call.reservation.num_bytes // BYTES_PER_CHECK
    conversion = await call.run_here_or_on_thread(num_checks, lambda: ChatConversion(body))
    call.notes.ignored_fields += conversion.left_out
    return conversion


class Writer:
    """Writes the answer of a chat, whole or as the events of a stream."""

    def __init__(self, stream: ChatStream) -> None:
        self._stream = stream
        self._generation = stream.generation
        self._has_begun = False
        self._num_blocks = 0  # that have begun
        self._block: MessageBlock | None = None  # the open one
        self._key: object = None  # of the open block
        self._text_delta = ChunkTemplate(lambda text: b"")  # of the open block

    def answer(self, choices: list[ChoiceOutput]) -> AssistantMessage:
        (choice,) = choices
        output = self._stream.read(choice)
        assert output.end is not None
        return self._message(
            content=[block_of(*block, SIGNATURE) for block in join_pieces(output.pieces)],
            **end_fields(output.end),
            logprobs=self._logprobs(output),
            trace=output.traces,
            edits=self._generation.edit_answers(0),
        )

    def _message(self, **fields: Any) -> AssistantMessage:
        return AssistantMessage(
            id=self._generation.id, model=self._generation.model_name, usage=self._usage(), **fields
        )

    def _usage(self) -> MessageUsage:
        generation = self._generation
        return MessageUsage(
            input_tokens=generation.num_prompt - generation.num_cached,
            cache_read_input_tokens=generation.num_cached,
            output_tokens=generation.num_generated,
            output_tokens_details=OutputTokensDetails(self._stream.num_reasoning),
        )

    def events(self, output: ChatOutput) -> Iterator[bytes]:
        """Write the events for the output of one step. Our own fields are in a ping, which clients skip."""
        if not self._has_begun:
            self._has_begun = True
            yield event_of(MessageStart(message=self._message(content=(), stop_reason=None, stop_sequence=None)))
        logprobs = self._logprobs(output) or None
        if logprobs or output.traces:
            (trace,) = output.traces or (None,)
            yield event_of(Ping(logprobs=logprobs, trace=trace))
        for piece in output.pieces:
            yield from self._piece_events(piece)
        if output.end is not None:
            yield from self._end_block()
            end = MessageEnd(**end_fields(output.end))
            yield event_of(MessageDelta(delta=end, usage=self._usage(), edits=self._generation.edit_answers(0)))
            yield event_of(MessageStop())

    def _logprobs(self, output: ChatOutput) -> Sequence[TokenLogprob] | None:
        """The log-probabilities of the tokens, if the request asks for them."""
        if self._generation.params.logprobs is None:
            return None
        return [describe_logprobs(token, self._generation.text_of) for token in output.tokens]

    def _piece_events(self, piece: Piece) -> Iterator[bytes]:
        if block_key(piece) != self._key:
            yield from self._end_block()
            self._key, self._block = block_key(piece), block_of(piece)
            yield event_of(ContentBlockStart(index=self._num_blocks, content_block=self._block))
            self._num_blocks += 1
            self._text_delta = ChunkTemplate(lambda text: self._delta(TextDelta(text=text)))
        if isinstance(piece, Content):
            yield self._text_delta.fill(piece.text)
        elif isinstance(piece, Reasoning):
            yield self._delta(ThinkingDelta(thinking=piece.text))
        elif isinstance(piece, CallArguments):
            yield self._delta(InputJsonDelta(partial_json=piece.text))

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> bytes:
        return event_of(ContentBlockDelta(index=self._num_blocks - 1, delta=delta))

    def _end_block(self) -> Iterator[bytes]:
        if isinstance(self._block, ThinkingBlock):
            yield self._delta(SignatureDelta(signature=SIGNATURE))
        if self._block is not None:
            yield event_of(ContentBlockStop(index=self._num_blocks - 1))


def write_error(content: dict[str, Any]) -> bytes:
    return event(anthropic_error(content), kind="error")


def block_of(first: Piece, text: str = "", signature: str = "") -> MessageBlock:
    """The block that begins with a piece, with its whole text; by default without content."""
    if isinstance(first, CallBegin):
        return ToolUseBlock(id=first.id, name=first.name, input=input_of(text))
    return ThinkingBlock(thinking=text, signature=signature) if isinstance(first, Reasoning) else TextBlock(text=text)


def end_fields(end: ChatEnd) -> dict[str, Any]:
    """The reason of the end, and the stop string that was found."""
    reasons: dict[str, MessageStopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": reasons[end.finish_reason], "stop_sequence": None}
