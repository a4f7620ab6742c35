"""POST /tokenize, POST /detokenize."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from model.tokenizer import Tokenizer
from service.bodies import JsonRoute
from service.encoding import to_json
from service.errors import invalid
from service.openapi import answers_json
from service.passes import ESCAPED_BYTES, Budget
from service.schemas import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from service.state import CheckpointDep, State, StateDep, check_ids, get_reservation, longest_token_bytes, positioned
from service.streaming import unless_disconnected

router = APIRouter(route_class=JsonRoute, tags=["text"])
TOKEN_BYTES = 56  # of a token in the response, without its text
SPECIAL_TOKENS = 16  # that a tokenizer adds to a text, at most
PIECE = 4096  # tokens that are turned into JSON at a time, so that other threads run in between


@router.post(
    "/tokenize", summary="Text to token ids", response_model=None, responses=answers_json(TokenizeAnswer, "The tokens")
)
async def tokenize(body: TokenizeRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    tokenizer = _require(checkpoint.tokenizer, "text")
    num_bytes = len(body.text.encode())
    most = num_bytes + SPECIAL_TOKENS  # a token stands for a byte at least

    def answer() -> memoryview:
        ids = tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens)
        content = bytearray(b'{"tokens":[')
        for start in range(0, len(ids), PIECE):
            content += b"," if start else b""
            content += to_json(positioned(ids[start : start + PIECE], checkpoint, start))[1:-1]
        content += b"]," + to_json({"count": len(ids), "max_positions": checkpoint.model.config.max_positions})[1:]
        return memoryview(content)

    budget = Budget(most * (TOKEN_BYTES + ESCAPED_BYTES), 0, "text")
    return await answer_text(request, state, answer, num_bytes, budget)


@router.post(
    "/detokenize",
    summary="Token ids to text",
    response_model=None,
    responses=answers_json(DetokenizeAnswer, "The text"),
)
async def detokenize(body: DetokenizeRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    tokenizer = _require(checkpoint.tokenizer, "tokens")
    check_ids(body.tokens, tokenizer.vocab_size, "tokens")
    skip = body.skip_special_tokens
    most = len(body.tokens) * longest_token_bytes(checkpoint)

    def answer() -> bytes:
        return to_json({"text": tokenizer.decode(body.tokens, skip_special_tokens=skip)})

    return await answer_text(request, state, answer, len(body.tokens), Budget(ESCAPED_BYTES * most, 0, "tokens"))


async def answer_text(
    request: Request, state: State, job: Callable[[], bytes | memoryview], num_bytes: int, budget: Budget
) -> Response:
    """The response that the job makes of a text or tokens of so many bytes, within the budget."""
    budget.check(state)
    reservation = get_reservation(request)
    reservation.add(budget.response_bytes)
    content = await unless_disconnected(request, state.worker.run_text(job, num_bytes))
    reservation.count(len(content) - budget.response_bytes)
    return Response(content, media_type="application/json")


def _require(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json", "no_tokenizer")
    return tokenizer
