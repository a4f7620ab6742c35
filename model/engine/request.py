"""What goes into the engine and what comes out of it: a request, and what each step makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.engine.tracing import StepTrace, TraceParams
from model.generation import End, GenerationParams, TokenOutput
from model.stages import Tap


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and what to make of it. `trace` shows its steps; `tap` reads or edits them, for code in the process.

    An edited sequence neither shares its keys and values nor takes those of others. Two requests share the keys and
    values of a common prefix only if their `cache_salt` is the same. The time to the first token shows whether a prefix
    was computed before, so users who must not learn of each other's prompts need different salts.
    """

    id: str
    prompt_ids: Sequence[int]
    params: GenerationParams
    trace: TraceParams | None = None
    tap: Tap | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class Output:
    """What one step made of one choice of a request: a token (the first with those of an echoed prompt before it), or
    none, where a part of the prompt is shown or where it ends without one.

    `num_generated` counts the choice's tokens so far; `num_cached` tokens of the prompt were computed already, by
    others.
    """

    request_id: str
    choice: int
    tokens: list[TokenOutput] = field(default_factory=list)
    trace: StepTrace | None = None
    end: End | None = None
    error: Exception | None = None
    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0


@dataclass(frozen=True)
class Step:
    """One step: `started` are the requests that had waited until it; `trace_seconds` are part of `seconds`."""

    outputs: list[Output] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    trace_seconds: float = 0.0
