"""Run requests in an engine over a tiny network, and compare with the plain network computing each of them alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from model.choices import KVCacheDtype
from model.config import ModelConfig
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Output, Request, Step
from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.network.adapters import Adapter, PassAdapters
from model.network.attention import DenseContext
from model.network.transformer import Transformer
from model.text.constraint import GrammarState, token_masks
from model.text.sampling import Sampler, SamplingParams, TokenLogprobs, sample, token_logprobs
from model.text.tokenizer import Tokenizer
from model.text.transcript import End, GenerationParams, Transcript
from model.tracing.hooks import Hooks
from model.tracing.tap import Tap
from tests.tiny import random_ids

SAMPLING = {each.name for each in fields(SamplingParams)}
MAX_STEPS = 2000


@dataclass
class Result:
    """All outputs of one choice of a request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    text: str = ""
    end: End | None = None
    error: Exception | None = None
    num_cached: int = 0
    traces: list[StepTrace] = field(default_factory=list)

    @property
    def top_ids(self) -> list[list[int] | None]:
        return [None if entry is None else [token_id for token_id, _ in entry.top] for entry in self.logprobs]

    @property
    def logprob_values(self) -> list[float]:
        entries = [entry for entry in self.logprobs if entry is not None]
        return [value for entry in entries for value in (entry.chosen, *(value for _, value in entry.top))]


def prompt(num_tokens: int, *, seed: int = 1, config: ModelConfig | None = None) -> list[int]:
    ids: list[int] = random_ids(67 if config is None else config.vocab_size, num_tokens, seed=seed)[0].tolist()
    return ids


def ask(
    id: str,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    trace: TraceParams | None = None,
    tap: Tap | Hooks | None = None,
    **params: Any,
) -> Request:
    """A request; `params` are those of `GenerationParams` and `SamplingParams`.

    It has a seed by default, so that the same request gives the same tokens, and asks for logprobs, which reveal wrong
    logits even if the chosen token is right.
    """
    sampling = {"seed": 7} | {name: value for name, value in params.items() if name in SAMPLING}
    others = {"logprobs": 1} | {name: value for name, value in params.items() if name not in SAMPLING}
    if others.get("echo"):
        others = {"prompt_logprobs": others["logprobs"]} | others
    generation = GenerationParams(max_tokens=max_tokens, sampling=SamplingParams(**sampling), **others)
    return Request(id=id, prompt_ids=prompt_ids, params=generation, trace=trace, tap=tap)


def new_engine(
    model: Transformer,
    *,
    tokenizer: Tokenizer | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_step_tokens: int = 512,
    max_sequences: int = 8,
    max_stretch: float = 2.0,
    speculates: bool = True,
    kv_cache_dtype: KVCacheDtype = "auto",
    draft_model: Transformer | None = None,
    drafts_from_own_keys: bool = False,
) -> Engine:
    cached = [model] if draft_model is None or not drafts_from_own_keys else [model, draft_model]
    token_bytes = sum(bytes_of_token(each.config, each.embed.weight.dtype, kv_cache_dtype) for each in cached)
    return Engine(
        model,
        tokenizer,
        EngineConfig(
            cache_bytes=num_blocks * block_size * token_bytes,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_sequences=min(max_sequences, max_step_tokens),
            max_stretch=max_stretch,
            speculates=speculates,
        ),
        draft_model=draft_model,
        drafts_from_own_keys=drafts_from_own_keys,
    )


