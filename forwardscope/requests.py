"""Every request of the clients, and how its answer is parsed. `Client` and `AsyncClient` send the requests.

The signature and docstring of each function here are those of the clients' method of the same name. `**fields` are
further fields of the request, as docs/api.md lists them; the server refuses unknown ones and names the nearest.
A `prompt`, and the `messages` of a chat, may also be a list of them: the result is the list of their results.
`adapter` is the name of a LoRA adapter that the server has loaded. `edits` change stages of the pass, and with
`baseline` the result also has the run without them; docs/interventions.md describes both. `hooks` are functions that
a model of `load` calls with stages (docs/python.md); a client refuses them.
"""

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec
from urllib.parse import quote, urlencode

from forwardscope import answers
from forwardscope.answers import parser
from forwardscope.arguments import (
    Index,
    to_continuations,
    to_index_text,
    to_indices,
    to_mapping,
    to_messages,
    to_name,
    to_prompt,
    to_targets,
    to_texts,
    to_token,
)
from forwardscope.call import EVENTS, SAFETENSORS, Call, Event, Hook, Request, StreamCall
from forwardscope.edits import stages_file, to_edits, to_vector, vector_file
from forwardscope.prompt_lists import Messages, Prompt, Prompts
from forwardscope.results import (
    Attribution,
    ChatAnswer,
    Comparison,
    Generation,
    Logits,
    ModelInfo,
    Patterns,
    Scores,
    ServedModel,
    ServiceStatus,
    StoredVector,
    Trace,
    Weight,
    WeightInfo,
)
from forwardscope.results.openai import TokenizerInfo
from forwardscope.results.server import DecodedText, ServedModels, Status, StoredVectors, Tokens
from forwardscope.results.weights import WeightList
from forwardscope.tensor_files import NumpyArray, read_safetensors

