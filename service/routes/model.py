"""GET /models and GET /model: the served model with its adapters, shape, parameters and stages, and the limits."""

from dataclasses import asdict, fields

from fastapi import APIRouter, Response

from forwardscope.results.server import (
    ArticlePrompt,
    Capabilities,
    CatalogueStage,
    Limits,
    ModelInfo,
    ParameterCounts,
    ServedModel,
    ServedModels,
)
from forwardscope.results.stages import PositionedToken
from model.checkpoints.load import Checkpoint
from model.engine.cache import bytes_of_token
from model.tracing.stages import sizes_of
from model.worked_examples import WORKED_EXAMPLES, WorkedExample
from service.http.encoding import NAMES, json_response
from service.http.openapi import error_answers
from service.state import CheckpointDep, State, StateDep, get_engine

router = APIRouter(tags=["model"])


@router.get("/models", summary="The served model, its adapters and the worked examples", response_model=ServedModels)
async def models(state: StateDep) -> Response:
    served = [] if state.checkpoint is None else [ServedModel(state.checkpoint.name, "checkpoint", None, None)]
    if state.checkpoint is not None:
        served += [ServedModel(name, "adapter", None, None) for name in state.checkpoint.adapters]
    examples = [
        ServedModel(name, "worked_example", example.title, prompt_of(example))
        for name, example in WORKED_EXAMPLES.items()
    ]
    return json_response(ServedModels((*served, *examples)))


@router.get(
    "/model",
    summary="The served model: configuration, parameters, stages, limits",
    response_model=ModelInfo,
    responses=error_answers(503),
)
async def model(state: StateDep, checkpoint: CheckpointDep) -> Response:
    network, settings, engine = checkpoint.model, state.settings, get_engine(state)
    count = checkpoint.parameters
    prompt_dims = ("position", "query", "key")  # they are as long as the prompt, which the answer calls T
    found = ModelInfo(
        name=checkpoint.name,
        device=str(network.embed.weight.device),
        dtype=NAMES[network.embed.weight.dtype],
        quantization=checkpoint.quantization if isinstance(checkpoint.quantization, str) else settings.quantize,
        config=asdict(network.config),
        parameters=ParameterCounts(dict(count.components), count.total, count.non_embedding),
        generation_defaults=dict(checkpoint.generation.sampling),
        eos_token_ids=tuple(checkpoint.generation.eos_token_ids),
        sizes={dim: "T" if dim in prompt_dims else size for dim, size in sizes_of(network.config, 0).items()},
        stages=tuple(CatalogueStage(stage.name, stage.dims) for stage in checkpoint.stages),
        limits=Limits(
            **settings.model_dump(include={each.name for each in fields(Limits)}),
            max_positions=network.config.max_positions,
            cache_tokens=engine.num_cache_tokens,
            cache_token_bytes=bytes_of_token(network.config, network.embed.weight.dtype, settings.kv_cache_dtype),
        ),
        capabilities=capabilities(state, checkpoint),
    )
    return json_response(found)


def prompt_of(example: type[WorkedExample]) -> ArticlePrompt:
    """The prompt of a worked example's article: its words, and their ids."""
    words = [example.vocabulary[token_id] for token_id in example.prompt_ids]
    return ArticlePrompt(" ".join(words), tuple(map(PositionedToken, example.prompt_ids, words, range(len(words)))))


def capabilities(state: State, checkpoint: Checkpoint) -> Capabilities:
    """Determine the features that are available with this model and these settings."""
    settings = state.settings
    return Capabilities(
        tokenizer=checkpoint.tokenizer is not None,
        chat_template=checkpoint.tokenizer is not None and checkpoint.chat_template is not None,
        edits=True,
        attribution=True,
        direct_attribution=state.ranks is None,
        gradients=state.float_network is not None,
        tuned_lens=state.translators is not None,
        patterns=True,
        compare=state.ranks is None,
        compare_files=settings.compare_directory is not None,
        adapters=bool(checkpoint.adapters),
        vectors=True,
        weights=state.ranks is None,
        store_vectors=settings.needs_api_key and settings.max_vectors > 0,
    )
