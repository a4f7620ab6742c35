"""GET /v1/models, /v1/models/{model} and /tokenizer_info: the served model, as OpenAI, Anthropic and vLLM show it."""

from datetime import UTC, datetime

from fastapi import APIRouter, Response

from forwardscope.results.openai import OpenAIModel, OpenAIModels, TokenizerInfo
from model.checkpoints.load import Checkpoint
from service.http.encoding import json_response
from service.http.errors import ApiError
from service.http.openapi import error_answers
from service.state import CheckpointDep, State, StateDep, check_model

router = APIRouter(tags=["openai"], responses=error_answers(503))


@router.get(
    "/v1/models",
    summary="The served model and its adapters, in OpenAI's and Anthropic's form",
    response_model=OpenAIModels,
)
async def models(state: StateDep, checkpoint: CheckpointDep) -> Response:
    found = [describe(state, checkpoint, name) for name in (checkpoint.name, *checkpoint.adapters)]
    return json_response(OpenAIModels(data=found, first_id=found[0].id, last_id=found[-1].id, has_more=False))


@router.get(
    "/v1/models/{model:path}",
    summary="The served model or adapter of this name",
    response_model=OpenAIModel,
    responses=error_answers(404, 422),
)
async def model(model: str, state: StateDep, checkpoint: CheckpointDep) -> Response:
    check_model(checkpoint, model)
    return json_response(describe(state, checkpoint, model))


def describe(state: State, checkpoint: Checkpoint, name: str) -> OpenAIModel:
    """Describe the checkpoint or one of its adapters."""
    limit = checkpoint.model.config.max_positions
    if state.engine is not None:
        limit = min(limit, state.engine.num_cache_tokens)
    return OpenAIModel(
        id=name,
        created=int(state.began),
        owned_by="forwardscope",
        max_model_len=limit,
        parent=None if name == checkpoint.name else checkpoint.name,
        display_name=name,
        created_at=datetime.fromtimestamp(int(state.began), UTC).isoformat(),
        max_input_tokens=limit,
    )


@router.get(
    "/tokenizer_info",
    summary="The special tokens and the chat template, in vLLM's form",
    response_model=TokenizerInfo,
    responses=error_answers(404),
)
async def tokenizer_info(checkpoint: CheckpointDep) -> Response:
    tokenizer, template = checkpoint.tokenizer, checkpoint.chat_template
    if tokenizer is None:
        raise ApiError(404, "this checkpoint has no tokenizer.json", code="no_tokenizer")
    eos_token = next((tokenizer.token_text(token_id) for token_id in checkpoint.generation.eos_token_ids), None)
    info = TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=checkpoint.model.config.max_positions,
        vocab_size=tokenizer.vocab_size,
        chat_template=None if template is None else template.source_for(with_tools=False),
        **({"eos_token": eos_token} | dict(checkpoint.special_tokens)),
    )
    return json_response(info)
