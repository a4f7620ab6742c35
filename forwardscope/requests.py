"""Every request of the clients, and how its answer is parsed. `Client` and `AsyncClient` send the requests.

The signature and docstring of each function here are those of the clients' method of the same name. `**fields` are
further fields of the request, as docs/api.md lists them; the server refuses unknown ones and names the nearest.
`adapter` is the name of a LoRA adapter that the server has loaded. `edits` change stages of the pass, and with
`baseline` the result also has the run without them; docs/interventions.md describes both.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from forwardscope import answers
from forwardscope.call import EVENTS, SAFETENSORS, Call, Request, StreamCall
from forwardscope.edits import to_array, to_edits, vector_file
from forwardscope.results import (
    Attribution,
    ChatAnswer,
    ChatEvent,
    Comparison,
    Generation,
    Logits,
    ModelInfo,
    Patterns,
    ServedModel,
    ServiceStatus,
    StoredVector,
    StreamEvent,
    SweepCell,
    Trace,
)
from forwardscope.tensor_files import NumpyArray, read_safetensors, write_base64

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]
Edits = Sequence[Mapping[str, Any]]
"""Changes of stages, as docs/interventions.md describes them; a `vector` may be an array or a tensor."""


def run(
    prompt: Prompt,
    stages: str | Sequence[str] = "*",
    *,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    targets: Sequence[int | None] | None = None,
    top_k: int | None = None,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    baseline: bool | None = None,
    **fields: Any,
) -> Call[Trace[NumpyArray]]:
    """Run one forward pass over a prompt and return the arrays of its stages.

    `stages` are globs over stage names, such as "blocks.*.attn.pattern". `positions` and `heads` select a part of each
    stage. `targets` has the correct next token of each position, for the loss; by default, the next token of the
    prompt. `top_k` is the number of predictions for each position.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        stages=[stages] if isinstance(stages, str) else list(stages),
        positions=to_indices(positions),
        heads=to_indices(heads),
        targets=None if targets is None else [None if each is None else operator.index(each) for each in targets],
        top_k=top_k,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        baseline=baseline,
        **fields,
    )
    request = Request("/forward", body, SAFETENSORS)
    return Call(request, lambda content: answers.trace(*read_safetensors(content), body.get("positions")))


def logits(
    prompt: Prompt,
    positions: Literal["last", "all"] | Sequence[int] = "last",
    *,
    top_k: int | None = None,
    logprobs: bool = False,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    baseline: bool | None = None,
    **fields: Any,
) -> Call[Logits[NumpyArray]]:
    """The logits of the next token, at the last position or at others.

    With `top_k`, only the logits of this many most likely tokens are returned. With `logprobs`, the logarithms of the
    probabilities are returned as well.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        positions=positions if isinstance(positions, str) else to_indices(positions),
        top_k=top_k,
        logprobs=logprobs,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        baseline=baseline,
        **fields,
    )
    return Call(Request("/logits", body, SAFETENSORS), lambda content: answers.logits(*read_safetensors(content)))


def patterns(
    prompt: Prompt,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    stage: Literal["pattern", "attn_scores", "scores"] = "pattern",
    max_size: int | None = None,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    **fields: Any,
) -> Call[Patterns[NumpyArray]]:
    """The attention maps of heads, (layer, head, query, key).

    With `max_size`, each map has at most so many rows and columns. Its numbers are then the largest ones of blocks of
    queries and keys.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        layers=to_indices(layers),
        heads=to_indices(heads),
        stage=stage,
        max_size=max_size,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        **fields,
    )
    return Call(Request("/patterns", body), parser(answers.patterns))


def compare(
    prompt: Prompt,
    stages: Mapping[str, Any] | None = None,
    *,
    path: str | None = None,
    setting: Mapping[str, str] | None = None,
    dtype: str | None = None,
    names: Mapping[str, str | None] | None = None,
    per_position: bool = False,
    per_head: bool = False,
    **fields: Any,
) -> Call[Comparison]:
    """Find the first stage at which another model, B, differs from the served one, and why.

    B is one of `stages` (arrays by name, of another program), `path` (of a file or checkpoint in the server's
    `--compare-directory`) and `setting` (the served model with another `dtype`, `quantize` or `kernels`). `dtype` is
    that in which B computes. `names` maps names of arrays to names of stages.
    """
    tensors = None if stages is None else write_base64({name: to_array(array) for name, array in stages.items()})
    body = without_none(
        prompt=to_prompt(prompt),
        b=without_none(tensors=tensors, path=path, setting=None if setting is None else dict(setting)),
        dtype=dtype,
        names=None if names is None else dict(names),
        per_position=per_position,
        per_head=per_head,
        **fields,
    )
    return Call(Request("/compare", body), parser(answers.comparison))


