"""The results of POST /generate: whole answers, and the events of a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal

from forwardscope.errors import InvalidArgument
from forwardscope.results.passes import AppliedEdits, StageChange
from forwardscope.results.records import Array, Doc, Fields, Named, Number, OrNull, Record
from forwardscope.results.stages import PositionPredictions, Prediction, Stage, StageArrays, Token
from forwardscope.tensor_files import NumpyArray

if TYPE_CHECKING:
    from forwardscope.plots import Picture

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Logprob(Token):
    logprob: float | None


class TokenLogprob(Logprob):
    """A token with its log-probability under the network's own distribution, before sampling parameters.

    `logprob` is null for the first token of an echoed prompt.
    """

    top: Sequence[Logprob]


class Usage(Fields):
    """Counts of tokens. `cached_tokens` counts the prompt tokens that an earlier request had computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerationTimings(Fields):
    queue_seconds: float
    time_to_first_token_seconds: Annotated[float | None, Doc("null if there was no token")]
    total_seconds: float


class LensLayer(Record):
    """The most likely tokens after one block, and the probability that it gives to the token that was chosen."""

    layer: int
    top: Sequence[Prediction]
    chosen_probability: Annotated[Number, Doc("probability, at this layer, of the token that was finally chosen")]


class ConstraintEffect(Record):
    """The effect of structured output on the token that the step chose, under the network's own distribution."""

    logprob: Annotated[float, Doc("log-probability of the token")]
    constrained_logprob: Annotated[float, Doc("its log-probability among the tokens that the grammar allows")]
    removed_mass: Annotated[float, Doc("probability of all tokens that the grammar excludes")]


class StepTrace(Record, StageArrays[Array], eq=False, kw_only=True):
    """The trace of one step: the positions that it computed, and their stages as in /forward.

    The dim `key` of attention stages has all positions up to the last one that the step computed.
    """

    positions: tuple[int, ...]
    stages: tuple[Stage[Array], ...]
    predictions: tuple[PositionPredictions, ...]
    logit_lens: tuple[LensLayer, ...] | None
    constraint: Annotated[
        ConstraintEffect | None, Doc("null without structured output, and for steps that chose no token")
    ]


class Choice(Record, Generic[Array], kw_only=True):
    """One continuation."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    trace: tuple[StepTrace[Array], ...] | None
    finish_reason: FinishReason
    stop_reason: Annotated[
        str | int | None, Doc("the stop string, the id of the stop token, or the reason of a cancellation")
    ]
    usage: Usage

    def plot(self) -> "Picture":
        """A picture of the logit lens of each step: the most likely token after each block. The call must ask for it.

        It needs `pip install "forwardscope[plots]"`.
        """
        from forwardscope.plots import draw_lens, plain

        steps = [(step.logit_lens, step.predictions) for step in self.trace or () if step.logit_lens]
        if not steps:
            raise InvalidArgument("trace", 'has no logit lens; generate with trace={"logit_lens": True}')
        layers = [[lens[index].top[0] for lens, _ in steps] for index in range(len(steps[0][0]))]
        chosen = [plain(predictions[-1][0].text) if predictions else "" for _, predictions in steps]
        return draw_lens(layers, [f"block {each}" for each in range(len(layers))], chosen)


class Choices(Record, Generic[Array]):
    """The choices of the generation without edits. They have no trace."""

    choices: tuple[Choice[Array], ...]

    def __iter__(self) -> Iterator[Choice[Array]]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)


NO_CHOICES: Choices[Any] = Choices(())


class ChoiceChanges(Record):
    """How far the residuals of a choice are from those that the network computes for the same tokens without edits."""

    choice: int
    stages: Named[StageChange]

    def __getitem__(self, name: str) -> StageChange:
        return self.stages[name]


class GenerationHead(Record, kw_only=True):
    """The first fields of an answer."""

    id: str
    model: str


class Generation(Choice[Array], GenerationHead, kw_only=True):
    """The first continuation. With n above 1, `choices` holds all of them, the first one included."""

    choices: Annotated[tuple[Choice[Array], ...], OrNull(), Doc("null if there is only one")] = field(repr=False)
    timings: GenerationTimings
    edits: AppliedEdits = ()
    baseline: Annotated[Choices[Array], Doc("the generation without edits")] = field(default=NO_CHOICES, repr=False)
    changes: Annotated[tuple[ChoiceChanges, ...], Doc("with baseline")] = field(default=(), repr=False)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Any:
        only = Choice(**{each.name: values[each.name] for each in fields(Choice)})
        return cls(**values | {"choices": values["choices"] or (only,)})


class EventToken(Record):
    id: int
    logprob: float | None
    top: Sequence[Logprob] | None = None


class TokenEvent(Record, Generic[Array]):
    """One token of a stream, and the text that it completes. The stream ends with one `FinishEvent` per choice.

    `trace` is there if the request asks for it. `token` is null in events that trace a part of a long prompt.
    """

    id: str
    choice: int
    token: EventToken | None
    text: str
    trace: StepTrace[Array] | None = None
    finish = None


class FinishEvent(Record):
    """The end of one continuation of a stream, which adds no text."""

    id: str
    choice: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: GenerationTimings
    edits: AppliedEdits = ()
    token = trace = None
    text = ""

    @property
    def finish(self) -> "FinishEvent":
        return self


StreamEvent = TokenEvent[NumpyArray] | FinishEvent
"""One event of a stream: a token of continuation `choice`, or the end of the continuation, which has `finish`."""
