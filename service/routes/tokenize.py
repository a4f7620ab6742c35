"""POST /tokenize, POST /detokenize."""

from fastapi import APIRouter

from model.tokenizer import Tokenizer
from service.errors import invalid
from service.limits import JsonRoute
from service.schemas import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from service.state import CheckpointDep, StateDep, check_ids, positioned

router = APIRouter(route_class=JsonRoute, tags=["text"])


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeRequest, state: StateDep, checkpoint: CheckpointDep) -> TokenizeAnswer:
    tokenizer = _require(checkpoint.tokenizer, "text")

    def answer() -> TokenizeAnswer:
        ids = tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens)
        tokens = positioned(ids, checkpoint)
        return TokenizeAnswer(tokens=tokens, count=len(ids), max_positions=checkpoint.model.config.max_positions)

    return await state.worker.run_text(answer)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, state: StateDep, checkpoint: CheckpointDep) -> DetokenizeAnswer:
    tokenizer = _require(checkpoint.tokenizer, "tokens")
    check_ids(body.tokens, tokenizer.vocab_size, "tokens")
    skip = body.skip_special_tokens
    text = await state.worker.run_text(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return DetokenizeAnswer(text=text)


def _require(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json", "no_tokenizer")
    return tokenizer
