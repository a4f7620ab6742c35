"""The spans of generations and passes: their phases, and what they say of the model and the tokens.

Attributes have the names of OpenTelemetry's conventions for generative AI (`gen_ai.*`) where those have one. Texts of
requests and answers are never among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.text.transcript import GenerationParams
from service.metrics import RequestTimes
from service.spans import MAX_PHASED, Attribute, Phase, RequestSpan


@dataclass
class TraceTimes:
    """How long the trace of a generation took: in the steps, and for its encoding."""

    step_seconds: float = 0.0
    encoding_seconds: float = 0.0
    num_steps: int = 0
    num_bytes: int = 0
    ended: float | None = None


@dataclass
class GenerationReport:
    """The data for the span of a generation, besides the times of its prompts.

    `finish_reasons` has the reasons of the choices that have ended, by their indices. `error` is the code of the error
    that ended a choice.
    """

    id: str
    model_name: str
    params: GenerationParams
    num_prompt: int
    num_choices: int
    is_chat: bool
    num_generated: int = 0
    num_cached: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    trace: TraceTimes = field(default_factory=TraceTimes)


def add_generation(span: RequestSpan, report: GenerationReport, progress: Sequence[RequestTimes], now: float) -> None:
    """Add a generation that ends `now` to the span of its request."""
    span.attributes |= generation_attributes(report)
    for index, each in enumerate(progress[:MAX_PHASED]):
        attributes: dict[str, Attribute] = {"gen_ai.usage.input_tokens": each.num_prompt}
        if len(progress) > 1:
            attributes["forwardscope.prompt_index"] = index
        phases = [("queue", each.admitted), ("prefill", each.started), ("decode", each.first_token)]
        begun = [(name, start) for name, start in phases if start is not None]
        ends = [*(start for _, start in begun[1:]), each.last_token or now]
        for (name, start), end in zip(begun, ends, strict=True):
            is_last = name == begun[-1][0]
            span.phases.append(Phase(name, start, end, attributes, report.error if is_last else None))
    started = min((each.started for each in progress if each.started is not None), default=None)
    if report.trace.ended is not None and started is not None:
        span.phases.append(Phase("trace", started, report.trace.ended, trace_attributes(report.trace)))


def generation_attributes(report: GenerationReport) -> dict[str, Attribute]:
    sampling = report.params.sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if report.is_chat else "text_completion",
        "gen_ai.provider.name": "forwardscope",
        "gen_ai.request.model": report.model_name,
        "gen_ai.response.model": report.model_name,
        "gen_ai.response.id": report.id,
        "gen_ai.request.max_tokens": report.params.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": report.num_prompt,
        "gen_ai.usage.output_tokens": report.num_generated,
        "gen_ai.usage.cache_read.input_tokens": report.num_cached,
        "gen_ai.response.finish_reasons": finish_reasons(report),
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    if report.params.n > 1:
        attributes["gen_ai.request.choice.count"] = report.params.n
    return attributes


def finish_reasons(report: GenerationReport) -> list[str]:
    """One reason for each choice of the first prompts. A choice that has not ended is cancelled."""
    shown = range(min(report.num_choices, MAX_PHASED * report.params.n))
    return [report.finish_reasons.get(index, "cancelled") for index in shown]


def trace_attributes(trace: TraceTimes) -> dict[str, Attribute]:
    return {
        "forwardscope.trace.steps": trace.num_steps,
        "forwardscope.trace.bytes": trace.num_bytes,
        "forwardscope.trace.step_seconds": trace.step_seconds,
        "forwardscope.trace.encoding_seconds": trace.encoding_seconds,
    }


def add_pass(
    span: RequestSpan, num_tokens: int, admitted: float, started: float | None, ended: float, error: str | None
) -> None:
    """Add a pass of /forward, /logits or /patterns, with the encoding of its answer, to the span of its request.

    `started` is None if the pass was cancelled before it began.
    """
    num_passes = sum(phase.name == "queue" for phase in span.phases)
    before = span.attributes.get("gen_ai.usage.input_tokens", 0)
    assert isinstance(before, int)
    span.attributes["gen_ai.usage.input_tokens"] = before + num_tokens
    if num_passes >= MAX_PHASED:
        return
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.input_tokens": num_tokens,
        "forwardscope.prompt_index": num_passes,
    }
    is_queued = started is None
    span.phases.append(Phase("queue", admitted, started or ended, attributes, error if is_queued else None))
    if started is not None:
        span.phases.append(Phase("trace", started, ended, attributes, error))
