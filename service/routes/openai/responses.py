"""POST /v1/responses and POST /v1/responses/input_tokens: a conversation, in the form of OpenAI's Responses API."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Response

from forwardscope.results.responses import InputTokensCount, ModelResponse, OutputItem, ResponseStreamEvent
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.chat_stream import ChatStream
from service.answers.chats import BYTES_PER_CHECK, count_prompt, start_chat
from service.answers.response_input import Conversation, as_input, chat_request, placed_items, read_conversation
from service.answers.response_writer import ResponseWriter, request_settings
from service.http.bodies import JsonRoute
from service.http.encoding import json_response, to_json
from service.http.errors import no_effect
from service.http.openai_schemas import ChatRequest
from service.http.openapi import RESPONSE_EVENT, also
from service.http.responses_schemas import LOGPROBS, InputItem, ResponsesRequest
from service.http.sse import EventStream
from service.stored_responses import ResponseStore, StoredResponse

router = APIRouter(route_class=JsonRoute, tags=["openai"])
NUM_ECHOES = 2  # of the settings of a request in the first events of a stream


@router.post(
    "/v1/responses",
    summary="Answer a conversation, in the form of OpenAI's Responses API",
    response_model=ModelResponse | ResponseStreamEvent,
    responses=also("text/event-stream", RESPONSE_EVENT),
)
async def responses(body: ResponsesRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    read = await read_input(body, call)
    with call.renamed(read.conversation.rename):
        stream = await start_chat(read.chat, call, id_prefix="resp_")
    keep = None
    if body.store and (store := call.state.responses).is_on:
        keep = partial(store_response, store, stream.generation.id, read.items, read.num_bytes)
    writer = ResponseWriter(body, stream, read.settings, keep)
    if body.stream:
        call.reservation.count(NUM_ECHOES * sum(map(len, read.settings.values())))
        write = stream.writing(writer.events, by_token=writer.has_logprobs)
        events = stream.generation.events(write, writer.last_events, writer.failure, first=writer.begin(), done=b"")
        return EventStream(events, on_close=stream.generation.close)
    return await stream.generation.respond_with(whole_response(stream, writer))


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of the prompt of a response",
    response_model=InputTokensCount,
)
async def count_input_tokens(body: ResponsesRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    read = await read_input(body, call)
    with call.renamed(read.conversation.rename):
        return json_response(InputTokensCount(input_tokens=await count_prompt(read.chat, call)))


@dataclass(frozen=True)
class ReadInput:
    """The conversation of a request with the stored items before it, which have `num_bytes` together."""

    items: list[InputItem]
    num_bytes: int
    conversation: Conversation
    chat: ChatRequest
    settings: dict[str, bytes]


async def read_input(body: ResponsesRequest, call: ModelCall) -> ReadInput:
    """Read a request as a chat; a large one outside of the event loop."""
    state, reservation = call.state, call.reservation
    body_bytes = reservation.num_bytes
    items, stored_bytes = placed_items(body, state.responses, state.settings.max_body_bytes - body_bytes)
    reservation.reserve(stored_bytes)

    def read() -> ReadInput:
        conversation = read_conversation(items, body.instructions)
        chat, settings = chat_request(body, conversation), request_settings(body)
        return ReadInput([item for _, item in items], body_bytes + stored_bytes, conversation, chat, settings)

    found = await call.run_here_or_on_thread(reservation.num_bytes // BYTES_PER_CHECK, read)
    call.leave_out(parts_without_effect(body, found.conversation), no_effect)
    return found


def parts_without_effect(body: ResponsesRequest, conversation: Conversation) -> list[str]:
    """The places of the parts of a request that are left out."""
    left_out = [f"include.{index}" for index, name in enumerate(body.include) if name != LOGPROBS]
    left_out += ["truncation"] if body.truncation == "auto" else []
    return left_out + conversation.left_out


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
