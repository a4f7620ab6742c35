"""POST /infill: write the text between a prefix and a suffix, in the form of llama-server."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.results.infill import InfillAnswer, InfillLogprob, InfillPart, InfillToken
from model.text.fill_in_middle import middle_prompt, other_files
from model.text.tokenizer import Tokenizer
from model.text.transcript import TokenOutput
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.generation import ChoiceOutput, Generation, start_generation
from service.answers.generation_plan import Inputs, Options
from service.answers.openai_answers import TokenStrings, finish_reason, with_top
from service.answers.prompts import tokenize
from service.http.bodies import JsonRoute
from service.http.errors import invalid, no_effect
from service.http.infill_schemas import InfillRequest
from service.http.openapi import EVENT, also
from service.http.sse import EventStream, event

router = APIRouter(route_class=JsonRoute, tags=["text"])
DEFAULT_MAX_TOKENS = 128


@router.post(
    "/infill",
    summary="Fill in the middle of a text, in llama-server's form",
    response_model=InfillAnswer | InfillPart,
    responses=also("text/event-stream", EVENT),
)
async def infill(body: InfillRequest, route: CallDep) -> Response:
    call = model_call(body, route)
    call.leave_out(["samplers"] if body.samplers else [], no_effect)
    prompt, param = await read_prompt(body, call)
    options = Options(
        id_prefix="infill-",
        max_tokens=None if body.n_predict == -1 else body.n_predict,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        n=1,
        logprobs=body.n_probs or None,
        field_names={"prompt": param, "max_tokens": "n_predict"},
    )
    generation = await start_generation(Inputs(call, body, options, [prompt]))
    writer = Writer(body, generation)
    if body.stream:
        return EventStream(generation.events(writer.events, done=b""), on_close=generation.close)
    return await generation.respond(writer.answer)


async def read_prompt(body: InfillRequest, call: ModelCall) -> tuple[list[int], str]:
    """The token ids of the prompt, and the field that has the most of it, which errors name."""
    tokenizer = call.checkpoint.tokenizer
    if tokenizer is None or middle_prompt(tokenizer, (), ()) is None:
        reason = "the tokenizer of this model has no tokens to fill in the middle; use POST /v1/completions"
        raise invalid("input_prefix", reason)
    texts = {name: getattr(body, name) for name in ("input_prefix", "input_suffix", "prompt")}
    files = [(file.filename, file.text) for file in body.input_extra]
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    sizes["input_extra"] = sum(len(name.encode()) + len(text.encode()) for name, text in files)
    param = max(sizes, key=lambda name: sizes[name])
    encode = partial(encode_prompt, tokenizer, texts, files, call.checkpoint.model.config.max_positions)
    return await tokenize(call, encode, sum(sizes.values()), param), param


def encode_prompt(
    tokenizer: Tokenizer, texts: dict[str, str], files: Sequence[tuple[str, str]], max_tokens: int
) -> list[int]:
    """The token ids of the other files, of the texts around the middle, and of the beginning of the middle."""
    ids = {
        name: tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens) for name, text in texts.items()
    }
    middle = middle_prompt(tokenizer, ids["input_prefix"], ids["input_suffix"])
    assert middle is not None, "`read_prompt` has looked for the tokens"
    before = other_files(tokenizer, files, max_tokens) if files else []
    return [*tokenizer.encode(""), *before, *middle, *ids["prompt"]]


class Writer:
    """Writes the answer of a generation, whole or as the events of a stream."""

    def __init__(self, body: InfillRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._strings = TokenStrings(generation.call.checkpoint.tokenizer, as_ids=False)

    def answer(self, choices: list[ChoiceOutput]) -> InfillAnswer:
        (choice,) = choices
        return self._end(choice)

    def events(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Write the event for the output of one step."""
        if output.last.end is not None:
            yield event(self._end(output))
        elif output.tokens or output.traces is not None:
            yield event(InfillPart(stop=False, **self._fields(output)))

    def _end(self, output: ChoiceOutput) -> InfillAnswer:
        """The whole answer, or the last part of it."""
        end = output.last.end
        assert end is not None
        is_limit, word = finish_reason(end, self._generation) == "length", end.stop_reason
        return InfillAnswer(
            stop=True,
            id=self._generation.id,
            model=self._generation.model_name,
            stop_type="limit" if is_limit else "word" if isinstance(word, str) else "eos",
            stopping_word=word if isinstance(word, str) else "",
            tokens_cached=self._generation.num_cached,
            edits=self._generation.edit_answers(0),
            **self._fields(output),
        )

    def _fields(self, output: ChoiceOutput) -> dict[str, Any]:
        body, generation, tokens = self._body, self._generation, output.tokens
        return {
            "content": "".join(token.text for token in tokens),
            "tokens": [token.token_id for token in tokens] if body.stream or body.return_tokens else (),
            "tokens_predicted": generation.num_generated,
            "tokens_evaluated": generation.num_prompt,
            "completion_probabilities": [self._token(token) for token in tokens] if body.n_probs else None,
            "trace": output.traces,
        }

    def _token(self, token: TokenOutput) -> InfillToken:
        return with_top(token, self._logprob, InfillLogprob, InfillToken)

    def _logprob(self, token_id: int, logprob: float) -> tuple[int, str, list[int], float]:
        return token_id, self._strings.text(token_id), list(self._strings.raw(token_id) or b""), logprob
