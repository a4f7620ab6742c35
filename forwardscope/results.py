"""The results of calls, as plain dataclasses. Arrays are numpy arrays in a client, and tensors in `load`'s model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from forwardscope.errors import UnknownStage


class Indexable(Protocol):
    """A numpy array or a tensor."""

    def __getitem__(self, key: Any, /) -> Any: ...


Array = TypeVar("Array", bound=Indexable)


@dataclass(frozen=True)
class Token:
    """A token of a prompt. `text` is None if the model has no tokenizer, or if its tokenizer does not have the id."""

    id: int
    text: str | None
    position: int


@dataclass(frozen=True)
class Prediction:
    """A token that may come next, with its logit and its probability over the whole vocabulary."""

    id: int
    text: str | None
    logit: float
    probability: float


@dataclass(frozen=True)
class Loss(Generic[Array]):
    """Cross-entropy in nats: `per_token` (position,), NaN where there is no target, and its mean over the others.

    `mean` and `perplexity` are None if no position has a target.
    """

    per_token: Array
    mean: float | None
    perplexity: float | None


@dataclass(frozen=True)
class Stage:
    """A stage: its name, the names of its axes, its shape, and the dtype in which it was computed."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AppliedEdit:
    """What one edit matched. `positions` is a word, or indices and (first, last) ranges."""

    stages: tuple[str, ...]
    positions: str | tuple[int | tuple[int, int], ...]


@dataclass(frozen=True)
class StageChange:
    """How far edits have moved a stage: the l2 norm of the difference, and the same over the norm of the plain stage.

    `relative` is None if the plain stage is 0.
    """

    norm: float
    relative: float | None


@dataclass(frozen=True)
class StoredVector:
    """A vector of the server that edits may name. `shapes` has the shape of each of its tensors.

    `by_stage`: each tensor is for the stage of its name. `uploaded`: a client has stored the vector.
    """

    name: str
    uploaded: bool
    by_stage: bool
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class StageArrays(Mapping[str, Array]):
    """The arrays of stages by name, in the order of computation.

    A name may be written as in TransformerLens, with `hook_`. A name that is not there raises `UnknownStage`, which is
    a `KeyError` and names similar stages.
    """

    stages: tuple[Stage, ...]
    arrays: Mapping[str, Array] = field(repr=False)

    def __getitem__(self, name: str) -> Array:
        plain = name.replace("hook_", "")
        if plain not in self.arrays:
            raise UnknownStage(name, self.arrays.keys())
        return self.arrays[plain]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def dims(self, name: str) -> tuple[str, ...]:
        """The names of the axes of a stage, such as ("batch", "head", "query", "key")."""
        self[name]  # raises `UnknownStage`
        return next(stage.dims for stage in self.stages if stage.name == name.replace("hook_", ""))


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace(StageArrays[Array]):
    """One forward pass over a prompt.

    `trace["blocks.0.attn.pattern"]` is the array of a stage. `positions` are the requested positions, and
    `predictions` has the most likely next tokens of each of them. If the call has edits, `edits` says what each has
    matched. With `baseline=True`, `baseline` is the pass without edits, and `changes` how far each stage has moved.
    """

    model: str
    tokens: tuple[Token, ...]
    positions: tuple[int, ...]
    predictions: tuple[tuple[Prediction, ...], ...]
    loss: Loss[Array]
    edits: tuple[AppliedEdit, ...] = ()
    baseline: "Trace[Array] | None" = None
    changes: Mapping[str, StageChange] = field(default_factory=dict)

    @property
    def logits(self) -> Array:
        """The logits (position, d_vocab). A client's trace has them only if they were among the requested `stages`."""
        return cast(Array, self["logits"][0])


@dataclass(frozen=True)
class LensLayer:
    """The most likely tokens after one block, and the probability that it gives to the token that was chosen."""

    layer: int
    top: tuple[Prediction, ...]
    chosen_probability: float


@dataclass(frozen=True, eq=False, kw_only=True)
class StepTrace(StageArrays[Array]):
    """The trace of one step of a generation: the stages of the `positions` that the step computed."""

    positions: tuple[int, ...]
    predictions: tuple[tuple[Prediction, ...], ...]
    logit_lens: tuple[LensLayer, ...] | None


@dataclass(frozen=True, kw_only=True)
class Logits(Generic[Array]):
    """Next-token logits (position, d_vocab) at `positions`.

    With `top_k`, their shape is (position, top_k), and `ids` has the token of each logit; otherwise `ids` is None.
    `logprobs` is None unless the request asked for it.
    """

    model: str
    tokens: tuple[Token, ...]
    positions: tuple[int, ...]
    logits: Array
    ids: Array | None
    logprobs: Array | None
    edits: tuple[AppliedEdit, ...] = ()
    baseline: "Logits[Array] | None" = None
    changes: Mapping[str, StageChange] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Patterns(Generic[Array]):
    """Attention maps (layer, head, row, column) of `layers` and `heads`.

    With a `block` of 1, rows are queries and columns are keys. Otherwise each number is the largest one of `block`
    queries and `block` keys.
    """

    model: str
    tokens: tuple[Token, ...]
    stage: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    block: int
    values: Array
    edits: tuple[AppliedEdit, ...] = ()


