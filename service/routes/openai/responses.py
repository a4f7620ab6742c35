"""POST /v1/responses: answer a conversation, in the form of OpenAI's Responses API."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request, Response

from forwardscope.results.responses import ModelResponse, OutputItem, ResponseStreamEvent
from service.answers.call import model_call
from service.answers.chat_stream import ChatStream
from service.answers.chats import start_chat
from service.answers.response_input import Conversation, as_input, chat_request, placed_items, read_conversation
from service.answers.response_writer import ResponseWriter, request_settings
from service.http.bodies import INLINE_BYTES, JsonRoute
from service.http.encoding import to_json
from service.http.errors import no_effect
from service.http.openai_schemas import ChatRequest
from service.http.openapi import RESPONSE_EVENT, also
from service.http.responses_schemas import LOGPROBS, InputItem, ResponsesRequest
from service.http.sse import EventStream
from service.state import StateDep
from service.stored_responses import ResponseStore, StoredResponse

router = APIRouter(route_class=JsonRoute, tags=["openai"])
NUM_ECHOES = 2  # of the settings of a request in the first events of a stream


@router.post(
    "/v1/responses",
    summary="Answer a conversation, in the form of OpenAI's Responses API",
    response_model=ModelResponse | ResponseStreamEvent,
    responses=also("text/event-stream", RESPONSE_EVENT),
)
async def responses(body: ResponsesRequest, request: Request, state: StateDep) -> Response:
    call = model_call(body, request, state)
    reservation = call.reservation
    body_bytes = reservation.num_bytes
    items, stored_bytes = placed_items(body, state.responses, state.settings.max_body_bytes - body_bytes)
    reservation.reserve(stored_bytes)

    def read() -> tuple[Conversation, ChatRequest, dict[str, bytes]]:
        conversation = read_conversation(items, body.instructions)
        return conversation, chat_request(body, conversation), request_settings(body)

    is_small = reservation.num_bytes <= INLINE_BYTES
    conversation, chat, settings = read() if is_small else await state.worker.executors.run("bodies", read)
    call.leave_out(parts_without_effect(body, conversation), no_effect)
    with call.renamed(conversation.rename):
        stream = await start_chat(chat, call, id_prefix="resp_")
    keep = None
    if body.store and state.responses.is_on:
        before = [item for _, item in items]
        keep = partial(store_response, state.responses, stream.generation.id, before, body_bytes + stored_bytes)
    writer = ResponseWriter(body, stream, settings, keep)
    if body.stream:
        reservation.count(NUM_ECHOES * sum(map(len, settings.values())))
        return EventStream(events(stream, writer), on_close=stream.generation.close)
    return await stream.generation.respond_with(whole_response(stream, writer))


def parts_without_effect(body: ResponsesRequest, conversation: Conversation) -> list[str]:
    """The places of the parts of a request that are left out."""
    left_out = [f"include.{index}" for index, name in enumerate(body.include) if name != LOGPROBS]
    left_out += ["truncation"] if body.truncation == "auto" else []
    return left_out + conversation.left_out


async def events(stream: ChatStream, writer: ResponseWriter) -> AsyncGenerator[bytes]:
    """The events of a stream. The first ones are sent before the model has written anything."""
    yield writer.begin()
    async with aclosing(stream.events(writer.events, writer.last_events, writer.failure, done=b"")) as later:
        async for frame in later:
            yield frame


async def whole_response(stream: ChatStream, writer: ResponseWriter) -> bytes:
    """Wait for the whole response, and encode it."""
    (choice,) = await stream.generation.collect()
    content = await stream.generation.encode(lambda: writer.answer(choice))
    writer.keep(content)
    return content


def store_response(
    store: ResponseStore,
    response_id: str,
    before: Sequence[InputItem],
    bytes_before: int,
    answer: bytes,
    output: Sequence[OutputItem],
) -> None:
    """Keep a response, with the items before it."""
    found = {item.id: (as_input(item), len(to_json(item))) for item in output}
    items = [*before, *(item for item, _ in found.values())]
    store.add(StoredResponse(response_id, answer, items, found, bytes_before + len(answer)))
