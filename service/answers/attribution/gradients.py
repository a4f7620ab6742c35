"""The methods `gradient`, `integrated_gradients` and `attribution_patching`: their checks, jobs and answers."""

import math
from dataclasses import replace
from typing import Any

import torch
from fastapi import Response
from torch import Tensor

from forwardscope.results import attributions as results
from model.analysis.attribution.attribution_patching import attribution_patching, effect_dims
from model.analysis.attribution.gradients import compute_gradients, differentiable_stages
from model.analysis.attribution.integrated_gradients import IntegratedGradientsRun, embeddings_of, mean_embedding
from model.analysis.attribution.target import LossTarget, Target
from model.tracing.pauses import pause
from model.tracing.selection import Detail, Selection, StageCollector
from model.tracing.stages import Stage, sizes_of
from service.answers.attribution.gradient_jobs import Copied, answer_gradients, float_network_of
from service.answers.attribution.question import Question, find_stages, read_target, second_prompt
from service.answers.prompts import check_selected_heads, find_positions, token_answers
from service.answers.stage_answers import effects_answer, stage_answer
from service.http.attribute_schemas import AttributionPatchingRequest, GradientRequest, IntegratedGradientsRequest
from service.http.errors import invalid


async def read_stages(
    question: Question, body: GradientRequest | AttributionPatchingRequest, detail: Detail
) -> tuple[Selection, Target, int]:
    """The selected stages, the target of a pass with them, and the number of rows of logits that the pass computes.

    Raises 400 for stages, positions, heads and targets that do not exist.
    """
    config, num_tokens = question.checkpoint.model.config, len(question.ids)
    stages = await find_stages(question, differentiable_stages(config), body.stages)
    positions = None if body.positions is None else find_positions(body.positions, num_tokens, "positions")
    check_selected_heads(body.heads, config.num_heads, stages)
    selection = Selection(stages=stages, detail=detail, positions=positions, heads=body.heads)
    target = await read_target(question, body)
    if isinstance(target, LossTarget):
        return selection, target, num_tokens
    has_all_rows = any(stage.has_selected_rows for stage in stages)
    return selection, replace(target, has_all_rows=has_all_rows), num_tokens if has_all_rows else 1


async def answer_gradient(body: GradientRequest, question: Question) -> Response:
    network = float_network_of(question)  # before all other checks
    selection, target, num_logits = await read_stages(question, body, body.detail)
    sizes = sizes_of(question.checkpoint.model.config, len(question.ids))
    edits = await question.plan_edits(body.edits, question.ids)
    num_values = sum(math.prod(selection.shape(stage, sizes)) for stage in selection.stages)

    def job(copied: Copied) -> dict[str, Any]:
        found = compute_gradients(copied.network, question.ids, target, selection.stages, copied.edits[0])
        collector = StageCollector(selection, sizes)
        kept = [collector(stage, found.gradients[stage.name]) for stage in selection.stages]
        collector.finish()
        return {
            "target": question.target_answer(target),
            "value": found.value,
            "stages": tuple(stage_answer(each, each.values, body.encoding) for each in kept),
        }

    return await answer_gradients(
        question,
        results.Gradients,
        job,
        num_passes=1,
        num_logits=num_logits,
        response_bytes=question.response_bytes(
            len(selection.stages), num_values if body.detail == "values" else 0, network.dtype, body.encoding
        ),
        edits=edits,
    )


async def answer_integrated_gradients(body: IntegratedGradientsRequest, question: Question) -> Response:
    network = float_network_of(question)
    target = await read_target(question, body)
    if body.baseline_prompt is not None and "baseline" in body.model_fields_set:
        raise invalid("baseline_prompt", "replaces `baseline`; send only one of them")
    baseline_ids = None
    if body.baseline_prompt is not None:
        baseline_ids = await second_prompt(question, body.baseline_prompt, "baseline_prompt")
    edits = await question.plan_edits(body.edits, question.ids)

    def baseline(copied: Copied) -> Tensor:
        if baseline_ids is not None:
            return embeddings_of(copied.network.model, baseline_ids)
        mean = mean_embedding(copied.network.model)
        return mean if body.baseline == "mean" else torch.zeros_like(mean)

    def job(copied: Copied) -> dict[str, Any]:
        run = IntegratedGradientsRun(
            copied.network, question.ids, target, baseline(copied), body.steps, copied.edits[0]
        )
        for index in range(body.steps):
            pause()
            run.step(index)
        found = run.finish()
        return {
            "target": question.target_answer(target),
            "attributions": tuple(found.attributions.sum(-1).tolist()),
            "value": found.value,
            "baseline_value": found.baseline_value,
            "error": found.error,
            "steps": body.steps,
        }

    return await answer_gradients(
        question,
        results.IntegratedGradients,
        job,
        num_passes=body.steps + 2,
        num_logits=len(question.ids) if body.of == "loss" else 1,
        response_bytes=question.response_bytes(1, len(question.ids), network.dtype),
        edits=edits,
    )


async def answer_attribution_patching(body: AttributionPatchingRequest, question: Question) -> Response:
    network = float_network_of(question)
    selection, target, num_logits = await read_stages(question, body, "values")
    corrupted = await second_prompt(question, body.corrupted, "corrupted")
    sizes = sizes_of(question.checkpoint.model.config, len(question.ids))
    edits = await question.plan_edits(body.edits, question.ids, corrupted)
    effects = [Stage(stage.name, effect_dims(stage)) for stage in selection.stages]
    num_values = sum(math.prod(selection.shape(stage, sizes)) for stage in effects)

    def job(copied: Copied) -> dict[str, Any]:
        clean_edits, corrupted_edits = copied.edits
        found = attribution_patching(
            copied.network,
            question.ids,
            corrupted,
            target,
            selection.stages,
            clean_edits=clean_edits,
            corrupted_edits=corrupted_edits,
        )
        taken = {stage: selection.take(stage, found.effects[stage.name], sizes)[0] for stage in effects}
        return {
            "target": question.target_answer(target),
            "corrupted_tokens": token_answers(corrupted, question.checkpoint),
            "clean_value": found.clean_value,
            "corrupted_value": found.corrupted_value,
            "stages": tuple(effects_answer(stage.name, stage.dims[1:], tensor) for stage, tensor in taken.items()),
        }

    return await answer_gradients(
        question,
        results.AttributionPatching,
        job,
        num_passes=2,
        num_logits=num_logits,
        response_bytes=question.response_bytes(len(selection.stages), num_values, network.dtype),
        edits=edits,
    )
