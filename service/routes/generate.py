"""POST /generate: continue a prompt. The answer is sent whole, or streamed token by token as Server-Sent Events."""

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from model.engine.request import Output
from model.text.transcript import TokenOutput
from service.answers.constraints import compile_constraint, structured_output
from service.answers.edits import check_baseline
from service.answers.generation import Choice, ChoiceOutput, Generation, whole_answer
from service.answers.generation_changes import changes_answer
from service.answers.generation_plan import Options, plan_generation
from service.answers.prompts import prompt_ids
from service.answers.stage_answers import TextOf
from service.http.bodies import JsonRoute
from service.http.errors import invalid
from service.http.generate_schemas import GenerateAnswer, GenerateRequest
from service.http.openapi import EVENT, answers
from service.http.sse import EventStream, event
from service.state import CheckpointDep, State, StateDep, find_adapter

router = APIRouter(route_class=JsonRoute, tags=["text"])
DEFAULT_MAX_TOKENS = 128


@router.post(
    "/generate",
    summary="Continue a prompt, whole or streamed",
    response_model=None,
    responses=answers(GenerateAnswer, "text/event-stream", EVENT),
)
async def generate(body: GenerateRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    arrived = time.perf_counter()
    adapter = find_adapter(checkpoint, body.model, body.adapter)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "0 generates nothing; send at least 1, or ask for the prompt with echo")
    ids = await prompt_ids(request, state, checkpoint, body.prompt)
    options = Options(
        id_prefix="gen",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=body.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        echo=body.echo,
        baseline=body.baseline,
    )
    check_baseline(body.baseline, body.edits)
    if body.baseline and body.stream:
        raise invalid("baseline", "cannot be streamed, because the runs are compared at their end; leave out stream")
    constraint = await compile_constraint(request, state, checkpoint, structured_output(body.structured_outputs))
    plan = await plan_generation(body, options, request, state, checkpoint, [ids], constraint, adapter, arrived)
    generation = Generation(plan, request, state, checkpoint, arrived)
    if body.stream:
        return EventStream(generation.events(Events(generation)), on_close=generation.close)
    return await whole_answer(request, generation, answer(generation, state, adapter))


class Events:
    """Writes the events of a stream: one for each token, and one for the end of each choice."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __call__(self, output: ChoiceOutput) -> Iterator[bytes]:
        yield from self._token_events(output)
        if output.step.end is not None:
            of_choice = {"id": self._generation.id, "choice": output.index, **end_answer(output.step)}
            edits = self._generation.edit_answers(output.index)
            yield event({**of_choice, "timings": self._generation.timings(), **edits})

    def _token_events(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Yield an event for each token. The last one has the trace; without tokens, the trace has its own event."""
        tokens: list[TokenOutput | None] = [*output.step.prompt_tokens, *output.step.tokens]
        tokens = tokens or ([None] if output.trace is not None else [])
        for index, token in enumerate(tokens):
            content: dict[str, Any] = {"id": self._generation.id, "choice": output.index, "token": None, "text": ""}
            if token is not None:
                content |= {"token": {"id": token.token_id, "logprob": None}, "text": token.text}
                if token.logprobs is not None:
                    top = top_logprobs(token, self._generation.text_of)
                    content["token"] |= {"logprob": token.logprobs.chosen, "top": top}
            if output.trace is not None and index == len(tokens) - 1:
                content["trace"] = output.trace
            yield event(content)


async def answer(generation: Generation, state: State, adapter: str | None) -> bytes:
    """Wait until every choice has ended, and encode the answer. With a baseline, its choices follow the others."""
    collected = await generation.collect()
    choices = [choice_answer(choice, generation) for choice in collected]
    own, baseline = choices[: generation.params.n], choices[generation.params.n :]
    content = {
        "id": generation.id,
        "model": generation.model_name,
        **own[0],
        "choices": own if len(own) > 1 else None,
        "timings": generation.timings(),
        **generation.edit_answers(0),
    }
    if baseline:
        for index, plain in enumerate(baseline):
            plain |= {"choice": index, "trace": None}
        content["baseline"] = {"choices": baseline}
        content["changes"] = [await changes(choice, generation, state, adapter) for choice in collected[: len(own)]]
    return generation.encode(content)


async def changes(choice: Choice, generation: Generation, state: State, adapter: str | None) -> dict[str, Any]:
    """Describe how far the edits have moved the residuals of a choice."""
    edits = generation.edits[0]
    assert edits is not None
    ids = [*generation.prompts[0], *(token.token_id for token in choice.tokens[:-1])]
    stages = await changes_answer(state, generation.checkpoint, adapter, edits, ids, generation.arrived)
    return {"choice": choice.index, "stages": stages}


def choice_answer(choice: Choice, generation: Generation) -> dict[str, Any]:
    """Describe one choice."""
    assert choice.last is not None
    tokens = [*choice.prompt_tokens, *choice.tokens]
    has_logprobs = generation.params.logprobs is not None
    return {
        "choice": choice.index,
        "text": choice.text,
        "tokens": [token.token_id for token in tokens],
        "logprobs": [logprob_answer(token, generation.text_of) for token in tokens] if has_logprobs else None,
        "trace": choice.traces if generation.is_traced else None,
        **end_answer(choice.last),
    }


def logprob_answer(token: TokenOutput, text_of: TextOf) -> dict[str, Any]:
    """Describe a token with its log-probability."""
    return {
        "id": token.token_id,
        "text": text_of(token.token_id),
        "logprob": None if token.logprobs is None else token.logprobs.chosen,
        "top": top_logprobs(token, text_of),
    }


def top_logprobs(token: TokenOutput, text_of: TextOf) -> list[dict[str, Any]]:
    """Describe the most likely tokens at the place of `token`."""
    return [
        {"id": token_id, "text": text_of(token_id), "logprob": logprob}
        for token_id, logprob in (token.logprobs.top if token.logprobs is not None else ())
    ]


def end_answer(output: Output) -> dict[str, Any]:
    """Describe how a choice ended."""
    assert output.end is not None
    return {
        "finish_reason": output.end.finish_reason,
        "stop_reason": output.end.stop_reason,
        "usage": {
            "prompt_tokens": output.num_prompt,
            "completion_tokens": output.num_generated,
            "cached_tokens": output.num_cached,
        },
    }
