"""POST /tokenize, POST /detokenize."""

from fastapi import APIRouter

from model.tokenizer import Tokenizer
from service.errors import invalid
from service.limits import JsonRoute
from service.schemas import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from service.state import CheckpointDep, check_ids, positioned

router = APIRouter(route_class=JsonRoute, tags=["text"])


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeRequest, checkpoint: CheckpointDep) -> TokenizeAnswer:
    tokenizer = _require(checkpoint.tokenizer, "text")
    ids = tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens)
    return TokenizeAnswer(
        tokens=positioned(ids, checkpoint), count=len(ids), max_positions=checkpoint.model.config.max_positions
    )


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, checkpoint: CheckpointDep) -> DetokenizeAnswer:
    tokenizer = _require(checkpoint.tokenizer, "tokens")
    check_ids(body.tokens, tokenizer.vocab_size, "tokens")
    return DetokenizeAnswer(text=tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens))


def _require(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json", "no_tokenizer")
    return tokenizer
