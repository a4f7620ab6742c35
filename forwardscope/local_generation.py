"""Generation with the engine in this process: its parameters, its cache, and the collection of its outputs."""

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from forwardscope.results.generations import Choice, Generation, GenerationTimings, Logprob, TokenLogprob, Usage
from model.checkpoints.load import Checkpoint
from model.choices import KVCacheDtype
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Output, Request
from model.errors import InvalidField
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams, TokenOutput

DEFAULT_MAX_TOKENS = 128
MAX_CACHE_BYTES = 1 << 30
NUM_CONTEXTS = 2
SAMPLING = tuple(field.name for field in fields(SamplingParams))
OTHERS = ("stop_token_ids", "ignore_eos", "echo")


def build_engine(checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtype) -> Engine:
    """An engine whose cache holds `NUM_CONTEXTS` full contexts, or `MAX_CACHE_BYTES` if that is less."""
    network = checkpoint.model
    size = EngineConfig.block_size
    num_tokens = NUM_CONTEXTS * -(-network.config.max_positions // size) * size
    token_bytes = bytes_of_token(network.config, network.embed.weight.dtype, kv_cache_dtype)
    config = EngineConfig(cache_bytes=min(MAX_CACHE_BYTES, num_tokens * token_bytes), kv_cache_dtype=kv_cache_dtype)
    return Engine(network, checkpoint.tokenizer, config, checkpoint.adapters)


def read_params(
    checkpoint: Checkpoint,
    num_prompt: int,
    *,
    max_tokens: int | None,
    n: int,
    stop: Sequence[str],
    logprobs: int | None,
    sampling: Mapping[str, Any],
) -> GenerationParams:
    """The parameters of the caller, or else the checkpoint's defaults. Raises `TypeError` for an unknown parameter."""
    given = {name: value for name, value in sampling.items() if value is not None}
    for name in given:
        if name not in (*SAMPLING, *OTHERS):
            nearest = difflib.get_close_matches(name, (*SAMPLING, *OTHERS, "max_tokens", "logprobs", "stop"), n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"generate() has no argument {name!r}{hint}")
    room = max(1, checkpoint.model.config.max_positions - num_prompt)
    eos = () if given.get("ignore_eos") else checkpoint.generation.eos_token_ids
    named_ids = frozenset() if checkpoint.tokenizer is None else checkpoint.tokenizer.special_ids(stop)
    echo = given.get("echo", False)
    for name in ("ignore_eos", "echo"):
        if not isinstance(given.get(name, False), bool):
            raise InvalidField(name, f"{given[name]!r} is not True or False")
    if not isinstance(given.get("logit_bias", {}), Mapping):
        raise InvalidField("logit_bias", f"{given['logit_bias']!r} is not a mapping from token ids to numbers")
    if max_tokens == 0 and not echo:
        raise InvalidField("max_tokens", "0 generates nothing; use at least 1, or echo=True to get the prompt")
    own = {name: value for name, value in given.items() if name in SAMPLING}
    return GenerationParams(
        max_tokens=min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens,
        n=n,
        sampling=SamplingParams(**dict(checkpoint.generation.sampling) | own),
        stop=stop,
        stop_token_ids=frozenset(given.get("stop_token_ids", ())) | frozenset(eos) | named_ids,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        echo=echo,
    )


class GenerationCollector:
    """Collects the outputs of one request."""

    def __init__(self, request: Request, model: str, text_of: Callable[[int], str | None]) -> None:
        self._request = request
        self._model = model
        self._text_of = text_of
        self._tokens: list[list[TokenOutput]] = [[] for _ in range(request.params.n)]
        self._ends: dict[int, Output] = {}
        self._began = time.perf_counter()
        self._first_token_seconds: float | None = None

    def add(self, output: Output) -> None:
        """Add the output of a step. If the output has an error, raise it."""
        if output.error is not None:
            raise output.error
        self._tokens[output.choice] += [*output.prompt_tokens, *output.tokens]
        if output.tokens and self._first_token_seconds is None:
            self._first_token_seconds = time.perf_counter() - self._began
        if output.end is not None:
            self._ends[output.choice] = output

    def generation(self) -> Generation[Tensor]:
        """The result. Call it after every choice has ended."""
        choices = tuple(self._choice(index) for index in range(self._request.params.n))
        return Generation(
            **vars(choices[0]),
            id=self._request.id,
            model=self._model,
            choices=choices,
            timings=GenerationTimings(0.0, self._first_token_seconds, time.perf_counter() - self._began),
        )

    def _choice(self, index: int) -> Choice[Tensor]:
        output, tokens = self._ends[index], self._tokens[index]
        assert output.end is not None
        has_logprobs = self._request.params.logprobs is not None
        return Choice(
            choice=index,
            text="".join(token.text for token in tokens),
            tokens=tuple(token.token_id for token in tokens),
            finish_reason=output.end.finish_reason,
            stop_reason=output.end.stop_reason,
            usage=Usage(output.num_prompt, output.num_generated, output.num_cached),
            logprobs=tuple(map(self._logprob, tokens)) if has_logprobs else None,
            trace=None,
        )

    def _logprob(self, token: TokenOutput) -> TokenLogprob:
        found = token.logprobs
        text = self._text_of(token.token_id)
        if found is None:
            return TokenLogprob(token.token_id, text, None, ())
        top = tuple(Logprob(each, self._text_of(each), value) for each, value in found.top)
        return TokenLogprob(token.token_id, text, found.chosen, top)
