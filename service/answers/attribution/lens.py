"""The method `logit_lens`: decode the residual stream at every layer, with or without translators of a tuned lens."""

import time
from typing import Any

from fastapi import Response

from model.analysis.attribution.logit_lens import LensResult, lens_stages, logit_lens
from service.answers.attribution.question import Question, read_token
from service.answers.budget import Budget, ResponseContents, pass_bytes, response_bytes
from service.answers.prompts import find_positions, longest_token_bytes
from service.answers.single_pass import Pass, PassAnswer, answer_passes
from service.answers.stage_answers import prediction_answers
from service.http.attribute_schemas import LogitLensRequest
from service.http.errors import invalid


async def answer_lens(body: LogitLensRequest, question: Question) -> Response:
    checkpoint, state = question.checkpoint, question.state
    config = checkpoint.model.config
    token = None if body.token is None else await read_token(question, body.token, "token")
    positions = find_positions([-1] if body.positions is None else body.positions, len(question.ids), "positions")
    if body.top_k > config.vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {config.vocab_size} tokens")
    if body.lens == "tuned" and state.translators is None:
        raise invalid("lens", "this server has no translators; start it with --lens FILE, or send plain", "no_lens")
    translators = None if body.lens == "plain" else state.translators

    def run(waited: float) -> PassAnswer:
        began = time.perf_counter()
        results = logit_lens(
            checkpoint.model,
            question.ids,
            positions,
            body.top_k,
            token=token,
            translators=translators,
            adapter=question.served_adapter,
        )
        seconds = time.perf_counter() - began
        fields = {
            "token": None if token is None else question.token_answer(token),
            "layers": [layer_answer(question, positions, result) for result in results],
        }
        return PassAnswer(
            question.answer("logit_lens", checkpoint.model.embed.weight.dtype, waited, seconds) | fields, {}
        )

    num_layers = len(lens_stages(config))
    num_predictions = len(question.ids) + num_layers * len(positions) * (2 + body.top_k)
    contents = ResponseContents(
        num_records=1 + num_layers * 2,
        num_predictions=num_predictions,
        text_bytes=num_predictions * longest_token_bytes(checkpoint),
    )
    budget = Budget(
        response_bytes(contents),
        pass_bytes(num_logits=len(positions) * config.vocab_size),
        "positions, top_k or the prompt",
    )
    passes = [Pass(len(question.ids), run)]
    response = await answer_passes(question.request, state, passes, budget=budget, is_list=False, as_safetensors=False)
    state.metrics.attributions.labels("logit_lens").inc()
    return response


def layer_answer(question: Question, positions: list[int], result: LensResult) -> dict[str, Any]:
    followed = result.followed
    return {
        "stage": result.stage,
        "translated": result.is_translated,
        "positions": prediction_answers(positions, result.top, lambda token: question.token_answer(token)["text"]),
        "token": None
        if followed is None
        else [{"logit": each.logit, "probability": each.probability, "rank": each.rank} for each in followed],
    }