Arguments = ParamSpec("Arguments")
Token = str | int
Hooks = Mapping[str, Hook]
"""Functions by the globs of their stages, for a model of `load`: docs/python.md describes them."""
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
    hooks: Hooks | None = None,
    **fields: Any,
) -> Call[Trace[NumpyArray]]:
    """Run one forward pass over a prompt and return the arrays of its stages.

    `stages` are globs over stage names, such as "blocks.*.attn.pattern". `positions` and `heads` select a part of each
    stage. `targets` has the correct next token of each position, for the loss; by default, the next token of the
    prompt. `top_k` is the number of predictions for each position.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        stages=to_texts(stages, "stages") or ["logits"],  # as `load`: every pass computes the logits
        positions=to_indices(positions, "positions"),
        heads=to_indices(heads, "heads"),
        targets=to_targets(targets),
        top_k=top_k,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        baseline=baseline,
        **not_scales(fields),
    )
    request = Request("/forward", body, SAFETENSORS, hooks=hooks)
    return Call(request, lambda content: answers.trace(*read_safetensors(content), body))


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
    hooks: Hooks | None = None,
    **fields: Any,
) -> Call[Logits[NumpyArray]]:
    """The logits of the next token, at the last position or at others.

    With `top_k`, only the logits of this many most likely tokens are returned. With `logprobs`, the logarithms of the
    probabilities are returned as well.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        positions=positions if isinstance(positions, str) else to_indices(positions, "positions"),
        top_k=top_k,
        logprobs=logprobs,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        baseline=baseline,
        **not_scales(fields),
    )
    request = Request("/logits", body, SAFETENSORS, hooks=hooks)
    return Call(request, lambda content: answers.logits(*read_safetensors(content)))


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
    hooks: Hooks | None = None,
    **fields: Any,
) -> Call[Patterns[NumpyArray]]:
    """The attention maps of heads, (layer, head, query, key).

    With `max_size`, each map has at most so many rows and columns. Its numbers are then the largest ones of blocks of
    queries and keys.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        layers=to_indices(layers, "layers"),
        heads=to_indices(heads, "heads"),
        stage=stage,
        max_size=max_size,
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        **fields,
    )
    return Call(Request("/patterns", body, hooks=hooks), parser(Patterns))


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
    tensors = None if stages is None else base64.b64encode(stages_file(stages)).decode()
    own_setting = None if setting is None else to_mapping(setting, "setting", "a mapping, such as {'quantize': 'int8'}")
    body = without_none(
        prompt=to_prompt(prompt),
        b=without_none(tensors=tensors, path=path, setting=own_setting),
        dtype=dtype,
        names=None if names is None else to_mapping(names, "names", "a mapping from names to stages"),
        per_position=per_position,
        per_head=per_head,
        **fields,
    )
    return Call(Request("/compare", body), parser(Comparison))


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
    hooks: Hooks | None = None,
    **fields: Any,
) -> Call[Generation[NumpyArray]]:
    """Continue a prompt, and return the whole text with its tokens.

    `temperature=0` always takes the most likely token. `trace` returns stages of the steps, for example
    `{"stages": ["*.attn.pattern"], "heads": [0]}` or `{"logit_lens": True}`. Further fields are `top_k`, `top_p`,
    `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `echo` and others. With `scales`, there is a choice
    for each of these numbers, by which the changes of the edits are multiplied.
    """
    if trace is not None:  # with the values of its stages, unless it names another `detail`
        trace = to_mapping(trace, "trace", "a mapping, such as {'stages': '*.resid_post'}")
        trace = ({"detail": "values"} if "stages" in trace else {}) | trace | {"encoding": "base64"}
        if isinstance(trace.get("stages"), str):
            trace["stages"] = [trace["stages"]]
    body = without_none(
        prompt=to_prompt(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=None if stop is None else to_texts(stop, "stop"),
        n=n,
        logprobs=logprobs,
        trace=trace,
        adapter=adapter,
        edits=to_edits(edits),
        baseline=baseline,
        **not_stream(fields),
    )
    request = Request("/generate", body, hooks=hooks)
    return Call(request, lambda content: answers.generation(content, body))


def streamed(
    describe: Callable[Arguments, Call[Any]],
    name: str,
    parse: Callable[[dict[str, Any], dict[str, Any]], list[Event]],
    doc: str,
) -> Callable[Arguments, StreamCall[Event]]:
    """A function with the arguments of another one, whose request asks for a stream.

    `parse` takes an event, and the body of the request.
    """

    @functools.wraps(describe)
    def describe_stream(*args: Arguments.args, **kwargs: Arguments.kwargs) -> StreamCall[Event]:
        request = describe(*args, **kwargs).request
        assert isinstance(request.body, dict)
        body = request.body | {"stream": True}
        return StreamCall(replace(request, body=body, accept=EVENTS), lambda event: parse(event, body))

    describe_stream.__name__, describe_stream.__doc__ = name, doc
    return describe_stream


stream = streamed(
    generate,
    "stream",
    answers.stream_events,
    """Continue a prompt, and iterate over the tokens as the server computes them; the arguments are as in `generate`.

    The request is sent when the first event is asked for. Leaving the loop early closes the connection, and the server
    stops. A `with` block around the stream, or its method `close`, does so even if a variable still holds the stream.
    """,
)


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
    hooks: Hooks | None = None,
    **fields: Any,
) -> Call[ChatAnswer]:
    """Answer a conversation: a list of messages `{"role": "user", "content": "..."}`, or one question as a string.

    The model needs a chat template. The fields are those of OpenAI's chat completions.
    """
    body = without_none(
        messages=to_messages(messages),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=None if stop is None else to_texts(stop, "stop"),
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        **not_stream(fields),
    )
    return Call(Request("/v1/chat/completions", body, hooks=hooks), answers.chat_answer)


stream_chat = streamed(
    chat,
    "stream_chat",
    answers.chat_events,
    """Answer a conversation, and iterate over the pieces of the answer. The arguments are those of `chat`.""",
)


def score(
    prompt: Prompt,
    continuations: Sequence[str] | Sequence[Sequence[int]],
    *,
    model: str | None = None,
    adapter: str | None = None,
    edits: Edits | None = None,
    **fields: Any,
) -> Call[Scores]:
    """The log-probability of each of some continuations of a prompt, in all and for each token.

    Prompt and continuations are texts, or all of them are lists of token ids. The prompt is computed once.
    """
    body = without_none(
        prompt=to_prompt(prompt),
        continuations=to_continuations(continuations),
        model=model,
        adapter=adapter,
        edits=to_edits(edits),
        **fields,
    )
    return Call(Request("/score", body), parser(Scores))


def attribute(
    method: str,
    prompt: Prompt,
    *,
    token: Token | Sequence[Token] | None = None,
    minus: Token | Sequence[Token] | None = None,
    corrupted: Prompt | Prompts | None = None,
    stages: str | Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    stage: str | None = None,
    vector: Any = None,
    edits: Edits | None = None,
    model: str | None = None,
    adapter: str | None = None,
    **fields: Any,
) -> Call[Attribution[NumpyArray]]:
    """Explain the logit of `token`, or how far it is above the logit of `minus`, at the end of a prompt.

    With a list of prompts, `token`, `minus` and `corrupted` may be lists, too, with an entry for each.

    `method` is "direct", "gradient", "integrated_gradients", "attribution_patching", "patching" or "logit_lens".
    `corrupted` is the second prompt of the patching methods. With a `stage` and a `vector`, the methods with gradients
    explain their product in place of a logit. `edits` change the explained passes. Further fields are `position`, `of`,
    `targets`, `steps`, `baseline`, `by`, `receivers`, `lens`, `top_k` and others.
    """
    body = without_none(
        method=method,
        prompt=to_prompt(prompt),
        token=to_token(token, "token"),
        minus=to_token(minus, "minus"),
        corrupted=None if corrupted is None else to_prompt(corrupted, "corrupted"),
        stages=None if stages is None else to_texts(stages, "stages"),
        positions=to_indices(positions, "positions"),
        heads=to_indices(heads, "heads"),
        stage=stage,
        vector=to_vector(vector, "vector"),
        edits=to_edits(edits),
        model=model,
        adapter=adapter,
        **({} if stage is None else {"of": "stage"}) | not_stream(fields),
    )
    if method == "gradient":
        body = {"detail": "values", "encoding": "base64"} | body
    return Call(Request("/attribute", body), lambda content: answers.attribution(content, body))


def sweep(prompt: Prompt, corrupted: Prompt, *, token: str | int, **fields: Any) -> Call[Attribution[NumpyArray]]:
    return attribute("patching", prompt, corrupted=corrupted, token=token, **fields)


stream_sweep = streamed(
    sweep,
    "stream_sweep",
    answers.sweep_cells,
    """Run the sweep of `attribute("patching", ...)`, and iterate over its cells as the server computes them.

    The arguments are those of `attribute`. Leaving the loop early closes the connection, and the server stops.
    """,
)


def to_tokens(text: str, *, add_special_tokens: bool = True, **fields: Any) -> Call[list[int]]:
    """The token ids of a text, with the special tokens of the checkpoint unless `add_special_tokens` is False."""
    body = without_none(text=text, add_special_tokens=add_special_tokens, **fields)
    return Call(Request("/tokenize", body), parser(Tokens, lambda found: [token.id for token in found.tokens]))


def to_spans(text: str) -> Call[Tokens]:
    """The tokens of a text with its special tokens, and the characters of each."""
    return Call(Request("/tokenize", {"text": text, "return_offsets": True}), parser(Tokens))


def to_text(ids: Sequence[int], *, skip_special_tokens: bool = True, **fields: Any) -> Call[str]:
    """The text of token ids, without special tokens unless `skip_special_tokens` is False."""
    body = without_none(tokens=to_indices(ids, "ids"), skip_special_tokens=skip_special_tokens, **fields)
    return Call(Request("/detokenize", body), parser(DecodedText, lambda found: found.text))


def tokenizer_info() -> Call[TokenizerInfo]:
    """The special tokens and the chat template."""
    return Call(Request("/tokenizer_info"), parser(TokenizerInfo))


def model() -> Call[ModelInfo]:
    """The served model: its configuration, parameter counts, stages and limits."""
    return Call(Request("/model"), parser(ModelInfo))


def models() -> Call[list[ServedModel]]:
    """The served model and the worked examples."""
    return Call(Request("/models"), parser(ServedModels, lambda found: list(found.models)))


def status() -> Call[ServiceStatus]:
    """Get the current state of the server: requests, cache, tokens per second."""
    return Call(Request("/status"), parser(ServiceStatus))


def vectors() -> Call[list[StoredVector]]:
    """The vectors of the server that edits may name."""
    return Call(Request("/vectors"), parser(StoredVectors, lambda found: list(found.vectors)))


def weights(*, model: str | None = None, adapter: str | None = None) -> Call[Mapping[str, WeightInfo]]:
    """The weights of the network by name, with their shapes and dtypes; `weight` reads one."""
    request = Request(with_query("/weights", model=model, adapter=adapter))
    return Call(request, parser(WeightList, lambda found: found.weights))


def weight(
    name: str,
    *,
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None,
    detail: Literal["values", "summary", "none"] = "values",
    model: str | None = None,
    adapter: str | None = None,
    **indices: Index,
) -> Call[Weight[NumpyArray]]:
    """Read a weight by its name in TransformerLens, or a part of it.

    `indices` choose a part: the name of a dim and its indices, as in `weight("embed.W_E", d_vocab=[10, 20])` or
    `weight("blocks.0.attn.W_Q", head=0, d_model=slice(4))`. The result has all dims. A range ends before its stop, as
    in Python, but one that goes beyond the dim is an error.
    """
    texts = {dim: to_index_text(each, dim) for dim, each in indices.items()}
    path = f"/weights/{quote(to_name(name), safe='')}"
    request = Request(
        with_query(path, dtype=dtype, detail=detail, model=model, adapter=adapter, **texts), accept=SAFETENSORS
    )
    return Call(request, lambda content: answers.weight(*read_safetensors(content)))


def put_vector(name: str, vector: Any) -> Call[StoredVector]:
    """Store a vector for edits under a name, or replace it. The server needs an API key.

    `vector` is one array, tensor or list of numbers, or a mapping from the names of stages to them.
    """
    request = Request(f"/vectors/{quote(to_name(name), safe='')}", vector_file(vector), verb="PUT")
    return Call(request, parser(StoredVector))


def delete_vector(name: str) -> Call[StoredVector]:
    """Delete a vector that a client has stored."""
    return Call(Request(f"/vectors/{quote(to_name(name), safe='')}", verb="DELETE"), parser(StoredVector))


def health() -> Call[str]:
    """Return "ok" if the server runs. Raises `ConnectionFailed` if it does not."""
    return Call(Request("/health"), parser(Status, lambda found: found.status))


def not_stream(fields: dict[str, Any]) -> dict[str, Any]:
    if "stream" in fields:
        raise TypeError("'stream' is not an argument: call `stream` or `stream_chat` for a stream")
    return fields


def not_scales(fields: dict[str, Any]) -> dict[str, Any]:
    if "scales" in fields:
        raise TypeError("'scales' is no argument of a single pass: call `batch` with a function of one scale")
    return fields


def with_query(path: str, **parameters: str | None) -> str:
    query = urlencode(without_none(**parameters))
    return f"{path}?{query}" if query else path


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
