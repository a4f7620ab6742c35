"""POST /generate: continue a prompt. The answer is sent whole, or streamed token by token as Server-Sent Events."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.local_results import describe_logprobs, describe_top_logprobs
from forwardscope.results import generations
from model.engine.request import Output
from model.text.transcript import TokenOutput
from service.answers.call import CallDep, model_call
from service.answers.edits import check_baseline
from service.answers.generation import ChoiceOutput, Generation, start_generation
from service.answers.generation_changes import changes_answer
from service.answers.generation_plan import Inputs, Options
from service.answers.prompts import prompt_ids
from service.http.bodies import JsonRoute
from service.http.errors import invalid
from service.http.generate_schemas import GenerateRequest
from service.http.openapi import EVENT, also
from service.http.sse import EventStream, event

router = APIRouter(route_class=JsonRoute, tags=["text"])
DEFAULT_MAX_TOKENS = 128


@router.post(
    "/generate",
    summary="Continue a prompt, whole or streamed",
    response_model=generations.Generation,
    responses=also("text/event-stream", EVENT),
)
async def generate(body: GenerateRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "0 generates nothing; send at least 1, or ask for the prompt with echo")
    ids = await prompt_ids(call, body.prompt)
    options = Options(
        id_prefix="gen-",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        n=body.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        echo=body.echo,
        baseline=body.baseline,
    )
    if body.baseline:
        check_baseline(body.edits)
        if body.stream:
            reason = "cannot be streamed, because the runs are compared at their end; leave out stream"
            raise invalid("baseline", reason)
        if body.scales is not None:
            raise invalid("baseline", "is for one run of the edits; leave it out, and send 0 among the scales")
    prompts = [ids] * len(body.scales or [None])
    generation = await start_generation(Inputs(call, body, options, prompts, scales=body.scales))
    if body.stream:
        return EventStream(generation.events(Events(generation)), on_close=generation.close)
    return await generation.respond_with(answer(generation, body.baseline))


class Events:
    """Writes the events of a stream: one for each token, and one for the end of each choice."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __call__(self, output: ChoiceOutput) -> Iterator[bytes]:
        yield from self._token_events(output)
        if output.last.end is not None:
            generation = self._generation
            edits = generation.edit_answers(output.index)
            end = {**end_fields(output.last), "timings": generation.timings(), "edits": edits}
            yield event(generations.FinishEvent(generation.id, output.index, **end))

    def _token_events(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Yield an event for each token. The last one has the trace; without tokens, the trace has its own event."""
        generation, index = self._generation, output.index
        trace: Any  # the JSON of a `StepTrace`
        (trace,) = output.traces or (None,)
        tokens = [*output.prompt_tokens, *output.tokens]
        for token in tokens:
            last = trace if token is tokens[-1] else None
            yield event(generations.TokenEvent(generation.id, index, self._token(token), token.text, last))
        if trace is not None and not tokens:
            yield event(generations.TokenEvent(generation.id, index, None, "", trace))

    def _token(self, token: TokenOutput) -> generations.EventToken:
        if self._generation.params.logprobs is None:
            return generations.EventToken(token.token_id, None)
        logprob = None if token.logprobs is None else token.logprobs.chosen  # nothing predicts a prompt's first token
        return generations.EventToken(token.token_id, logprob, describe_top_logprobs(token, self._generation.text_of))


async def answer(generation: Generation, has_baseline: bool) -> bytes:
    """Wait until every choice has ended, and encode the answer. With a baseline, its choices follow the others."""
    collected = await generation.collect()
    num_own = len(collected) - (generation.params.n if has_baseline else 0)
    own, plain = collected[:num_own], collected[num_own:]
    changed = tuple([await changes(choice, generation) for choice in own]) if plain else ()
    return await generation.encode(lambda: describe(generation, own, plain, changed))


def describe(
    generation: Generation,
    own: list[ChoiceOutput],
    plain: list[ChoiceOutput],
    changed: tuple[generations.ChoiceChanges, ...],
) -> generations.Generation:
    """Describe a generation: its choices, those of the baseline, and what the edits changed."""
    choices = [generations.Choice(**choice_fields(choice, generation)) for choice in own]
    every: Any = tuple(choices) if len(choices) > 1 else None  # null in JSON
    baseline = [
        choice_fields(choice, generation) | {"choice": index, "trace": None} for index, choice in enumerate(plain)
    ]
    return generations.Generation(
        id=generation.id,
        model=generation.model_name,
        **vars(choices[0]),
        choices=every,
        timings=generation.timings(),
        edits=generation.edit_answers(0),
        baseline=generations.Choices(tuple(generations.Choice(**fields) for fields in baseline)),
        changes=changed,
    )


async def changes(choice: ChoiceOutput, generation: Generation) -> generations.ChoiceChanges:
    """Describe how far the edits have moved the residuals of a choice."""
    edits = generation.edits[0]
    assert edits is not None
    ids = [*generation.prompts[0], *(token.token_id for token in choice.tokens[:-1])]
    return generations.ChoiceChanges(choice.index, await changes_answer(generation.call, edits, ids))


def choice_fields(choice: ChoiceOutput, generation: Generation) -> dict[str, Any]:
    """The fields of a choice."""
    tokens = [*choice.prompt_tokens, *choice.tokens]
    has_logprobs = generation.params.logprobs is not None
    return {
        "choice": choice.index,
        "text": "".join(token.text for token in tokens),
        "tokens": tuple(token.token_id for token in tokens),
        "logprobs": tuple(describe_logprobs(token, generation.text_of) for token in tokens) if has_logprobs else None,
        "trace": None if choice.traces is None else tuple(choice.traces),
        **end_fields(choice.last),
    }


def end_fields(output: Output) -> dict[str, Any]:
    """The fields that say how a choice ended."""
    assert output.end is not None
    return {
        "finish_reason": output.end.finish_reason,
        "stop_reason": output.end.stop_reason,
        "usage": generations.Usage(output.num_prompt, output.num_generated, output.num_cached),
    }
