"""POST /v1/chat/completions: answer a conversation, in the form of OpenAI's API."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from model.text.tokenizer import Tokenizer
from model.text.transcript import End, TokenOutput
from service.answers.call_ids import demands_short_ids, new_call_id
from service.answers.chat_constraints import chat_constraint
from service.answers.constraints import compile_constraint
from service.answers.conversations import conversation_ids, find_template
from service.answers.generation import Choice, ChoiceOutput, Generation, start_generation, whole_answer
from service.answers.generation_plan import Inputs, Options
from service.answers.offered_tools import OfferedTools, read_tools
from service.answers.openai_answers import (
    TokenStrings,
    check_implemented,
    edits,
    finish_reason,
    prompt_logprobs,
    running_usage,
    usage,
    usage_events,
)
from service.answers.tool_calls import MARK_TOKENS, Call, ToolCallParser, form_of
from service.http.bodies import JsonRoute
from service.http.errors import invalid, wrong_shape
from service.http.openai_schemas import ChatAnswer, ChatRequest
from service.http.openapi import EVENT, also
from service.http.sse import EventStream, event
from service.ignored_fields import is_strict, note_ignored
from service.state import CheckpointDep, State, StateDep, find_adapter

router = APIRouter(route_class=JsonRoute, tags=["openai"])
DEFAULT_LARGE_MAX_TOKENS = 1024  # with log-probabilities or a trace for each token


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation, in OpenAI's form",
    response_model=ChatAnswer,
    responses=also("text/event-stream", EVENT),
)
async def chat(body: ChatRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    arrived = time.perf_counter()
    adapter = find_adapter(checkpoint, body.model, body.adapter)
    check_implemented(body)
    options = read_options(body)
    template = find_template(checkpoint)
    tools = find_tools(body, request, state)
    source = template.source_for(with_tools=bool(tools.offered))
    form = form_of(source)
    if tools.enforced and body.stop:
        body = without_stop(body, request, state)
    ids = await conversation_ids(body, tools, request, state, checkpoint, template)
    constraint = await compile_constraint(request, state, chat_constraint(body, tools, form))
    inputs = Inputs(request, state, checkpoint, arrived, body, options, [ids], constraint, adapter)
    generation = await start_generation(inputs)
    names = [function.name for function in tools.offered]
    new_id = partial(new_call_id, is_short=demands_short_ids(source))
    writer = Writer(body, generation, [ToolCallParser(form, names, new_id) if names else None for _ in range(body.n)])
    if body.stream:
        return EventStream(generation.events(writer.events, writer.last_events), on_close=generation.close)
    return await whole_answer(request, generation, writer.answer())


def find_tools(body: ChatRequest, request: Request, state: State) -> OfferedTools:
    """The tools of a request. Tools of types that nobody here runs are left out, or a 422 if the request is strict."""
    tools = read_tools(body)
    if is_strict(request.scope, state.settings.strict_fields) and tools.left_out:
        raise wrong_shape(f"{tools.left_out[0]}.type", "only tools of the type 'function' are known", "literal_error")
    note_ignored(request.scope, tools.left_out)
    return tools


def without_stop(body: ChatRequest, request: Request, state: State) -> ChatRequest:
    """The same request without stop strings, which could end the text inside a call that the request demands."""
    if is_strict(request.scope, state.settings.strict_fields):
        raise invalid("stop", "cannot be combined with a tool_choice that demands a call; leave out one of them")
    note_ignored(request.scope, ["stop"])
    return body.model_copy(update={"stop": []})


def read_options(body: ChatRequest) -> Options:
    """The fields that only this route has. Raises 400 for fields that contradict each other."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", f"{body.max_tokens} is not max_completion_tokens; send only one of them")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "0 generates nothing; send at least 1")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is only for answers with log-probabilities; send logprobs: true")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for streams; send stream: true")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    max_tokens_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return Options(
        id_prefix="chatcmpl",
        max_tokens=max_tokens,
        # Memory for the whole answer is reserved, which would be much for a long context.
        default_max_tokens=DEFAULT_LARGE_MAX_TOKENS if body.logprobs or body.trace is not None else None,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        is_chat=True,
        field_names={"prompt": "messages", "max_tokens": max_tokens_name},
    )


