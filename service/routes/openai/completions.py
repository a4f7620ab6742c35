"""POST /v1/completions: continue one or several prompts, in the form of OpenAI's API."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.results.openai import Completion, CompletionChoice, CompletionLogprobs
from model.text.fill_in_middle import middle_prompt
from model.text.transcript import TokenOutput
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.generation import ChoiceOutput, Generation, start_generation
from service.answers.generation_plan import Inputs, Options
from service.answers.openai_answers import ChunkTemplate, OpenAIWriter, finish_reason
from service.answers.prompts import as_list, param_of, prompt_ids
from service.http.bodies import JsonRoute
from service.http.errors import invalid
from service.http.openai_schemas import CompletionRequest
from service.http.openapi import EVENT, also
from service.http.sse import EventStream

router = APIRouter(route_class=JsonRoute, tags=["openai"])
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


@router.post(
    "/v1/completions",
    summary="Continue prompts, in OpenAI's form",
    response_model=Completion,
    responses=also("text/event-stream", EVENT),
)
async def completions(body: CompletionRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    options = read_options(body)
    prompts = await read_prompts(body, call)
    generation = await start_generation(Inputs(call, body, options, prompts))
    writer = Writer(body, generation)
    if body.stream:
        return EventStream(generation.events(writer.chunks, writer.last_chunks), on_close=generation.close)
    return await generation.respond(writer.answer)


def read_options(body: CompletionRequest) -> Options:
    """The fields that only this route has. Raises 400 for fields that contradict each other."""
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise invalid("max_tokens", "0 generates nothing; send at least 1, or ask for the prompt with echo")
    if body.best_of is not None and body.best_of < body.n:
        raise invalid("best_of", f"{body.best_of} is less than n, which is {body.n}")
    n = body.best_of or body.n
    if body.stream and n > body.n:
        raise invalid("best_of", "cannot be streamed, because the best choices are known only at the end")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for streams; send stream: true")
    echoed = body.logprobs if body.echo else None
    return Options(
        id_prefix="cmpl-",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        n=n,
        # The choices are ranked by their log-probabilities.
        logprobs=0 if body.logprobs is None and n > body.n else body.logprobs,
        prompt_logprobs=max((each for each in (body.prompt_logprobs, echoed) if each is not None), default=None),
        echo=body.echo,
        field_names={"n": "best_of"} if body.best_of is not None else {},
    )


async def read_prompts(body: CompletionRequest, call: ModelCall) -> list[list[int]]:
    """The token ids of each prompt. Raises 400 for a wrong one."""
    prompts, is_list = as_list(body.prompt)
    params = [param_of("prompt", index, is_list) for index in range(len(prompts))]
    read = partial(prompt_ids, call, add_special_tokens=body.add_special_tokens)
    if not body.suffix:
        return [await read(each, param) for each, param in zip(prompts, params, strict=True)]
    if body.echo:
        raise invalid("echo", "cannot be combined with suffix; leave one of them out")
    tokenizer = call.checkpoint.tokenizer
    special = [] if tokenizer is None or not body.add_special_tokens else tokenizer.encode("")
    read = partial(read, add_special_tokens=False)
    after = await read(body.suffix, "suffix")
    found = []
    for each, param in zip(prompts, params, strict=True):
        middle = tokenizer and middle_prompt(tokenizer, await read(each, param) if each else [], after)
        if not middle:
            raise invalid("suffix", "the tokenizer of this model has no tokens to fill in the middle; leave it out")
        found.append([*special, *middle])
    return found


class Writer(OpenAIWriter):
    """Writes the answer of a generation, whole or as the chunks of a stream."""

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        super().__init__(body, generation, Completion)
        self._body = body
        asks_more = body.logprobs is not None or body.return_token_ids or self._has_running_usage
        indices = range(generation.num_choices if body.stream and not asks_more else 0)
        self._templates = [ChunkTemplate(partial(self._text_chunk, index)) for index in indices]

    def answer(self, choices: list[ChoiceOutput]) -> Completion:
        num_generated, num_returned = self._generation.params.n, self._body.n
        returned = []
        for start in range(0, len(choices), num_generated):
            of_prompt = choices[start : start + num_generated]
            if num_returned < num_generated:
                of_prompt = sorted(of_prompt, key=mean_logprob, reverse=True)[:num_returned]
            returned += of_prompt
        answers = [self._part(index, choice) for index, choice in enumerate(returned)]
        return Completion(**self._head, choices=answers, usage=self._usage())

    def chunks(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Write one chunk for the output of one step."""
        if self._templates and output.traces is None and output.last.end is None and not output.prompt_tokens:
            yield self._templates[output.index].fill("".join([token.text for token in output.tokens]))
        else:
            yield self._chunk(self._part(output.index, output))

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Write a chunk that has nothing but a text of one choice."""
        return self._chunk(
            CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None, stop_reason=None)
        )

    def _part(self, index: int, choice: ChoiceOutput) -> CompletionChoice:
        """Describe a choice, or the new part of it. `index` is its number in the answer."""
        body, generation, end = self._body, self._generation, choice.last.end
        returned = [*choice.prompt_tokens, *choice.tokens] if body.echo else choice.tokens
        is_first, self._has_begun[choice.index] = not self._has_begun[choice.index], True
        trace: Any = choice.traces  # the JSON of each `StepTrace`
        has_ids = body.return_token_ids
        return CompletionChoice(
            index=index,
            text="".join(token.text for token in returned),
            logprobs=None if body.logprobs is None else self._logprobs(returned, body.logprobs),
            finish_reason=None if end is None else finish_reason(end, generation),
            stop_reason=None if end is None else end.stop_reason,
            prompt_logprobs=self._prompt_logprobs(choice.prompt_tokens),
            prompt_token_ids=generation.prompts[choice.index // generation.params.n] if has_ids and is_first else None,
            token_ids=[token.token_id for token in choice.tokens] if has_ids else None,
            trace=trace,
            edits=() if end is None else generation.edit_answers(choice.index),
        )

    def _logprobs(self, tokens: list[TokenOutput], num_top: int) -> CompletionLogprobs:
        """Describe the log-probabilities of tokens, and where the text of each begins."""
        entries = [token.logprobs for token in tokens]
        return CompletionLogprobs(
            [self._strings.text(token.token_id) for token in tokens],
            [None if entry is None else entry.chosen for entry in entries],
            [
                None if entry is None else self._strings.top(token.token_id, entry, num_top)
                for token, entry in zip(tokens, entries, strict=True)
            ],
            [token.offset for token in tokens],
        )


def mean_logprob(choice: ChoiceOutput) -> float:
    """The mean log-probability of the tokens of a choice, by which `best_of` ranks the choices."""
    values = [token.logprobs.chosen for token in choice.tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else 0.0
