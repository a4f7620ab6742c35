"""POST /tokenize and POST /detokenize: text to token ids, and back."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response

from forwardscope.results.server import DecodedText, Tokens, VllmTokens
from model.checkpoints.load import Checkpoint
from model.text.tokenizer import Spans, Tokenizer, TooManyTokens
from service.answers.budget import Budget, ResponseContents
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.conversations import conversation_ids, find_template
from service.answers.offered_tools import read_tools
from service.answers.prompts import check_ids, longest_token_bytes, token_answers
from service.http.bodies import JsonRoute
from service.http.encoding import to_json
from service.http.errors import invalid, wrong_shape
from service.http.openai_schemas import ChatRequest
from service.http.tokenize_schemas import DetokenizeRequest, TokenizeRequest

router = APIRouter(route_class=JsonRoute, tags=["text"])
SPECIAL_TOKENS = 16  # the most tokens that a tokenizer adds to a text
MAX_TOKENS = 1 << 19  # of an answer: each token of a text takes about 270 bytes while it is tokenized
OFFSET_BYTES = 24  # of the characters of a token
PIECE = 4096  # tokens that are encoded as JSON at a time, so that other threads can run in between


@router.post("/tokenize", summary="Text to token ids", response_model=Tokens | VllmTokens)
async def tokenize(body: TokenizeRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    checkpoint = call.checkpoint
    field, text = find_text(body)
    if body.return_offsets and body.text is None:
        raise wrong_shape("return_offsets", "is for a text; send `text`, or leave the field out", "invalid_value")
    if body.messages is not None:
        return await tokenize_messages(body, call)
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name):
            raise wrong_shape(name, "is for a conversation; send messages, or leave it out", "invalid_value")
    tokenizer = _require(checkpoint.tokenizer, field)
    num_bytes = len(text.encode())
    max_tokens = num_bytes + SPECIAL_TOKENS  # each token of the text has at least one byte

    def answer() -> bytes | memoryview:
        try:
            ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens, max_tokens=MAX_TOKENS)
            if len(ids) > MAX_TOKENS:
                raise TooManyTokens(len(ids))
        except TooManyTokens as error:
            reason = f"has at least {error.num_tokens} tokens; at most {MAX_TOKENS} are answered at once: send parts"
            raise invalid(field, reason, "too_many_tokens") from None
        call.note_tokens(len(ids))
        if body.prompt is not None:
            strings = tuple(map(checkpoint.text_of, ids)) if body.return_token_strs else None
            return to_json(VllmTokens(len(ids), checkpoint.model.config.max_positions, tuple(ids), strings))
        offsets: Spans = []
        if body.return_offsets:
            _, offsets = tokenizer.encode_with_spans(text, add_special_tokens=body.add_special_tokens)
        return encode_tokens(ids, checkpoint, offsets)

    extra_bytes = OFFSET_BYTES * max_tokens if body.return_offsets else 0
    contents = ResponseContents(num_tokens=max_tokens, text_bytes=max_tokens, extra_bytes=extra_bytes)
    return await answer_text(call, answer, num_bytes, Budget(contents.num_bytes, 0, field))


async def tokenize_messages(body: TokenizeRequest, call: ModelCall) -> Response:
    """Answer with the tokens of a conversation, as the chat template of the model renders it."""
    if body.add_special_tokens and "add_special_tokens" in body.model_fields_set:
        reason = "must be false with messages, because the chat template writes special tokens itself"
        raise wrong_shape("add_special_tokens", reason, "invalid_value")
    template = find_template(call.checkpoint)
    names = ("messages", "add_generation_prompt", "tools", "chat_template_kwargs")
    chat = ChatRequest.model_validate({name: getattr(body, name) for name in names})
    ids = await conversation_ids(chat, read_tools(chat), call, template)
    call.note_tokens(len(ids))
    contents = ResponseContents(num_tokens=len(ids), token_bytes=longest_token_bytes(call.checkpoint))
    budget = Budget(contents.num_bytes, 0, "messages")
    return await answer_text(call, lambda: encode_tokens(ids, call.checkpoint, []), len(ids), budget)


def encode_tokens(ids: Sequence[int], checkpoint: Checkpoint, offsets: Spans) -> memoryview:
    """The JSON of `Tokens`. Each piece is encoded as a list; without their brackets, the pieces join to one list."""
    content = bytearray(b'{"tokens":[')
    for start in range(0, len(ids), PIECE):
        content += b"," if start else b""
        content += to_json(token_answers(ids[start : start + PIECE], checkpoint, start))[1:-1]
    rest = to_json(Tokens((), len(ids), checkpoint.model.config.max_positions, offsets))
    content += rest.removeprefix(b'{"tokens":[')
    return memoryview(content)


@router.post("/detokenize", summary="Token ids to text", response_model=DecodedText)
async def detokenize(body: DetokenizeRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    tokenizer = _require(call.checkpoint.tokenizer, "tokens")
    check_ids(body.tokens, tokenizer.vocab_size, "tokens")
    call.note_tokens(len(body.tokens))
    skip = body.skip_special_tokens
    contents = ResponseContents(text_bytes=2 * len(body.tokens) * longest_token_bytes(call.checkpoint))

    def answer() -> bytes:
        whole = tokenizer.decode(body.tokens, skip_special_tokens=False)
        text = tokenizer.decode(body.tokens, skip_special_tokens=True) if skip else whole
        return to_json(DecodedText(text, whole))

    return await answer_text(call, answer, len(body.tokens), Budget(contents.num_bytes, 0, "tokens"))


def find_text(body: TokenizeRequest) -> tuple[str, str]:
    """The field that has the text of a request, and the text. Raises 422 unless one field has a text or messages."""
    texts = {name: text for name in ("text", "prompt") if (text := getattr(body, name)) is not None}
    if not texts and body.messages is None:
        raise wrong_shape("text", "is missing; send text, messages, or prompt for vLLM's form", "missing")
    if len(texts) + (body.messages is not None) > 1:
        raise wrong_shape(
            "prompt" if len(texts) > 1 else "messages", "send one of text, prompt and messages", "invalid_value"
        )
    return next(iter(texts.items()), ("messages", ""))


async def answer_text(
    call: ModelCall, job: Callable[[], bytes | memoryview], num_bytes: int, budget: Budget
) -> Response:
    """Run a job on a text of `num_bytes` bytes, or on that many tokens. Raises 413 if the budget is over a limit."""
    budget.check(call.state)
    return await call.respond(budget.response_bytes, lambda: call.state.worker.run_text(job, num_bytes))


def _require(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json", "no_tokenizer")
    return tokenizer