class Writer:
    """Writes the answer of a generation, whole or as the chunks of a stream.

    `parsers` has a parser of calls for each choice, or None if the request has no tools.
    """

    def __init__(self, body: ChatRequest, generation: Generation, parsers: Sequence[ToolCallParser | None]) -> None:
        self._body = body
        self._generation = generation
        self._parsers = parsers
        self._strings = TokenStrings(generation.checkpoint.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._marks = mark_names(generation.checkpoint.tokenizer) if any(parsers) else {}
        self._has_begun = [False] * generation.num_choices
        self._head = {
            "id": generation.id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": generation.model_name,
        }

    async def answer(self) -> bytes:
        """Wait until every choice has ended, and encode the answer."""
        choices = await self._generation.collect()
        return await self._generation.encode(lambda: self._answer(choices))

    def _answer(self, choices: list[Choice]) -> dict[str, Any]:
        answers = []
        for choice in choices:
            assert choice.last is not None
            assert choice.last.end is not None
            content, calls = self._parse(choice.index, choice.tokens, is_last=True)
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": [call_answer(call) for call in calls]}
            traces = choice.traces if self._generation.is_traced else None
            answers.append({"message": message} | self._part(choice.index, choice.tokens, traces, choice.last.end))
        answer = self._head | {"choices": answers, "usage": usage(self._generation)}
        return answer | self._prompt_ids(0) | self._prompt_logprobs(0, choices[0].prompt_tokens)

    def events(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Write the chunks for the output of one step. The first chunk of each choice has the role."""
        step, index = output.result, output.index
        if not self._has_begun[index]:
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._chunk({"choices": [first | {"finish_reason": None}]} | self._prompt_ids(index))
            self._has_begun[index] = True
        num_calls = self._num_calls(index)
        content, calls = self._parse(index, step.tokens, is_last=step.end is not None)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": place} | call_answer(call) for place, call in enumerate(calls, num_calls)]
        traces = None if output.trace is None else [output.trace]
        of_prompt = self._prompt_logprobs(index, step.prompt_tokens)
        if delta or step.end is not None or traces or of_prompt or (step.tokens and self._body.logprobs):
            part = {"delta": delta} | self._part(index, step.tokens, traces, step.end)
            yield self._chunk({"choices": [part]} | of_prompt)

    def _chunk(self, content: dict[str, Any]) -> bytes:
        return event(self._head | content | running_usage(self._body, self._generation))

    def last_events(self) -> list[bytes]:
        return usage_events(self._body, self._head, self._generation)

    def _parse(self, index: int, tokens: Sequence[TokenOutput], *, is_last: bool) -> tuple[str, list[Call]]:
        """The content and the calls that some tokens complete."""
        parser = self._parsers[index]
        if parser is None:
            return "".join(token.text for token in tokens), []
        found = parser.push("".join(self._marks.get(token.token_id, "") + token.text for token in tokens))
        if not is_last:
            return found.content, found.calls
        rest = parser.finish()
        return found.content + rest.content, found.calls + rest.calls

    def _num_calls(self, index: int) -> int:
        parser = self._parsers[index]
        return 0 if parser is None else parser.num_calls

    def _part(
        self, index: int, tokens: list[TokenOutput], traces: list[orjson.Fragment] | None, end: End | None
    ) -> dict[str, Any]:
        """Describe a choice, or the new part of it, without its message."""
        reason = None if end is None else finish_reason(end, self._generation)
        part: dict[str, Any] = {
            "index": index,
            "logprobs": {"content": [self._logprob(token) for token in tokens], "refusal": None}
            if self._body.logprobs
            else None,
            "finish_reason": "tool_calls" if reason == "stop" and self._num_calls(index) else reason,
            "stop_reason": None if end is None else end.stop_reason,
        }
        if self._body.return_token_ids:
            part["token_ids"] = [token.token_id for token in tokens]
        if traces is not None:
            part["trace"] = traces
        return part if end is None else part | edits(self._generation, index)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The ids of the prompt, if the request asks for them. They are the same for all choices."""
        return {"prompt_token_ids": self._generation.prompts[0]} if self._body.return_token_ids and index == 0 else {}

    def _prompt_logprobs(self, index: int, prompt_tokens: list[TokenOutput]) -> dict[str, Any]:
        """The log-probabilities of the prompt's tokens, if the request asks for them."""
        num_top = self._body.prompt_logprobs
        if num_top is None or index != 0 or not prompt_tokens:
            return {}
        return {"prompt_logprobs": prompt_logprobs(prompt_tokens, num_top, self._strings)}

    def _logprob(self, token: TokenOutput) -> dict[str, Any]:
        assert token.logprobs is not None
        own = self._token(token.token_id, token.logprobs.chosen)
        return own | {"top_logprobs": [self._token(*pair) for pair in token.logprobs.top]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._strings.raw(token_id)
        return {"token": self._strings.text(token_id), "logprob": logprob, "bytes": None if raw is None else list(raw)}


def mark_names(tokenizer: Tokenizer | None) -> dict[int, str]:
    """The marks of calls that are special tokens, which have no text of their own: id -> name."""
    if tokenizer is None:
        return {}
    ids = {tokenizer.id_of(name): name for name in MARK_TOKENS}
    return {token_id: ids[token_id] for token_id in ids if token_id is not None and tokenizer.special_name(token_id)}


def call_answer(call: Call) -> dict[str, Any]:
    """Describe a call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
