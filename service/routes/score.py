"""POST /score: the log-probabilities of texts that may follow a prompt, computed as one batch."""

import math
import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Response

from forwardscope.local_results import TextOf
from forwardscope.results.generations import Logprob, Usage
from forwardscope.results.passes import PassTimings
from forwardscope.results.records import Columns
from forwardscope.results.scores import ContinuationScore, Scores
from model.text.scored_continuations import MAX_TOKENIZED_BYTES, encode_continuations
from model.text.transcript import TokenOutput
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.generation import ChoiceOutput, Generation, start_generation
from service.answers.generation_plan import Inputs, Options
from service.answers.openai_answers import finish_reason
from service.answers.prompts import check_ids, prompt_ids, refusing_overflow
from service.http.bodies import JsonRoute
from service.http.disconnects import unless_disconnected
from service.http.errors import invalid
from service.http.generate_schemas import GenerationRequest
from service.http.score_schemas import ScoreRequest

router = APIRouter(route_class=JsonRoute, tags=["text"])


@router.post("/score", summary="Log-probabilities of continuations", response_model=Scores)
async def score(body: ScoreRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    ids, continuations = await read_texts(body, call)
    options = Options(
        id_prefix="score",
        max_tokens=0,
        prompt_logprobs=0,
        num_shared=len(ids),
        field_names={"prompt": "continuations"},
    )
    fields = GenerationRequest(edits=body.edits, cache_salt=body.cache_salt)
    prompts = [[*ids, *each] for each in continuations]
    generation = await start_generation(Inputs(call, fields, options, prompts))
    return await generation.respond(partial(describe, generation, len(ids)))


async def read_texts(body: ScoreRequest, call: ModelCall) -> tuple[list[int], list[list[int]]]:
    """The token ids of the prompt and of each continuation. Raises 400 for a wrong one."""
    ids = await prompt_ids(call, body.prompt)
    texts = [each for each in body.continuations if isinstance(each, str)]
    continuations = [each for each in body.continuations if not isinstance(each, str)]
    if texts and isinstance(body.prompt, str):
        continuations = await read_continuations(body.prompt, ids, texts, call)
    elif texts:
        raise invalid("continuations", "are texts, but the prompt is token ids; send both as texts, or both as ids")
    for index, each in enumerate(continuations):
        param = f"continuations.{index}"
        if not each:
            raise invalid(param, "is empty; send at least one token", "empty")
        check_ids(each, call.checkpoint.model.config.vocab_size, param)
    return ids, continuations


async def read_continuations(prompt: str, ids: list[int], texts: Sequence[str], call: ModelCall) -> list[list[int]]:
    """Tokenize texts after a prompt, outside of the event loop."""
    tokenizer, max_tokens = call.checkpoint.tokenizer, call.checkpoint.model.config.max_positions
    assert tokenizer is not None, "the prompt was tokenized"
    encode = partial(encode_continuations, tokenizer, prompt, ids, texts, max_tokens)
    num_bytes = min(len(prompt.encode()) * len(texts), MAX_TOKENIZED_BYTES)
    with refusing_overflow(call.checkpoint, "continuations"):
        return await unless_disconnected(call.request, call.state.worker.run_text(encode, num_bytes))


def describe(generation: Generation, num_shared: int, choices: list[ChoiceOutput]) -> Scores:
    """Describe the computed continuations. Raises 503 if one was cancelled."""
    for choice in choices:
        assert choice.last.end is not None
        finish_reason(choice.last.end, generation)
    num_scored = generation.num_prompt - num_shared * len(choices)
    queue_seconds = generation.timings().queue_seconds
    return Scores(
        model=generation.model_name,
        scores=tuple(score_of(choice.prompt_tokens[num_shared:], generation.text_of) for choice in choices),
        usage=Usage(num_shared, num_scored, choices[0].last.num_cached),
        timings=PassTimings(queue_seconds, time.perf_counter() - generation.call.arrived - queue_seconds),
        edits=generation.edit_answers(0),
    )


def score_of(tokens: Sequence[TokenOutput], text_of: TextOf) -> ContinuationScore:
    """The score of one continuation."""
    found = [token.logprobs for token in tokens if token.logprobs is not None]
    assert len(found) == len(tokens), "every token after a prompt has a log-probability"
    logprobs, ids = [each.chosen for each in found], [token.token_id for token in tokens]
    total, is_greedy = math.fsum(logprobs), all(each.rank == 1 for each in found)
    return ContinuationScore(
        total, total / len(tokens), is_greedy, Columns(Logprob, ids, list(map(text_of, ids)), logprobs)
    )