def generate(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    n: int | None = None,
    logprobs: int | None = None,
    trace: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    baseline: bool | None = None,
    **fields: Any,
) -> Call[Generation[NumpyArray]]:
    """Continue a prompt, and return the whole text with its tokens.

    `temperature=0` always takes the most likely token. `trace` returns stages of the steps, for example
    `{"stages": ["*.attn.pattern"], "heads": [0]}` or `{"logit_lens": True}`. Further fields are `top_k`, `top_p`,
    `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `echo` and others.
    """
    fields |= {"edits": to_edits(edits), "baseline": baseline}
    body = generation_body(prompt, max_tokens, temperature, seed, stop, n, logprobs, trace, adapter, fields)
    return Call(Request("/generate", body), parser(answers.generation))


def stream(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    n: int | None = None,
    logprobs: int | None = None,
    trace: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    **fields: Any,
) -> StreamCall[StreamEvent[NumpyArray]]:
    """Continue a prompt, and iterate over the tokens as the server computes them; the arguments are as in `generate`.

    The request is sent when the first event is asked for. Leaving the loop early closes the connection, and the server
    stops. A `with` block around the stream, or its method `close`, does so even if a variable still holds the stream.
    """
    fields["edits"] = to_edits(edits)
    body = generation_body(prompt, max_tokens, temperature, seed, stop, n, logprobs, trace, adapter, fields)
    return StreamCall(Request("/generate", body | {"stream": True}, EVENTS), answers.stream_events)


def chat(
    messages: Messages,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    **fields: Any,
) -> Call[ChatAnswer]:
    """Answer a conversation: a list of messages `{"role": "user", "content": "..."}`, or one question as a string.

    The model needs a chat template. The fields are those of OpenAI's chat completions.
    """
    fields["edits"] = to_edits(edits)
    body = chat_body(messages, max_tokens, temperature, seed, stop, model, adapter, fields)
    return Call(Request("/v1/chat/completions", body), parser(answers.chat_answer))


def stream_chat(
    messages: Messages,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    **fields: Any,
) -> StreamCall[ChatEvent]:
    """Answer a conversation, and iterate over the pieces of the answer. The arguments are those of `chat`."""
    fields["edits"] = to_edits(edits)
    body = chat_body(messages, max_tokens, temperature, seed, stop, model, adapter, fields)
    return StreamCall(Request("/v1/chat/completions", body | {"stream": True}, EVENTS), answers.chat_events)


def attribute(
    method: str,
    prompt: Prompt,
    *,
    token: str | int | None = None,
    minus: str | int | None = None,
    corrupted: Prompt | None = None,
    stages: str | Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    model: str | None = None,
    adapter: str | None = None,
    **fields: Any,
) -> Call[Attribution[NumpyArray]]:
    """Explain the logit of `token`, or how far it is above the logit of `minus`, at the end of a prompt.

    `method` is "direct", "gradient", "integrated_gradients", "attribution_patching", "patching" or "logit_lens".
    `corrupted` is the second prompt of the patching methods. Further fields are `position`, `of`, `targets`, `steps`,
    `baseline`, `by`, `lens`, `top_k` and others.
    """
    body = attribute_body(
        method, prompt, token, minus, corrupted, stages, positions, heads, model, adapter, not_stream(fields)
    )
    if method == "gradient":
        body = {"detail": "values", "encoding": "base64"} | body
    return Call(Request("/attribute", body), parser(answers.attribution))


def stream_sweep(
    prompt: Prompt,
    corrupted: Prompt,
    *,
    token: str | int,
    minus: str | int | None = None,
    stages: str | Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    model: str | None = None,
    adapter: str | None = None,
    **fields: Any,
) -> StreamCall[SweepCell]:
    """Run the sweep of `attribute("patching", ...)`, and iterate over its cells as the server computes them.

    Leaving the loop early closes the connection, and the server stops.
    """
    body = attribute_body(
        "patching", prompt, token, minus, corrupted, stages, positions, heads, model, adapter, not_stream(fields)
    )
    return StreamCall(Request("/attribute", body | {"stream": True}, EVENTS), answers.sweep_cells)


def to_tokens(text: str, *, add_special_tokens: bool = True, **fields: Any) -> Call[list[int]]:
    """The token ids of a text, with the special tokens of the checkpoint unless `add_special_tokens` is False."""
    body = without_none(text=text, add_special_tokens=add_special_tokens, **fields)
    return Call(Request("/tokenize", body), parser(lambda answer: [token["id"] for token in answer["tokens"]]))


