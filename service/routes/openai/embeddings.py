"""POST /v1/embeddings: a vector for each text, pooled from a stage of the served model, in OpenAI's form."""

import math
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.results.openai import Embedding, Embeddings, EmbeddingUsage
from model.checkpoints.load import Checkpoint
from model.tracing.stages import sizes_of
from service.answers.call import CallDep, model_call
from service.answers.constraints import generation_error
from service.answers.generation import Generation, start_generation
from service.answers.generation_plan import Inputs, Options
from service.answers.openai_answers import finish_reason
from service.answers.pooling import PooledPrompts, Pooling
from service.answers.prompts import as_list, param_of, prompt_ids
from service.answers.stage_answers import select_stages
from service.http.bodies import JsonRoute
from service.http.embedding_schemas import EmbeddingRequest
from service.http.encoding import encoded
from service.http.errors import invalid
from service.http.generate_schemas import GenerationRequest

router = APIRouter(route_class=JsonRoute, tags=["openai"])


@router.post(
    "/v1/embeddings",
    summary="Vectors of texts, in OpenAI's form",
    response_model=Embeddings,
)
async def embeddings(body: EmbeddingRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    pooling = find_pooling(body, call.checkpoint)
    inputs, is_list = as_list(body.input)
    prompts = [
        await prompt_ids(call, each, param_of("input", index, is_list), add_special_tokens=body.add_special_tokens)
        for index, each in enumerate(inputs)
    ]
    options = Options(id_prefix="embd", max_tokens=0, pooling=pooling, field_names={"prompt": "input"})
    fields = GenerationRequest(edits=body.edits)
    generation = await start_generation(Inputs(call, fields, options, prompts))
    return await generation.respond_with(answer(body, pooling, generation))


def find_pooling(body: EmbeddingRequest, checkpoint: Checkpoint) -> Pooling:
    """The stage of a request, and how it is reduced. Raises 400 for a stage that cannot be pooled."""
    config = checkpoint.model.config
    stages = select_stages(checkpoint.stages, [body.stage], "stage")
    if len(stages) > 1:
        raise invalid("stage", f"matches {len(stages)} stages, such as {stages[0].name}; name one")
    stage, sizes = stages[0], sizes_of(config, 1)
    if stage.dims[1] != "position" or len(stage.dims) < 3:
        reason = f"{stage.name} ({', '.join(stage.dims)}) has no vector for each position; choose another stage"
        raise invalid("stage", reason)
    width = math.prod(sizes[dim] for dim in stage.dims[2:])
    if body.dimensions is not None and body.dimensions > width:
        raise invalid("dimensions", f"{body.dimensions} is more than the {width} numbers of {stage.name}")
    return Pooling(
        stage=stage,
        kind=body.pooling,
        width=width,
        num_values=body.dimensions or width,
        vocab_size=config.vocab_size,
        encoding="json" if body.encoding_format == "float" else "base64",
    )


async def answer(body: EmbeddingRequest, pooling: Pooling, generation: Generation) -> bytes:
    """Wait until every prompt is computed, and encode the answer."""
    pooled = PooledPrompts(generation.num_choices, pooling.width)
    async for outputs in generation.batches():
        for output in outputs:
            if output.last.error is not None:
                raise generation_error(output.last.error)
            if output.last.end is not None:
                finish_reason(output.last.end, generation)
        traces = [(each.index, each.last.trace) for each in outputs if each.last.trace is not None]
        await generation.call.state.worker.executors.run_uncounted("answers", partial(pooled.add, traces))

    def describe() -> Embeddings:
        vectors = pooled.vectors(pooling.num_values, normalize=body.normalize)
        values: list[Any] = [encoded(vector, pooling.encoding) for vector in vectors]
        data = [
            Embedding(index=index, embedding=each, edits=generation.edit_answers(index))
            for index, each in enumerate(values)
        ]
        usage = EmbeddingUsage(generation.num_prompt, generation.num_prompt)
        return Embeddings(data=data, model=generation.model_name, usage=usage)

    return await generation.encode(describe)