@dataclass(frozen=True)
class HeadShare:
    """The share of one head in a logit."""

    layer: int
    head: int
    share: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Attribution(StageArrays[Array]):
    """The answer of POST /attribute.

    `attribution["blocks.0.attn.z"]` is the array of a stage, for the methods whose answers have stages. `answer` has
    all other fields of the answer, as docs/api.md lists them.
    """

    method: str
    model: str
    tokens: tuple[Token, ...]
    answer: Mapping[str, Any] = field(repr=False)

    def top_heads(self, count: int = 10) -> list[HeadShare]:
        """The heads with the largest shares, positive or negative, for the method "direct"."""
        shares = [
            HeadShare(layer, head, share)
            for layer, entry in enumerate(self.answer["layers"])
            for head, share in enumerate(entry["heads"])
        ]
        return sorted(shares, key=lambda each: -abs(each.share))[:count]


@dataclass(frozen=True)
class SweepCell:
    """One patch of a sweep, and the value of the target after it.

    `position` or `head` is None if all selected ones are patched together, or if the stage has no heads.
    """

    stage: str
    position: int | None
    head: int | None
    value: float


@dataclass(frozen=True)
class Hint:
    """A known mistake that explains a difference."""

    code: str
    message: str


@dataclass(frozen=True)
class ComparedStage:
    """How B's value of a stage differs from A's; docs/comparing.md explains the errors. None: not a finite number."""

    name: str
    differs: bool
    error: float | None
    noise: float | None
    inherited: float | None
    added: float | None
    added_noise: float | None
    max_difference: float | None
    max_index: tuple[int, ...]
    cosine: float | None
    scale: float | None
    mismatches: int
    layout: str | None
    per_position: tuple[float | None, ...] | None = None
    per_head: tuple[float | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The first stage at which B differs from the served model A, and known mistakes that explain the difference.

    `stages` has every stage that was compared, by name, in the order of computation. `logits` has the KL divergence and
    how often both find the same token most likely; it is None if B has no logits.
    """

    a: str
    b: str
    dtype: str
    num_tokens: int
    differs: bool
    first_stage: str | None
    last_equal_stage: str | None
    differing_stages: tuple[str, ...]
    hints: tuple[Hint, ...]
    logits: Mapping[str, float | None] | None
    stages: Mapping[str, ComparedStage] = field(repr=False)
    not_compared: tuple[str, ...]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability, and the most likely tokens at its place.

    `logprob` is None for the first token of an echoed prompt.
    """

    id: int
    text: str | None
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. `cached_tokens` counts the prompt tokens that an earlier request had computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[Array]):
    """One continuation. `finish_reason` is "stop", "length" or "cancelled".

    `stop_reason` is the stop string or the id of the stop token that ended the text.
    """

    choice: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    trace: tuple[StepTrace[Array], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Generation(Choice[Array]):
    """The first continuation, and all of them in `choices`. `timings` are in seconds.

    If the call has edits, `edits` says what each has matched. With `baseline=True`, `baseline` has the continuations
    without edits, and `changes` how far the edits moved the residuals of each choice.
    """

    id: str
    model: str
    choices: tuple[Choice[Array], ...] = field(repr=False)
    timings: Mapping[str, float | None]
    edits: tuple[AppliedEdit, ...] = ()
    baseline: tuple[Choice[Array], ...] = field(default=(), repr=False)
    changes: tuple[Mapping[str, StageChange], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Finish:
    """How one continuation of a stream ended."""

    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timings: Mapping[str, float | None]
    edits: tuple[AppliedEdit, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StreamEvent(Generic[Array]):
    """One event of a stream: a token of continuation `choice` with the text that it completes, or the end of a choice.

    `token` is None in events that trace a part of a long prompt, and in the last event of a choice, which has `finish`.
    """

    choice: int
    text: str
    token: TokenLogprob | None = None
    trace: StepTrace[Array] | None = None
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """The answer to a conversation. Append `message` to the messages before you ask the next question.

    `text` is None if the model answered with tool calls alone; they are in `message`.
    """

    id: str
    model: str
    text: str | None
    message: Mapping[str, Any]
    finish_reason: str
    usage: Usage
    edits: tuple[AppliedEdit, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatEvent:
    """One event of a streamed chat answer: a piece of its text, or its end with `finish_reason`.

    `delta` is the change of the message as the server sent it.
    """

    text: str
    delta: Mapping[str, Any]
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The served model. `stages` are pairs of a name and the names of its axes, in the order of computation."""

    name: str
    device: str
    dtype: str
    quantization: str
    config: Mapping[str, Any]
    parameters: Mapping[str, Any]
    generation_defaults: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    stages: tuple[tuple[str, tuple[str, ...]], ...]
    limits: Mapping[str, int]
    capabilities: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """A name for the field `model`: the served checkpoint, an adapter, or a worked example.

    A worked example has the title and the prompt of its article.
    """

    name: str
    kind: str
    title: str | None
    prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """What a server does at a moment. `cache` is None if no checkpoint is served. docs/api.md describes the fields."""

    version: str
    model: str | None
    ready: bool
    uptime_seconds: float
    requests_running: int
    requests_waiting: int
    sequences_running: int
    sequences_waiting: int
    max_sequences: int
    cache: Mapping[str, int] | None
    tokens_per_second: Mapping[str, float]