def to_text(ids: Sequence[int], *, skip_special_tokens: bool = True, **fields: Any) -> Call[str]:
    """The text of token ids, without special tokens unless `skip_special_tokens` is False."""
    body = without_none(tokens=to_indices(ids), skip_special_tokens=skip_special_tokens, **fields)
    return Call(Request("/detokenize", body), parser(lambda answer: str(answer["text"])))


def model() -> Call[ModelInfo]:
    """The served model: its configuration, parameter counts, stages and limits."""
    return Call(Request("/model"), parser(answers.model_info))


def models() -> Call[list[ServedModel]]:
    """The served model and the worked examples."""
    return Call(Request("/models"), parser(answers.served_models))


def status() -> Call[ServiceStatus]:
    """What the server does at this moment: requests, cache, tokens per second."""
    return Call(Request("/status"), parser(answers.service_status))


def vectors() -> Call[list[StoredVector]]:
    """The vectors of the server that edits may name."""
    return Call(Request("/vectors"), parser(answers.stored_vectors))


def put_vector(name: str, vector: Any) -> Call[StoredVector]:
    """Store a vector for edits under a name, or replace it. The server needs an API key.

    `vector` is one array, tensor or list of numbers, or a mapping from the names of stages to them.
    """
    request = Request(f"/vectors/{quote(name, safe='')}", vector_file(vector), verb="PUT")
    return Call(request, parser(answers.stored_vector))


def delete_vector(name: str) -> Call[StoredVector]:
    """Delete a vector that a client has stored."""
    return Call(Request(f"/vectors/{quote(name, safe='')}", verb="DELETE"), parser(answers.stored_vector))


def health() -> Call[str]:
    """Return "ok" if the server runs. Raises `ConnectionFailed` if it does not."""
    return Call(Request("/health"), parser(lambda answer: str(answer["status"])))


# Bodies


def generation_body(
    prompt: Prompt,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: str | Sequence[str] | None,
    n: int | None,
    logprobs: int | None,
    trace: Mapping[str, Any] | None,
    adapter: str | None,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """The body of POST /generate. A trace has the values of its stages unless it names another `detail`."""
    if trace is not None:
        trace = ({"detail": "values"} if "stages" in trace else {}) | dict(trace) | {"encoding": "base64"}
        if isinstance(trace.get("stages"), str):
            trace["stages"] = [trace["stages"]]
    return without_none(
        prompt=to_prompt(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop if stop is None or isinstance(stop, str) else list(stop),
        n=n,
        logprobs=logprobs,
        trace=trace,
        adapter=adapter,
        **not_stream(fields),
    )


def attribute_body(
    method: str,
    prompt: Prompt,
    token: str | int | None,
    minus: str | int | None,
    corrupted: Prompt | None,
    stages: str | Sequence[str] | None,
    positions: Sequence[int] | None,
    heads: Sequence[int] | None,
    model: str | None,
    adapter: str | None,
    fields: dict[str, Any],
) -> dict[str, Any]:
    return without_none(
        method=method,
        prompt=to_prompt(prompt),
        token=to_token(token),
        minus=to_token(minus),
        corrupted=None if corrupted is None else to_prompt(corrupted),
        stages=stages if stages is None or isinstance(stages, str) else list(stages),
        positions=to_indices(positions),
        heads=to_indices(heads),
        model=model,
        adapter=adapter,
        **fields,
    )


def chat_body(
    messages: Messages,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: str | Sequence[str] | None,
    model: str | None,
    adapter: str | None,
    fields: dict[str, Any],
) -> dict[str, Any]:
    own = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(each) for each in messages]
    return without_none(
        messages=own,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop if stop is None or isinstance(stop, str) else list(stop),
        model=model,
        adapter=adapter,
        **not_stream(fields),
    )


def not_stream(fields: dict[str, Any]) -> dict[str, Any]:
    if "stream" in fields:
        raise TypeError("'stream' is not an argument: call `stream` or `stream_chat` for a stream")
    return fields


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def to_prompt(prompt: Prompt) -> str | list[int]:
    """Token ids may be a list, a numpy array or a tensor."""
    return prompt if isinstance(prompt, str) else [operator.index(each) for each in prompt]


def to_token(token: str | int | None) -> str | int | None:
    return token if token is None or isinstance(token, str) else operator.index(token)


def to_indices(indices: Sequence[int] | None) -> list[int] | None:
    return None if indices is None else [operator.index(each) for each in indices]


def parser(parse: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], Any]:
    """A function that parses the JSON of an answer, and calls `parse` with it."""
    return lambda content: parse(json.loads(content))
