"""The span of a request, and the spans of its phases, as plain data.

OpenTelemetry is not known here: `service/otel.py` begins the span of a request, and sends it when the request has
ended. Without it, requests have no spans, and `recorded_span` returns None. No text of a client enters a span.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Attribute = str | bool | int | float | Sequence[str]
MAX_PHASED = 16  # prompts of a request whose phases have spans; a list can have thousands


@dataclass(frozen=True)
class Phase:
    """A part of the handling of a request, from `start` to `end` in seconds of `time.perf_counter`.

    `error` is the code of the error that ended it, or None.
    """

    name: str
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None


@dataclass
class RequestSpan:
    """The span of a request, filled in while the request is served.

    `is_recording` is False if the caller or the sampler has decided that the trace is not sampled: then its ids are
    passed on, but nothing is sent, and phases need not be added.
    """

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    flags: int  # bit 0: the trace is sampled
    is_recording: bool
    attributes: dict[str, Attribute] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)

    @property
    def traceparent(self) -> str:
        """The header that makes this span the parent of other spans (W3C Trace Context, version 00)."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
