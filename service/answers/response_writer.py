"""Write the answer of a chat as a response of OpenAI's Responses API, whole or as the events of a stream.

A response is a list of items: reasoning, messages and calls, in the order in which the model writes them. The whole
response is what its own events add up to.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from forwardscope.results.openai import CompletionTokensDetails
from forwardscope.results.responses import (
    ArgumentsDone,
    IncompleteDetails,
    ItemDelta,
    ItemEvent,
    ItemStatus,
    ModelResponse,
    OutputFunctionCall,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTopLogprob,
    PartEvent,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseInputDetails,
    ResponseUsage,
    TextDone,
    TraceEvent,
)
from model.text.transcript import TokenOutput
from service.answers.chat_pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from service.answers.chat_stream import ChatEnd, ChatOutput, ChatStream
from service.answers.generation import ChoiceOutput
from service.answers.openai_answers import TokenStrings, with_top
from service.http.encoding import open_json, to_json
from service.http.openai_schemas import Nullable, ResponseToolChoice
from service.http.responses_schemas import LOGPROBS, FunctionTool, ResponsesRequest
from service.http.sse import event_of

TEXT_MARK = "\0"  # the place of the text in `OpenItem.frame`; no other text of an event has it
NUMBER = b'"sequence_number":'
Kind = Literal["message", "reasoning", "function_call"]
KINDS: dict[type[Piece], Kind] = {Reasoning: "reasoning", Content: "message", CallArguments: "function_call"}
ID_PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
TEXTS: dict[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
"""The beginning of the types of events about the text of an item."""


@dataclass
class OpenItem:
    """The item that the model writes now. `index` is its place in the output."""

    kind: Kind
    index: int
    call: CallBegin | None = None
    id: str = field(init=False)
    texts: list[str] = field(default_factory=list)
    logprobs: list[OutputLogprob] = field(default_factory=list)
    frame: tuple[bytes, ...] = field(init=False)  # an event of a piece: before its number, before its text, after that

    def __post_init__(self) -> None:
        self.id = f"{ID_PREFIXES[self.kind]}{uuid.uuid4().hex}"
        before, _, rest = event_of(self.delta(0, TEXT_MARK, [])).partition(NUMBER + b"0")
        self.frame = (before + NUMBER, *rest.split(orjson.dumps(TEXT_MARK)))

    @property
    def place(self) -> dict[str, Any]:
        """The fields of its events that say where they belong."""
        place = {"output_index": self.index, "item_id": self.id}
        return place if self.call is not None else place | {"content_index": 0}

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def delta(self, number: int, text: str, logprobs: list[OutputLogprob]) -> ItemDelta:
        fields: Any = {"type": f"{TEXTS[self.kind]}.delta"} | ({"logprobs": logprobs} if self.kind == "message" else {})
        return ItemDelta(sequence_number=number, delta=text, **self.place, **fields)

    def part(self, text: str) -> OutputText | ReasoningText:
        if self.kind == "reasoning":
            return ReasoningText(text=text)
        return OutputText(text=text, annotations=(), logprobs=self.logprobs)

    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now. While it is in progress, it has no content."""
        head: dict[str, Any] = {"id": self.id, "status": status}
        has_begun = status == "in_progress"
        if self.call is not None:
            arguments = "" if has_begun else self.text
            return OutputFunctionCall(**head, call_id=self.call.id, name=self.call.name, arguments=arguments)
        content: Any = () if has_begun else (self.part(self.text),)
        if self.kind == "reasoning":
            return OutputReasoning(**head, summary=(), content=content)
        return OutputMessage(**head, content=content)


