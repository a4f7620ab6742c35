"""The method `logit_lens`: decode the residual stream at every layer, with or without translators of a tuned lens."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import Response

from forwardscope.local_results import describe_predictions
from forwardscope.results.attributions import LensStage, LensToken, LogitLens
from model.analysis.attribution.logit_lens import LensPart, LensResult, LensRun, lens_stages, rows_per_part
from service.answers.attribution.question import Plans, Question, read_token
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.answers.edits import answer_bytes
from service.answers.passes import PassAnswer, PendingAnswer, answer_passes
from service.answers.prompts import find_positions, longest_token_bytes
from service.http.attribute_schemas import LogitLensRequest
from service.http.errors import ApiError, invalid


class LensAnswer:
    """The answer of a run, which grows part by part."""

    def __init__(self, run: LensRun, question: Question, positions: list[int], token: int | None, edits: Plans) -> None:
        self._run = run
        self._edits = edits
        self._question = question
        self._positions = positions
        self._token = token
        self._layers: dict[str, list[LensResult]] = {}  # the decoded parts of each layer
        self._seconds = 0.0

    def jobs(self) -> list[Callable[[], None]]:
        """The pass, and each part. Other requests are served between them."""
        parts = [partial(self._add, part) for part in self._run.parts()]
        work: list[Callable[[], None]] = [self._run.run_pass, *parts]
        return [partial(self._timed, each) for each in work]

    def make_answer(self, waited: float) -> PassAnswer:
        question = self._question
        dtype = question.checkpoint.model.embed.weight.dtype
        answer = LogitLens(
            **question.head("logit_lens", dtype, waited, self._seconds, self._edits),
            token=None if self._token is None else question.token_answer(self._token),
            final=tuple(map(question.token_answer, self._run.final_tokens())),
            layers=tuple(self._describe(self._layers[name]) for name in self._run.stage_names),
        )
        return PassAnswer(answer, {})

    def _timed(self, job: Callable[[], None]) -> None:
        began = time.perf_counter()
        job()
        self._seconds += time.perf_counter() - began

    def _add(self, part: LensPart) -> None:
        self._layers.setdefault(part.stage, []).append(self._run.decode(part))

    def _describe(self, parts: Sequence[LensResult]) -> LensStage:
        """Describe a layer, whose parts follow each other."""
        top = (each for part in parts for each in part.top)
        followed = [LensToken(**vars(each)) for part in parts for each in part.followed or ()]
        return LensStage(
            stage=parts[0].stage,
            translated=parts[0].is_translated,
            positions=describe_predictions(self._positions, top, self._question.checkpoint.text_of),
            token=None if self._token is None else tuple(followed),
            final=tuple(LensToken(**vars(each)) for part in parts for each in part.final),
        )


async def answer_lens(body: LogitLensRequest, question: Question) -> Response:
    checkpoint, state = question.checkpoint, question.state
    config = checkpoint.model.config
    token = None if body.token is None else await read_token(question, body.token, "token")
    positions = find_positions([-1] if body.positions is None else body.positions, len(question.ids), "positions")
    if body.top_k > config.vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {config.vocab_size} tokens")
    if body.lens == "tuned" and state.translators is None:
        raise invalid("lens", "this server has no translators; start it with --lens FILE, or send plain", "no_lens")
    check_work(question, len(positions))
    edits = await question.plan_edits(body.edits, question.ids)
    check_stages(edits)
    budget = budget_of(question, len(positions), body.top_k, edits)
    budget.check(state)  # before the passes of sources
    (bound,) = await question.bind(edits)
    run = LensRun(
        question.network,
        question.ids,
        positions,
        body.top_k,
        token=token,
        translators=None if body.lens == "plain" else state.translators,
        edits=bound,
    )
    answer = LensAnswer(run, question, positions, token, edits)
    answers = [PendingAnswer.alone(len(question.ids), answer.make_answer, answer.jobs())]
    response = await answer_passes(question, answers, budget=budget)
    state.metrics.attributions.labels("logit_lens").inc()
    return response


def check_stages(edits: Plans) -> None:
    """Raise 400 for an edit behind the last residual, which the lens would leave out."""
    for index, match in enumerate(() if edits[0] is None else edits[0].matches):
        for stage in match.stages:
            if stage.startswith(("ln_final.", "logits")):
                reason = f"{stage} is behind the residuals that the lens decodes; edit an earlier stage"
                raise invalid(f"edits.{index}.stage", reason)


def check_work(question: Question, num_positions: int) -> None:
    """Raise 413 if all layers and positions together have too many logits."""
    config, limit = question.checkpoint.model.config, question.state.settings.max_lens_logits
    num_layers = len(lens_stages(config))
    num_logits = num_layers * num_positions * config.vocab_size
    if num_logits > limit:
        message = (
            f"positions: {num_layers} residuals of {num_positions} positions have {num_logits} logits, and the limit "
            f"is {limit}; send fewer positions, or start the server with a larger --max-lens-logits"
        )
        raise ApiError(413, message, param="positions", code="too_many_logits")


def budget_of(question: Question, num_positions: int, top_k: int, edits: Plans) -> Budget:
    config = question.checkpoint.model.config
    num_layers = len(lens_stages(config))
    num_predictions = len(question.ids) + num_positions + num_layers * num_positions * (3 + top_k)
    contents = ResponseContents(
        num_records=1 + num_layers * 2,
        num_predictions=num_predictions,
        token_bytes=longest_token_bytes(question.checkpoint),
        extra_bytes=answer_bytes(edits[0]),
    )
    itemsize = question.checkpoint.model.embed.weight.dtype.itemsize
    residuals = num_layers * num_positions * config.d_model * itemsize
    num_logits = min(num_positions, rows_per_part(config, top_k)) * config.vocab_size
    return Budget(contents.num_bytes, pass_bytes(num_logits=num_logits) + residuals, "positions, top_k or the prompt")
