"""The spans of generations and passes: their phases, and what they say of the model and the tokens.

Attributes have the names of OpenTelemetry's conventions for generative AI (`gen_ai.*`) where those have one. Texts of
requests and answers are never among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.metrics import RequestTimes
from service.spans import MAX_PHASED, Attribute, Phase, RequestSpan

if TYPE_CHECKING:
    from service.answers.generation import Generation


@dataclass
class TraceTimes:
    """How long the trace of a generation took: in the steps, and for its encoding."""

    step_seconds: float = 0.0
    encoding_seconds: float = 0.0
    num_steps: int = 0
    num_bytes: int = 0
    ended: float | None = None


def add_generation(span: RequestSpan, generation: "Generation", progress: Sequence[RequestTimes], now: float) -> None:
    """Add a generation that ends `now` to the span of its request. `progress` has the times of its prompts."""
    span.attributes |= generation_attributes(generation)
    for index, each in enumerate(progress[:MAX_PHASED]):
        attributes: dict[str, Attribute] = {"gen_ai.usage.input_tokens": each.num_prompt}
        if len(progress) > 1:
            attributes["forwardscope.prompt_index"] = index
        phases = [("queue", each.admitted), ("prefill", each.started), ("decode", each.first_token)]
        begun = [(name, start) for name, start in phases if start is not None]
        ends = [*(start for _, start in begun[1:]), each.last_token or now]
        for (name, start), end in zip(begun, ends, strict=True):
            is_last = name == begun[-1][0]
            span.phases.append(Phase(name, start, end, attributes, generation.error_code if is_last else None))
    started = min((each.started for each in progress if each.started is not None), default=None)
    trace = generation.trace_times
    if trace.ended is not None and started is not None:
        span.phases.append(Phase("trace", started, trace.ended, trace_attributes(trace)))


def generation_attributes(generation: "Generation") -> dict[str, Attribute]:
    sampling = generation.params.sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if generation.is_chat else "text_completion",
        "gen_ai.provider.name": "forwardscope",
        "gen_ai.request.model": generation.model_name,
        "gen_ai.response.model": generation.model_name,
        "gen_ai.response.id": generation.id,
        "gen_ai.request.max_tokens": generation.params.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": generation.num_prompt,
        "gen_ai.usage.output_tokens": generation.num_generated,
        "gen_ai.usage.cache_read.input_tokens": generation.num_cached,
        "gen_ai.response.finish_reasons": finish_reasons(generation),
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    if generation.params.n > 1:
        attributes["gen_ai.request.choice.count"] = generation.params.n
    return attributes


def finish_reasons(generation: "Generation") -> list[str]:
    """One reason for each choice of the first prompts. A choice that has not ended is cancelled."""
    shown = range(min(generation.num_choices, MAX_PHASED * generation.params.n))
    return [generation.finish_reasons.get(index, "cancelled") for index in shown]


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
