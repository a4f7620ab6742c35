"""The answer of POST /score: the log-probabilities of the tokens after a shared prompt."""

import math
import time
from collections.abc import Sequence

from forwardscope.local_results import TextOf
from forwardscope.results.generations import Logprob, Usage
from forwardscope.results.passes import PassTimings
from forwardscope.results.records import Columns
from forwardscope.results.scores import ContinuationScore, Scores
from model.text.transcript import TokenOutput
from service.answers.generation import Choice, Generation
from service.answers.openai_answers import finish_reason


async def answer(generation: Generation, num_shared: int) -> bytes:
    """Wait until every continuation is computed, and encode the answer."""
    choices = await generation.collect()
    lasts = [choice.last for choice in choices if choice.last is not None]
    for last in lasts:
        assert last.end is not None
        finish_reason(last.end, generation)
    return await generation.encode(lambda: describe(generation, choices, num_shared, lasts[0].num_cached))


def describe(generation: Generation, choices: list[Choice], num_shared: int, num_cached: int) -> Scores:
    num_scored = generation.num_prompt - num_shared * len(choices)
    queue_seconds = generation.timings().queue_seconds
    return Scores(
        model=generation.model_name,
        scores=tuple(score_of(choice.prompt_tokens[num_shared:], generation.text_of) for choice in choices),
        usage=Usage(num_shared, num_scored, num_cached),
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
