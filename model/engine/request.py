"""The input and the output of the engine: requests, and the output of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.text.transcript import End, GenerationParams, TokenOutput
from model.tracing.edits import BoundEdits
from model.tracing.hooks import Hooks
from model.tracing.tap import Tap


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and what to generate after it. `trace` reports stages of its steps. `tap` reads or changes
    stages, for callers in the same process; `Hooks` know the positions that they see. `adapter` is the name of a loaded
    adapter that changes the network for this request. `edits` change stages; they come before the trace and the tap,
    which see the changed values. `scored_ids` are tokens whose logits are reported wherever a token is chosen. The
    sequences of all requests with the same `owner` share the places that one owner gets; by default, each request is
    its own owner. A request waits until the prompt of its `prefix_leader`, an earlier request with the same beginning,
    is computed, to take its prefix.

    A sequence with a `tap` neither shares its keys and values nor takes those of others. Two requests share the keys
    and values of a common prefix only if their `adapter`, their `cache_salt` and the edits of that prefix are the same.
    The time to the first token reveals whether a prefix was computed before, so users who must not learn of each
    other's prompts need different salts.
    """

    id: str
    prompt_ids: Sequence[int]
    params: GenerationParams
    trace: TraceParams | None = None
    tap: Tap | Hooks | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    scored_ids: Sequence[int] = ()
    edits: BoundEdits | None = None
    owner: str | None = None
    prefix_leader: str | None = None

    @property
    def num_prompt_for_edits(self) -> int:
        """The length of the prompt for edits, which ends before the tokens that are scored as its continuation."""
        return self.params.prompt_logprobs_start or len(self.prompt_ids)


@dataclass(slots=True)  # not frozen: each step makes some, and a frozen one takes longer to make
class Output:
    """An output of one step for one choice of a request. A traced step with a draft gives one for each new token.

    `tokens` are the new tokens. The list is empty if the output reports only the trace of a part of the prompt, or only
    the end of the choice. `prompt_tokens` are the tokens of the prompt, if the request asks for them; they are in the
    output of the step that completes the prompt. `num_generated` counts the tokens of the choice so far. `num_cached`
    tokens of the prompt had been computed by other sequences. `scores` are the logits of the request's `scored_ids`, at
    the position after which the first of the `tokens` was chosen. `trace_seconds` is the time that its trace
    took in the step.
    """

    request_id: str
    choice: int
    prompt_tokens: list[TokenOutput] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    trace: StepTrace | None = None
    end: End | None = None
    error: Exception | None = None
    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0
    trace_seconds: float = 0.0


@dataclass(slots=True)
class Step:
    """The outputs of one step. `started`: the requests whose first step it was. `seconds` include `trace_seconds`."""

    outputs: list[Output] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    trace_seconds: float = 0.0