class ResponseWriter:
    """Writes one response.

    `settings` are its fields that repeat the request, from `request_settings`. `keep` stores the whole response, given
    as JSON, and its output; None: it is not stored.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        stream: ChatStream,
        settings: Mapping[str, bytes],
        keep: Callable[[bytes, Sequence[OutputItem]], None] | None,
    ) -> None:
        self._stream = stream
        self._generation = generation = stream.generation
        self._strings = TokenStrings(generation.call.checkpoint.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self.has_logprobs = LOGPROBS in body.include
        """Whether outputs must have one token each, because each piece gets the log-probabilities of its own tokens."""
        self._fields: dict[str, Any] = {
            **{name: orjson.Fragment(value) for name, value in settings.items()},
            "id": generation.id,
            "created_at": int(time.time()),
            "model": generation.model_name,
            "store": keep is not None,
            "temperature": generation.params.sampling.temperature,
            "top_p": generation.params.sampling.top_p,
        }
        self._keep = keep
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._tokens: list[TokenOutput] = []  # whose log-probabilities belong to the next piece
        self._number = 0  # of the next event
        self._end: ChatEnd | None = None

    def begin(self) -> bytes:
        """The first events, before anything is generated."""
        response = self._response("in_progress")
        return b"".join(
            self._event(ResponseEvent, type=kind, response=response)
            for kind in ("response.created", "response.in_progress")
        )

    def events(self, output: ChatOutput) -> Iterator[bytes]:
        """The events for the output of one step."""
        if self.has_logprobs:
            self._tokens += output.tokens
        for piece in output.pieces:
            yield from self._write(piece)
        for trace in output.traces or ():
            yield self._event(TraceEvent, trace=trace)
        if output.end is not None:
            self._end = output.end
            if self._open is None and not self._output:
                yield from self._begin_item("message")
            yield from self._close("incomplete" if output.end.finish_reason == "length" else "completed")

    def last_events(self) -> Iterator[bytes]:
        """The event with the whole response, unless it has failed."""
        if self._end is not None:
            response = self._whole()
            content = to_json(response)
            self.keep(content)
            yield self._event(ResponseEvent, type=f"response.{response.status}", response=orjson.Fragment(content))

    def keep(self, content: bytes) -> None:
        """Store the whole response, which has been encoded, if the request asks for that."""
        if self._keep is not None:
            self._keep(content, self._output)

    def failure(self, content: dict[str, Any]) -> bytes:
        """The event of an error."""
        error = content["error"]
        code: Any = "invalid_prompt" if error["type"] == "invalid_request_error" else "server_error"
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
        response = self._response("failed", error=ResponseError(code, error["message"]))
        return self._event(ResponseEvent, type="response.failed", response=response)

    def answer(self, choice: ChoiceOutput) -> ModelResponse:
        """The whole response, of a choice that has ended."""
        whole = self._stream.read_each(choice) if self.has_logprobs else [self._stream.read(choice)]
        for output in whole:
            for _ in self.events(output):
                pass
        return self._whole(trace=choice.traces)

    def _whole(self, **fields: Any) -> ModelResponse:
        """The response when all of its output has been written."""
        assert self._end is not None
        generation = self._generation
        num_input, num_cached, num_output = generation.num_prompt, generation.num_cached, generation.num_generated
        usage = ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=ResponseInputDetails(num_cached, num_input - num_cached),
            output_tokens=num_output,
            output_tokens_details=CompletionTokensDetails(self._stream.num_reasoning),
            total_tokens=num_input + num_output,
        )
        fields |= {"usage": usage, "edits": generation.edit_answers(0)}
        if self._end.finish_reason == "length":
            return self._response("incomplete", incomplete_details=IncompleteDetails("max_output_tokens"), **fields)
        return self._response("completed", completed_at=int(time.time()), **fields)

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], **fields: Any
    ) -> ModelResponse:
        """The response as it is now. Its output is what has been written."""
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return ModelResponse(**self._fields | nothing | {"status": status, "output": [*self._output]} | fields)

    def _write(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, CallBegin):
            yield from self._begin_item("function_call", piece)
            return
        kind = KINDS[type(piece)]
        if self._open is None or self._open.kind != kind:
            yield from self._begin_item(kind)
        yield self._delta(piece.text)

    def _delta(self, text: str) -> bytes:
        item = self._open
        assert item is not None
        item.texts.append(text)
        if self._tokens and item.kind == "message":
            logprobs = [with_top(token, self._token, OutputTopLogprob, OutputLogprob) for token in self._tokens]
            item.logprobs += logprobs
            frame = event_of(item.delta(self._number, text, logprobs))
        else:
            before, between, after = item.frame
            frame = b"%b%d%b%b%b" % (before, self._number, between, orjson.dumps(text), after)
        self._tokens = []
        self._number += 1
        return frame

    def _begin_item(self, kind: Kind, call: CallBegin | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        self._open = item = OpenItem(kind, len(self._output), call)
        in_progress = item.item("in_progress")
        yield self._event(ItemEvent, type="response.output_item.added", output_index=item.index, item=in_progress)
        if call is None:
            yield self._event(PartEvent, type="response.content_part.added", part=item.part(""), **item.place)

    def _close(self, status: ItemStatus) -> Iterator[bytes]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        if self._tokens and item.kind == "message":  # such as the token that ends the text
            yield self._delta("")
        if item.call is not None:
            yield self._event(ArgumentsDone, name=item.call.name, arguments=item.text, **item.place)
        else:
            fields = {"text": item.text} | ({"logprobs": item.logprobs} if item.kind == "message" else {})
            yield self._event(TextDone, type=f"{TEXTS[item.kind]}.done", **fields, **item.place)
            yield self._event(PartEvent, type="response.content_part.done", part=item.part(item.text), **item.place)
        done = item.item(status)
        yield self._event(ItemEvent, type="response.output_item.done", output_index=item.index, item=done)
        self._output.append(done)
        self._open = None

    def _event(self, kind: Any, **fields: Any) -> bytes:
        content = kind(sequence_number=self._number, **fields)
        self._number += 1
        return event_of(content)

    def _token(self, token_id: int, logprob: float) -> tuple[str, list[int], float]:
        return self._strings.text(token_id), list(self._strings.raw(token_id) or b""), logprob


def request_settings(body: ResponsesRequest) -> dict[str, bytes]:
    """The fields of a response that repeat its request, each as JSON, because several events have them."""
    wanted, tools = body.text and body.text.format, [tool for tool in body.tools if isinstance(tool, FunctionTool)]
    choice = body.tool_choice
    settings = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": {"type": "text"} if wanted is None else echo(wanted)},
        "tool_choice": echo(choice) if isinstance(choice, ResponseToolChoice) else choice or "auto",
        "tools": [{"parameters": None, "strict": False} | echo(tool) for tool in tools],
        "top_logprobs": body.top_logprobs,
        "truncation": "disabled",
    }
    return {name: open_json(value) for name, value in settings.items()}


def echo(part: Nullable) -> dict[str, Any]:
    """A part of a request as the answer repeats it."""
    sent = part.model_dump(by_alias=True, exclude_unset=True)
    return {"type": part.type} | sent  # type: ignore[attr-defined]  # all these parts have a type
