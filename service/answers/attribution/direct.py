"""The method `direct`: the shares of every part of the network in a logit.

The copy of the network for gradients computes them, so that their sum is exact to the rounding of float32. If gradients
are off, the served network computes them in its own dtype, as a pass of POST /forward would run.
"""

import time
from typing import Any

from fastapi import Response

from forwardscope.results import attributions as results
from model.analysis.attribution.direct import DirectAttribution, direct_attribution
from model.analysis.attribution.target import LogitTarget
from service.answers.attribution.gradient_jobs import NEEDS_WHOLE_WEIGHTS, Copied, answer_gradients
from service.answers.attribution.question import Question, read_logit
from service.answers.budget import Budget, pass_bytes
from service.answers.edits import answer_bytes
from service.answers.passes import PassAnswer, PendingAnswer, answer_passes
from service.http.attribute_schemas import DirectRequest
from service.http.errors import invalid


async def answer_direct(body: DirectRequest, question: Question) -> Response:
    if question.state.ranks is not None:
        raise invalid("method", NEEDS_WHOLE_WEIGHTS, "tensor_parallel")
    target = await read_logit(question, body)
    edits = await question.plan_edits(body.edits, question.ids)
    config = question.checkpoint.model.config
    size = question.response_bytes(config.num_layers, 2 * config.num_layers * (config.num_heads + 4))
    if question.state.float_network is not None:

        def job(copied: Copied) -> dict[str, Any]:
            found = direct_attribution(copied.network, question.ids, target, copied.edits[0])
            return direct_fields(question, target, found)

        return await answer_gradients(
            question, results.DirectAttribution, job, num_passes=1, num_logits=1, response_bytes=size, edits=edits
        )

    size += answer_bytes(edits[0])
    budget = Budget(size, pass_bytes(num_logits=config.vocab_size), "prompt")
    budget.check(question.state)  # before the passes of sources
    (bound,) = await question.bind(edits)

    def run(waited: float) -> PassAnswer:
        began, network = time.perf_counter(), question.network
        found = direct_attribution(network, question.ids, target, bound)
        seconds = time.perf_counter() - began
        head = question.head(body.method, network.model.embed.weight.dtype, waited, seconds, edits)
        return PassAnswer(results.DirectAttribution(**head, **direct_fields(question, target, found)), {})

    answers = [PendingAnswer.alone(len(question.ids), run)]
    response = await answer_passes(question, answers, budget=budget)
    question.state.metrics.attributions.labels("direct").inc()
    return response


def direct_fields(question: Question, target: LogitTarget, found: DirectAttribution) -> dict[str, Any]:
    return {
        "target": question.target_answer(target),
        "logit": found.logit,
        "capped_logit": found.capped,
        "total": found.total,
        "remainder": found.remainder,
        "embed": found.embed,
        "pos_embed": found.pos_embed,
        "layers": tuple(results.LayerShares(**vars(layer)) for layer in found.layers),
        "final_norm_bias": found.final_norm_bias,
    }
