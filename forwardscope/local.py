"""`load`: a model in this process, with the methods of a client and PyTorch's tensors. It needs no server.

A pass of `run` calls the network directly. Every other request goes through the routes of a server, without a socket
(service/in_process.py), so `load` and the clients have one meaning for every argument.
"""

import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, cast, get_args, overload

import torch
from torch import Tensor

from forwardscope import requests
from forwardscope.arguments import (
    Corpus,
    Index,
    shown,
    to_index_text,
    to_indices,
    to_integer,
    to_mapping,
    to_mappings,
    to_name,
    to_prompt,
    to_targets,
    to_text,
    to_texts,
)
from forwardscope.batches import Batches
from forwardscope.call import HOOKS, Call, Event, Hook, Request, Result, StreamCall
from forwardscope.client import Client, Stream, as_method
from forwardscope.client import method as client_method
from forwardscope.errors import ApiError, InvalidArgument
from forwardscope.local_edits import bind_edits
from forwardscope.local_harvest import Harvest, harvest_job
from forwardscope.local_results import (
    describe_changes,
    describe_loss,
    describe_predictions,
    describe_stage,
    describe_tokens,
)
from forwardscope.local_surprisal import score_on_server
from forwardscope.local_tensors import with_tensors
from forwardscope.local_trace import TraceJob, check_indices, values_of
from forwardscope.local_weights import LocalWeights, find_view, read_weight
from forwardscope.prompt_lists import (
    Attached,
    AttributeMethod,
    ChatMethod,
    OfMessages,
    OfMethodAndPrompt,
    OfPrompt,
    Prompt,
    PromptMethod,
    calls_of_list,
)
from forwardscope.results.attributions import Attribution
from forwardscope.results.comparisons import Comparison
from forwardscope.results.generations import FinishEvent, Generation, StreamEvent, TokenEvent
from forwardscope.results.passes import Logits, Pass, PassTimings, Patterns, Trace
from forwardscope.results.weights import Weight
from forwardscope.tensor_files import NumpyArray
from model.analysis.attribution.gradients import GradientTap
from model.analysis.auto_quantization import resolve
from model.analysis.forward_trace import Trace as PassTrace
from model.analysis.forward_trace import TracedPass
from model.analysis.harvest.passes import local_model
from model.analysis.surprisal import TextSurprisal
from model.checkpoints.adapters import load_adapter
from model.checkpoints.load import DTYPES, Checkpoint, load_checkpoint
from model.choices import Kernels, KVCacheDtype, Quantization
from model.device import find_device
from model.errors import ContextOverflow, InvalidField, join_names, join_words, shortened
from model.network.adapters import Adapter
from model.network.float_copy import FloatNetwork
from model.network.joint_passes import MAX_COST, AdaptedNetwork, PromptPass, cost_of
from model.network.transformer import Transformer
from model.network.weight_indices import read_part
from model.network.weight_views import WeightViews
from model.text.tokenizer import Tokenizer, UnreadableText
from model.tracing.hooks import HookContext, Hooks
from model.tracing.predictions import predict
from model.tracing.selection import Selection, check_heads
from model.tracing.stages import Stage, UnknownStage, select, sizes_of
from model.tracing.tap import Chain, Tap

if TYPE_CHECKING:
    from service.in_process import InProcessTransport

Arguments = ParamSpec("Arguments")
__all__ = ["Harvest", "HookContext", "LocalModel", "load"]
LocalEvent = TokenEvent[Tensor] | FinishEvent
DEFAULT_TOP_K = 10