class Drive:
    """Runs an engine, checks its integrity after every step, and collects its results."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[tuple[str, int], Result] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.results |= {(request.id, choice): Result() for choice in range(request.params.n)}

    def step(self, count: int = 1) -> Step:
        step = Step()
        for _ in range(count):
            step = self.engine.step()
            self.engine.check_integrity()
            self._take(step.outputs)
        return step

    def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if happened():
                return
            self.step()
        raise AssertionError(f"it has not happened after {MAX_STEPS} steps")

    def abort(self, request_id: str, reason: str | None = None) -> None:
        outputs = self.engine.abort(request_id, reason)
        self.engine.check_integrity()
        self._take(outputs)

    def finish(self) -> dict[tuple[str, int], Result]:
        """Run until every request has ended. No sequence may be left in a queue then, and no block in use."""
        self.until(lambda: not self.engine.has_work)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0.0)
        assert all(result.end is not None for result in self.results.values())
        return self.results

    def _take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            result = self.results[output.request_id, output.choice]
            assert result.end is None, "an output after the end"
            tokens = [*output.prompt_tokens, *output.tokens]
            result.ids += [token.token_id for token in tokens]
            result.logprobs += [token.logprobs for token in tokens]
            result.text += "".join(token.text for token in tokens)
            result.end, result.error, result.num_cached = output.end, output.error, output.num_cached
            result.traces += [output.trace] if output.trace is not None else []


def values_of(step: StepTrace) -> dict[str, Tensor]:
    """The values of the traced stages, by name. The trace must have kept them."""
    values = {}
    for each in step.stages:
        assert each.values is not None, each.stage.name
        values[each.stage.name] = each.values
    return values


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], Result]:
    """Add all requests at once, and run until each has ended."""
    drive = Drive(engine)
    drive.add(*requests)
    return drive.finish()


@torch.inference_mode()
def alone(
    model: Transformer,
    request: Request,
    choice: int = 0,
    tokenizer: Tokenizer | None = None,
    adapter: Adapter | None = None,
    tap: Tap | None = None,
) -> Result:
    """The result of a request from the plain network: one pass over all previous tokens for each token, no cache."""
    params, ids = request.params, list(request.prompt_ids)
    sampler = Sampler(params.sampling.for_continuation(choice), ids)
    transcript = Transcript(tokenizer, request.prompt_ids, params)
    grammar = None if params.constraint is None else GrammarState(params.constraint, params.stop_token_ids)
    num_top, num_prompt_top = params.logprobs, params.prompt_logprobs
    result = Result()

    def full_pass(ids: Sequence[int]) -> Tensor:
        context = DenseContext(model.config, None, len(ids), torch.device("cpu"))
        logits: Tensor = model(torch.tensor([ids]), tap=tap, context=context, adapters=PassAdapters.of(adapter))[0]
        return logits

    if params.returns_prompt:
        logits = full_pass(ids)
        entries = [] if num_prompt_top is None else token_logprobs(logits[:-1], ids[1:], num_prompt_top)
        result.ids = list(ids)
        result.logprobs = [None] * len(ids) if num_prompt_top is None else [None, *entries]
        result.text = "".join(token.text for token in transcript.prompt_outputs(entries))
    while transcript.end is None:
        logits = full_pass(ids)
        masks = token_masks([(grammar, ())], logits.shape[-1])
        [token_id] = sample(logits[-1:], [sampler], masks=masks)
        assert isinstance(token_id, int)
        entry = None if num_top is None else token_logprobs(logits[-1:], [token_id], num_top)[0]
        is_complete = False
        if grammar is not None and token_id not in params.stop_token_ids:
            grammar.append(token_id)
            is_complete = grammar.is_complete
        result.text += transcript.push(token_id, entry, is_complete=is_complete).text
        result.ids.append(token_id)
        result.logprobs.append(entry)
        ids.append(token_id)
    result.end = transcript.end
    return result


def assert_equal(found: Result, expected: Result) -> None:
    """Assert the same tokens, text and end, and the same logprobs up to rounding."""
    assert found.error is None
    assert found.ids == expected.ids
    assert found.end == expected.end
    assert found.text == expected.text
    assert found.top_ids == expected.top_ids
    assert found.logprob_values == pytest.approx(expected.logprob_values, abs=1e-5)


def assert_greedy_in_one_pass(model: Transformer, request: Request, found: Result) -> None:
    """A greedy result has the bits of one plain pass over the prompt and all generated tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt_ids, *found.ids]]))[0, len(request.prompt_ids) - 1 : -1]
    assert found.ids == logits.argmax(-1).tolist()
    assert found.logprobs == token_logprobs(logits, found.ids, 1)


def assert_each_equals_alone(
    model: Transformer,
    results: dict[tuple[str, int], Result],
    *requests: Request,
    tokenizer: Tokenizer | None = None,
) -> None:
    for request in requests:
        for choice in range(request.params.n):
            assert_equal(results[request.id, choice], alone(model, request, choice, tokenizer))