def load(
    model: str | PathLike[str] = "bundled",
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: Quantization | Literal["auto"] = "stored",
    quantize_loss: float | None = None,
    kernels: Kernels = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    adapters: Mapping[str, str | Path] | None = None,
    grad: bool = False,
) -> "LocalModel":
    """Load a model: "bundled", a checkpoint directory, a GGUF file, or a hub id such as "org/name".

    The arguments have the names and the defaults of the server's settings, so both compute the same numbers.
    `quantize_loss` is the largest increase of the perplexity with `quantize="auto"`, 0.005 if it is None.
    `adapters` maps names to directories of LoRA adapters, which calls choose by name. With `grad`, the stages of
    `run` are tensors of one graph of PyTorch. Raises a `ValueError`, such as `CheckpointError`, whose message says what
    is wrong.
    """
    if not isinstance(model, str | PathLike):
        raise InvalidArgument("model", f"{shown(model)} is not the name or the path of a checkpoint")
    for name, value, choices in (
        ("quantize", quantize, (*get_args(Quantization), "auto")),
        ("kernels", kernels, get_args(Kernels)),
        ("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype)),
    ):
        if value not in choices:
            raise InvalidArgument(name, f"{shown(value)} is not {join_words(choices, 'or')}")
    if not isinstance(adapters, Mapping | None):
        raise InvalidArgument("adapters", f"{shown(adapters)} is not a mapping from names to directories")
    model, device = str(model), find_device(device)
    checkpoint = load_checkpoint(
        model,
        dtype=dtype,
        device=device,
        quantize=resolve(model, quantize, quantize_loss, kernels),
        kernels=kernels,
    )
    loaded = {name: load_adapter(checkpoint, path, name) for name, path in (adapters or {}).items()}
    return LocalModel(replace(checkpoint, adapters=loaded), kv_cache_dtype, grad)


# The first four replace arrays by tensors. They overlap with the general ones after them.
@overload
def method(  # type: ignore[overload-overlap]  # mypy takes the first that fits
    describe: OfPrompt[Arguments, Call[Logits[NumpyArray]]],
) -> Attached[PromptMethod[Arguments, Logits[Tensor], list[Logits[Tensor]]]]: ...
@overload
def method(  # type: ignore[overload-overlap]  # mypy takes the first that fits
    describe: OfPrompt[Arguments, Call[Patterns[NumpyArray]]],
) -> Attached[PromptMethod[Arguments, Patterns[Tensor], list[Patterns[Tensor]]]]: ...
@overload
def method(  # type: ignore[overload-overlap]  # mypy takes the first that fits
    describe: OfPrompt[Arguments, Call[Generation[NumpyArray]]],
) -> Attached[PromptMethod[Arguments, Generation[Tensor], list[Generation[Tensor]]]]: ...
@overload
def method(  # type: ignore[overload-overlap]  # mypy takes the first that fits
    describe: OfMethodAndPrompt[Arguments, Call[Attribution[NumpyArray]]],
) -> Attached[AttributeMethod[Arguments, Attribution[Tensor], list[Attribution[Tensor]]]]: ...
@overload
def method(describe: OfPrompt[Arguments, Call[Result]]) -> Attached[PromptMethod[Arguments, Result, list[Result]]]: ...
@overload
def method(describe: OfMessages[Arguments, Call[Result]]) -> Attached[ChatMethod[Arguments, Result, list[Result]]]: ...
@overload
def method(describe: Callable[Arguments, Call[Result]]) -> Callable[Concatenate["LocalModel", Arguments], Result]: ...
def method(describe: Callable[..., Call[Any]]) -> Any:
    return client_method(describe)


def takes_lists(
    run: Callable[Concatenate["LocalModel", Prompt, Arguments], Result],
) -> Attached[PromptMethod[Arguments, Result, list[Result]]]:
    """A method that takes a list of prompts, too, and then returns the list of results."""

    @functools.wraps(run)
    def run_each(model: "LocalModel", /, *args: Any, **kwargs: Any) -> Any:
        calls = calls_of_list(partial(run, model), *args, **kwargs)
        return run(model, *args, **kwargs) if calls is None else model._together(calls)

    return cast("Attached[PromptMethod[Arguments, Result, list[Result]]]", run_each)


@overload
def stream_method(
    describe: Callable[Arguments, StreamCall[StreamEvent]],
) -> Callable[Concatenate["LocalModel", Arguments], Stream[LocalEvent]]: ...
@overload
def stream_method(
    describe: Callable[Arguments, StreamCall[Event]],
) -> Callable[Concatenate["LocalModel", Arguments], Stream[Event]]: ...
def stream_method(describe: Callable[..., StreamCall[Any]]) -> Callable[..., Stream[Any]]:
    """The same for a request that is answered with a stream."""

    def send(model: "LocalModel", /, *args: Any, **kwargs: Any) -> Stream[Any]:
        return Stream(model._stream(describe(*args, **kwargs)))

    return as_method(describe, send)


@functools.wraps(requests.compare)
def compare(*args: Any, path: str | None = None, **fields: Any) -> Call[Any]:
    """A path is one of this process, not one below the directory of a server."""
    if path is not None and not os.path.exists(path):
        raise InvalidField("path", f"{path}: no such file or directory")
    return requests.compare(*args, path=None if path is None else os.path.abspath(path), **fields)


@contextmanager
def own_errors(hooks: Hooks | None) -> Iterator[None]:
    """Raise the exception of a hook, or `InvalidField`, a `ValueError`, for an argument that a route refuses."""
    try:
        yield
    except (ApiError, InvalidField) as error:
        if hooks is not None and hooks.error is not None:
            raise hooks.error from None
        if not isinstance(error, ApiError) or error.param is None:
            raise
        raise InvalidField(error.param, error.message.removeprefix(f"{error.param}: ")) from None


def with_hooks(request: Request, hooks: Hooks | None) -> Request:
    """The request whose hooks go beside its body, as the functions that they are."""
    return replace(request, hooks=None, extensions={} if hooks is None else {HOOKS: hooks})


def select_stages(table: Sequence[Stage], globs: str | Sequence[str]) -> list[Stage]:
    """The stages that globs match, and the logits. Raises `InvalidField` for a glob that matches none."""
    try:
        return select(table, [*to_texts(globs, "stages"), "logits"])
    except UnknownStage as error:
        raise InvalidField("stages", str(error)) from None


class LocalModel(Batches):
    """A loaded model. Its methods work like those of `Client` with the same names.

    `checkpoint` has the network, the tokenizer and the configuration, for everything that these methods do not do.
    """

    logits = method(requests.logits)
    patterns = method(requests.patterns)
    compare = method(cast("Callable[Arguments, Call[Comparison]]", compare))
    generate = method(requests.generate)
    stream = stream_method(requests.stream)
    chat = method(requests.chat)
    stream_chat = stream_method(requests.stream_chat)
    score = method(requests.score)
    attribute = method(requests.attribute)
    stream_sweep = stream_method(requests.stream_sweep)
    model = method(requests.model)
    models = method(requests.models)
    status = method(requests.status)
    health = method(requests.health)

    def __init__(self, checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtype = "auto", grad: bool = False) -> None:
        self.checkpoint = checkpoint
        self._kv_cache_dtype = kv_cache_dtype
        self._has_grad = grad
        self.name = checkpoint.name
        self._float_network = FloatNetwork(checkpoint.model, checkpoint.adapters, torch.float32)
        self._client: Client | None = None
        self._transport: InProcessTransport | None = None

    def __repr__(self) -> str:
        weight = self.checkpoint.model.embed.weight
        return f"<{self.name}: {self.checkpoint.parameters.total:,} parameters, {weight.dtype}, {weight.device}>"

    @property
    def stages(self) -> list[str]:
        """The names of all stages, in the order of computation."""
        return [stage.name for stage in self.checkpoint.stages]

    def _begin_batch(self) -> None:
        self._server()  # its thread then runs the passes of `run`, too, which several threads ask for

    @takes_lists  # type: ignore[arg-type]  # `fields` could have a `prompt`
    def run(
        self,
        prompt: Prompt,
        stages: str | Sequence[str] = "*",
        *,
        positions: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        targets: Sequence[int | None] | None = None,
        top_k: int | None = None,
        model: str | None = None,
        adapter: str | None = None,
        edits: Sequence[Mapping[str, Any]] | None = None,
        baseline: bool | None = None,
        hooks: Mapping[str, Hook] | None = None,
        **fields: Any,
    ) -> Trace[Tensor]:
        """Run one forward pass over a prompt and return the tensors of its stages.

        The arguments are those of `Client.run`. The trace always has the logits, because every pass computes them. A
        `vector` of an edit may also be a mapping of stages to tensors.

        After `load(..., grad=True)`, the stages and the loss are tensors of one graph, so that `torch.autograd.grad`
        gives the gradient of any number that is computed from them with respect to any stage before it. The pass is
        then computed in float32, by a copy of the network that the first call makes.
        """
        fields |= {} if model is None else {"model": model}
        if fields and self._has_grad:
            raise InvalidArgument(min(fields), "has no graph; load without `grad`")
        if fields:
            fields |= {"positions": positions, "heads": heads, "targets": targets, "top_k": top_k, "adapter": adapter}
            call = requests.run(prompt, stages, edits=edits, baseline=baseline, hooks=hooks, **fields)
            return cast(Trace[Tensor], self._send(call))
        network, ids = self.checkpoint.model, self._ids_in_context(prompt)
        config, weight = network.config, network.embed.weight
        targets, edits = to_targets(targets), to_mappings([] if edits is None else edits, "edits", "edit")
        top_k = None if top_k is None else to_integer(top_k, "top_k", "give a whole number")
        if top_k is not None and not 0 <= top_k <= config.vocab_size:
            raise InvalidField("top_k", f"{shortened(top_k)} must be from 0 to {config.vocab_size}, the vocabulary")
        if targets is not None and len(targets) != len(ids):
            raise InvalidField("targets", f"has {len(targets)} entries for {len(ids)} tokens")
        self._check_ids("targets", [each for each in targets or () if each is not None])
        selected = select_stages(self.checkpoint.stages, stages)
        selection = Selection(
            stages=selected,
            detail="values",
            positions=check_indices("positions", positions, len(ids), "tokens"),
            heads=check_indices("heads", heads, config.num_heads, "heads"),
        )
        check_heads(heads, selected)
        own_targets = [*ids[1:], None] if targets is None else list(targets)
        sizes = sizes_of(config, len(ids))
        adapted = self._network(adapter)
        if baseline and not edits:
            raise InvalidField("baseline", "compares with the pass without edits, but there are no edits")
        num_predictions = min(DEFAULT_TOP_K, config.vocab_size) if top_k is None else top_k
        own_hooks = self._read_hooks(hooks, {"baseline": baseline})
        head: dict[str, Any] = {"model": self.name, "tokens": describe_tokens(ids, self.checkpoint.text_of)}

        def make_passes() -> list[TracedPass]:
            taps: list[Tap] = []
            if edits:
                bound, head["edits"] = bind_edits(edits, adapted, self.checkpoint, ids, self._ids_of)
                taps.append(bound.whole_pass(ids, ops=adapted.backend.ops))
            if own_hooks is not None:
                taps.append(own_hooks.tap(0, len(ids)))
            graph = [GradientTap(selection.stages)] if self._has_grad else []
            return [
                TracedPass(adapted, ids, own_targets, selection, sizes, weight.device, Chain(*each) if each else None)
                for each in ([*taps, *graph], graph)[:num_runs]
            ]

        def describe(traces: Sequence[PassTrace], seconds: float) -> Trace[Tensor]:
            rows = selection.positions or range(len(ids))
            found, *plain = [self._describe(each, rows, num_predictions) for each in traces]
            if plain:
                head["changes"] = describe_changes(traces[1].stages, traces[0].stages)
                head["baseline"] = Pass(**plain[0])
            return Trace(**head, **found, timings=PassTimings(0.0, seconds))

        num_runs = 2 if baseline else 1
        is_alone = bool(edits) or PromptPass(adapted, ids).transformer is None  # edits may need passes of their own
        cost = MAX_COST if is_alone else num_runs * cost_of(len(ids), len(selection.stages))
        with own_errors(own_hooks):
            return self._compute_traces(TraceJob(cost, make_passes, describe)).at(selection.positions, selection.heads)

    def _describe(self, found: PassTrace, rows: Sequence[int], top_k: int) -> dict[str, Any]:
        """The fields of a `Pass`."""
        top = predict(found.logits[list(rows)], top_k, self.checkpoint.model.backend.summaries) if top_k else []
        return {
            "stages": tuple(describe_stage(kept, values_of(kept)) for kept in found.stages),
            "predictions": describe_predictions(rows, top, self.checkpoint.text_of),
            "loss": describe_loss(found.loss.detach(), found.loss.clone()),
        }

    def harvest(self, corpus: Corpus, stages: str | Sequence[str], out: str | PathLike[str], **options: Any) -> Harvest:
        """Run the model over a corpus, and write the rows of stages, one for each token, to the directory `out`.

        The corpus is a text, a path, or a list of texts, paths and lists of token ids. `options` are the fields of
        `HarvestOptions`: `context`, `packed`, `store`, `statistics`, `top_k`, `file_bytes`, `field`. The same call goes
        on with a harvest that was interrupted. docs/harvesting.md describes the files.
        """
        self._compute(harvest_job(local_model(self.checkpoint), corpus, stages, out, options))
        return Harvest(out)

    def score_text(self, text: str, *, stride: int | None = None, bos: bool = False) -> TextSurprisal:
        return score_on_server(self._send, text, stride, bos)

    score_text.__doc__ = Client.score_text.__doc__

    @property
    def weights(self) -> LocalWeights:
        """The weights of the network by name: `model.weights["blocks.0.attn.W_Q"]` is a tensor."""
        return LocalWeights(WeightViews(self.checkpoint.model))

    def weight(
        self,
        name: str,
        *,
        dtype: str | None = None,
        detail: Literal["values", "summary", "none"] = "values",
        adapter: str | None = None,
        **indices: Index,
    ) -> Weight[Tensor]:
        """Read a weight, or a part of it. The arguments are those of `Client.weight`."""
        details = ("values", "summary", "none")
        if dtype is not None and dtype not in DTYPES:
            raise InvalidField("dtype", f"{shown(dtype)} is not {join_words(list(DTYPES), 'or')}")
        if detail not in details:
            raise InvalidField("detail", f"{shown(detail)} is not {join_words(details, 'or')}")
        view = find_view(WeightViews(self.checkpoint.model, self._find_adapter(adapter)), to_name(name))
        part = read_part(view, {dim: to_index_text(each, dim) for dim, each in indices.items()})
        own_dtype = None if dtype is None else DTYPES[dtype]
        return read_weight(view, part, model=adapter or self.name, adapter=adapter, detail=detail, dtype=own_dtype)

    def to_tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the special tokens of the checkpoint unless `add_special_tokens` is False."""
        return self._encode(to_text(text, "text"), "text", add_special_tokens=add_special_tokens)

    def to_text(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, without special tokens unless `skip_special_tokens` is False."""
        ids = to_indices(ids, "ids") or []
        self._check_ids("ids", ids)
        return self._tokenizer("ids").decode(ids, skip_special_tokens=skip_special_tokens)

    def _send(self, call: Call[Result]) -> Result:
        hooks = self._read_hooks(call.request.hooks, call.request.body)
        with own_errors(hooks):
            return with_tensors(self._server()._send(replace(call, request=with_hooks(call.request, hooks))))

    def _stream(self, call: StreamCall[Event]) -> Generator[Event]:
        hooks = self._read_hooks(call.request.hooks, call.request.body)
        with own_errors(hooks):
            events = self._server()._stream(replace(call, request=with_hooks(call.request, hooks)))
            yield from map(with_tensors, events)

    def _read_hooks(self, hooks: Mapping[str, Hook] | None, body: Any) -> Hooks | None:
        if hooks is None:
            return None
        if body.get("baseline"):
            raise InvalidField("hooks", "cannot be compared with a baseline, which is only without edits; run both")
        takes = "a mapping from stages to functions, such as {'blocks.0.attn.z': f}"
        return Hooks(to_mapping(hooks, "hooks", takes), self.checkpoint.stages)

    def _server(self) -> Client:
        """The client of the application, which begins with the first request, because its cache takes memory."""
        if self._client is None:
            from service.in_process import API_KEY, InProcessTransport  # takes a second, and `run` does not need it

            self._transport = InProcessTransport(self.checkpoint, self._kv_cache_dtype)
            self._client = Client("http://localhost", API_KEY, transport=self._transport)
        return self._client

    def _compute(self, job: Callable[[], Result]) -> Result:
        """Run a job on the network, between the steps and passes of other requests."""
        return job() if self._transport is None else self._transport.run(job)

    def _compute_traces(self, job: TraceJob) -> Trace[Tensor]:
        if self._transport is None or self._has_grad:
            return self._compute(partial(job.compute, grad=self._has_grad))
        return self._transport.run(job)

    def _network(self, adapter: str | None) -> AdaptedNetwork | Transformer:
        """The network with one of its adapters, or with none."""
        own_adapter, network = self._find_adapter(adapter), self.checkpoint.model
        if self._has_grad:
            own_adapter, network = self._float_network.adapter(adapter), self._float_network.copy
        return AdaptedNetwork(network, own_adapter) if self.checkpoint.adapters else network

    def _find_adapter(self, name: str | None) -> Adapter | None:
        adapters = self.checkpoint.adapters
        if name is not None and name not in adapters:
            raise InvalidField("adapter", f"{shortened(name)} is not loaded; loaded: {join_names(adapters) or 'none'}")
        return None if name is None else adapters[name]

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise InvalidField(field, "this checkpoint has no tokenizer.json; use token ids")
        return self.checkpoint.tokenizer

    def _encode(self, text: str, name: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._tokenizer(name).encode(text, add_special_tokens=add_special_tokens)
        except UnreadableText as error:
            raise InvalidField(name, str(error)) from None

    def _ids_of(self, prompt: str | Sequence[int], name: str = "prompt") -> list[int]:
        own = to_prompt(prompt, name)
        ids = self._encode(own, name) if isinstance(own, str) else own
        if not ids:
            raise InvalidField(name, "is empty; it needs at least one token")
        self._check_ids(name, ids)
        return ids

    def _ids_in_context(self, prompt: str | Sequence[int]) -> list[int]:
        ids, limit = self._ids_of(prompt), self.checkpoint.model.config.max_positions
        if len(ids) > limit:
            raise ContextOverflow("prompt", limit, len(ids))
        return ids

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        vocab_size = self.checkpoint.model.config.vocab_size
        for each in ids:
            if not 0 <= each < vocab_size:
                reason = f"{shortened(each)} is not a token id; the vocabulary has {vocab_size} tokens"
                raise InvalidField(field, reason)
