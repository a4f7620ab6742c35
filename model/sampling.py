"""Logits -> the next token, for many requests at once, each with its own parameters.

Randomness belongs to the request: its noise follows from its seed and from how many tokens it has drawn, so that no
neighbour changes it. The order is that of `transformers`: bias and penalties, temperature, top-k, top-p, min-p.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import Tensor

from model.operations import PYTORCH, Draw, Largest, Operations

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens so far, logits (V,)) -> logits (V,), before everything else that changes logits."""

BITS = (1 << 64) - 1
FEW = 1024  # likeliest tokens that hold all that is kept, mostly: to find them is cheaper than to sort all
# Beyond these only the likeliest tokens are left, or all are equally likely, anyway; and float32 has no room for more.
TEMPERATURES = (1e-30, 1e30)
LARGEST_INT = 2**31 - 1  # far above any vocabulary, and exact in every type that kernels and PyTorch convert it to


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise `ValueError("name: ...")` unless `value` is an int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: {shortened(value)} must be an integer between {low} and {high}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise `ValueError("name: ...")` unless `value` is an int or a float from `low` to `high`."""
    if not _is_number(value) or not low <= value <= high:
        limits = f"of at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise ValueError(f"{name}: {shortened(value)} must be a number {limits}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """A value for an error message: a long integer by its size, other long values by their first characters."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to print more than 4,300 digits
        return f"about {'-' if value < 0 else ''}10^{math.log10(abs(value)):.0f}"
    text = str(value) if isinstance(value, (int, float)) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose a token. Raises `ValueError` with the field and its allowed range if a value is out of range.

    `temperature` 0 is exact argmax. `top_k` 0 keeps all; `top_p` keeps the likeliest tokens that reach this mass;
    `min_p` those at least this share as likely as the likeliest. `repetition_penalty` (Keskar et al. 2019) counts
    prompt and output; `presence_penalty` and `frequency_penalty` are subtracted once, and once per occurrence, for
    tokens of the output. `logit_bias` is added to the logits of its token ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf)
        check_int("top_k", self.top_k, 0, LARGEST_INT)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {shortened(self.top_p)} must be a number above 0 and at most 1")
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, 0, LARGEST_INT)
            if not _is_number(bias) or not -100 <= bias <= 100:
                why = f"{shortened(bias)} for token {token_id} must be a number between -100 and 100"
                raise ValueError(f"logit_bias: {why}")

    def numbered(self, index: int) -> "SamplingParams":
        """Those of the request's continuation `index`: its seed is `index` further."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % 2**63)


class Sampler:
    """What one sequence's choices depend on beside its logits: its parameters, its tokens so far, its noise."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._num_drawn = 0
        self._tokens = list(prompt_ids) if params.processors else []
        self.bias = _columns(params.logit_bias)
        """Token ids (K,) and what is added to their logits (K,)."""
        self._has_penalties = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.changes_logits = self._has_penalties or len(params.logit_bias) > 0 or len(params.processors) > 0
        self.takes_largest = params.temperature == 0 and not self.changes_logits
        """Whether it chooses the largest of the logits as they are."""
        self._places: dict[int, int] = {}  # of tokens in `_counted`
        self._counted = torch.zeros(2, 64, dtype=torch.int64)
        if self._has_penalties:
            self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
            ids = torch.tensor(list(self._places), dtype=torch.int64)
            self._counted = torch.cat((torch.stack((ids, torch.zeros_like(ids))), self._counted), dim=1)

    @property
    def counted(self) -> Tensor:
        """What penalties concern, (2, K): each token of prompt and output once, and how often it is in the output."""
        return self._counted[:, : len(self._places)]

    def process(self, logits: Tensor) -> Tensor:
        """logits (V,) -> those of the request's own processors."""
        for processor in self.params.processors:
            processed = processor(self._tokens, logits)
            if processed.shape != logits.shape:
                raise ValueError(f"a processor returned {tuple(processed.shape)} for logits {tuple(logits.shape)}")
            logits = processed
        return logits

    def draw(self, row: int) -> Draw:
        """How the next token is drawn from the logits in this row."""
        params, self._num_drawn = self.params, self._num_drawn + 1
        # As a float: PyTorch would take a temperature of 2**64 for an integer, and has no integer that large.
        temperature = float(min(max(params.temperature, TEMPERATURES[0]), TEMPERATURES[1]))
        return Draw(row, temperature, params.top_k, params.top_p, params.min_p, key_of(self._seed, self._num_drawn))

    def accept(self, token_id: int) -> None:
        if self.params.processors:
            self._tokens.append(token_id)
        if self._has_penalties:
            place = self._places.setdefault(token_id, len(self._places))
            if place == self._counted.shape[1]:
                self._counted = torch.cat((self._counted, torch.zeros_like(self._counted)), dim=1)
            self._counted[0, place] = token_id
            self._counted[1, place] += 1


def _columns(values: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(values), dtype=torch.int64), torch.tensor(list(values.values()))


def key_of(seed: int, num_drawn: int) -> int:
    """Of the noise of a request's next token: 64 bits of SplitMix64 (Steele et al. 2014), those of `num_drawn` in the
    sequence of a mixed seed."""
    return _mix(_mix(seed) + num_drawn * 0x9E3779B97F4A7C15 & BITS)


def _mix(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & BITS
    return state ^ state >> 31


def uniforms(key: int, vocab_size: int, device: torch.device | None = None) -> Tensor:
    """A number between 0 and 1 for each token (V,), neither of them: the upper 23 bits of the finalizer of MurmurHash3
    (Appleby), twice, each time after another half of the key. The same on every device."""
    words = torch.arange(vocab_size, dtype=torch.int32, device=device)
    for half in (key & 0xFFFFFFFF, key >> 32):
        words += _signed(half)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            words ^= _shifted(words, shift)
            words *= _signed(factor)
        words ^= _shifted(words, 16)
    return _shifted(words, 9).float().add_(0.5).mul_(2**-23)


def _shifted(words: Tensor, count: int) -> Tensor:
    return (words >> count).bitwise_and_((1 << 32 - count) - 1)  # else it is filled up with the sign


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def sample(
    logits: Tensor, samplers: Sequence[Sampler], operations: Operations = PYTORCH, largest: Largest | None = None
) -> list[int | Exception]:
    """logits (R, V), one sampler a row -> one token id a row, which its sampler has accepted.

    `largest` is that of each row, where it is known. A row whose choice fails gives the exception; the others are
    chosen as if it were not there.
    """
    logits = logits.detach()
    failures: dict[int, Exception] = {}
    if any(sampler.changes_logits for sampler in samplers):
        logits, largest = _process(logits.float(), samplers, failures), None
    best, indices = largest or operations.largest(logits)
    choices = indices.tolist()
    are_numbers = [math.isfinite(value) for value in best.tolist()]  # the largest of numbers with a NaN is NaN
    draws: list[Draw] = []
    for row, sampler in enumerate(samplers):
        if sampler.params.temperature > 0 and are_numbers[row] and row not in failures:
            try:
                draws.append(sampler.draw(row))
            except Exception as error:  # the row ends with it; the others are drawn
                failures[row] = error
    if draws:
        for draw, token_id in zip(draws, _draw_each(logits, draws, operations), strict=True):
            if isinstance(token_id, Exception):
                failures[draw.row] = token_id
            else:
                choices[draw.row] = token_id
    results: list[int | Exception] = []
    for row, sampler in enumerate(samplers):
        if row in failures or not are_numbers[row]:
            results.append(failures.get(row) or ValueError("the logits are not numbers, or leave no token"))
        else:
            sampler.accept(choices[row])
            results.append(choices[row])
    return results


def _draw_each(logits: Tensor, draws: Sequence[Draw], operations: Operations) -> Sequence[int | Exception]:
    """A token for each draw, or the exception of a draw that also fails without the others."""
    try:
        return operations.draw(logits, draws) or _draw(logits, draws)
    except Exception as error:  # of one row, mostly: each is tried alone
        if len(draws) == 1:
            return [error]
    alone = [_draw_each(logits, [draw], operations)[0] for draw in draws]
    good = [draw for draw, token_id in zip(draws, alone, strict=True) if not isinstance(token_id, Exception)]
    if not 0 < len(good) < len(draws):
        return alone
    # Again as one batch, so that rounding is as it would be without those that fail.
    again = iter(_draw_each(logits, good, operations))
    return [token_id if isinstance(token_id, Exception) else next(again) for token_id in alone]


def _process(logits: Tensor, samplers: Sequence[Sampler], failures: dict[int, Exception]) -> Tensor:
    """Apply processors, biases and penalties; a row where that fails goes to `failures`."""
    for row, sampler in enumerate(samplers):
        if sampler.params.processors:
            try:
                processed = sampler.process(logits[row].clone())
                logits = logits.index_copy(0, torch.tensor([row], device=logits.device), processed.float()[None])
            except Exception as error:  # the request's own code: it ends with it, alone
                failures[row] = error
    rows = [row for row in range(len(samplers)) if row not in failures]
    try:
        return _adjust(logits, samplers, rows)
    except Exception:  # find the rows that also fail alone, and leave them out
        for row in rows:
            try:
                _adjust(logits, samplers, [row])
            except Exception as error:  # the row ends with it, alone
                failures[row] = error
        return _adjust(logits, samplers, [row for row in rows if row not in failures])


def _adjust(logits: Tensor, samplers: Sequence[Sampler], rows: Sequence[int]) -> Tensor:
    """The logits (R, V) with the biases and penalties of these rows."""
    device = logits.device
    biased = [row for row in rows if len(samplers[row].bias[0])]
    penalized = [row for row in rows if samplers[row].counted.shape[1]]
    if biased or penalized:
        logits = logits.clone()
    if biased:
        index = _repeated(biased, [len(samplers[row].bias[0]) for row in biased]).to(device)
        ids = torch.cat([samplers[row].bias[0] for row in biased]).to(device)
        logits[index, ids] += torch.cat([samplers[row].bias[1] for row in biased]).to(device)
    if penalized:
        times = [samplers[row].counted.shape[1] for row in penalized]
        index = _repeated(penalized, times).to(device)
        ids, counts = torch.cat([samplers[row].counted for row in penalized], dim=1).to(device)
        repetition, presence, frequency = (
            _repeated([getattr(samplers[row].params, name) for row in penalized], times).to(device)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
        found = logits[index, ids]
        found = torch.where(found > 0, found / repetition, found * repetition)
        logits[index, ids] = found - presence * (counts > 0) - frequency * counts
    return logits


def _repeated(values: list[int] | list[float], times: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(times))


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """A token for each draw."""
    device = logits.device
    scaled = logits[torch.tensor([draw.row for draw in draws], device=device)].float()
    temperatures = torch.tensor([draw.temperature for draw in draws], device=device)[:, None]
    # Shifted before the division: a tiny temperature gives zeros and large negative numbers, never NaN.
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperatures
    probabilities = scaled.softmax(-1)
    narrowed = [i for i, draw in enumerate(draws) if draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0]
    if narrowed:
        index = torch.tensor(narrowed, device=device)
        probabilities[index] = _narrow(probabilities[index], [draws[i] for i in narrowed])
    noise = torch.stack([uniforms(draw.key, probabilities.shape[-1], device) for draw in draws])
    # The smallest of exponential variables E / p falls on each token with its p (Gumbel-max). Where rounding changes a
    # probability a little, as the size of the batch does, the choice mostly stays; by inversion, all that follow move.
    exponential = noise.log_().neg_()
    return (probabilities / exponential).argmax(-1).tolist()


def _narrow(probabilities: Tensor, params: Sequence[Draw]) -> Tensor:
    """Zero for what top-k, top-p and min-p cut off, each row by its own: (R, V), not normalized again.

    A row is cut by value, so that equally likely tokens stay or go together, whoever else is in the batch.
    """
    device = probabilities.device
    top_k, top_p, min_p = (
        torch.tensor([[getattr(p, name)] for p in params], dtype=torch.float64, device=device)
        for name in ("top_k", "top_p", "min_p")
    )
    has_top_k = top_k > 0
    top = probabilities.topk(min(FEW, probabilities.shape[-1]), dim=-1).values.double()
    cut_by_mass = (top.sum(-1, keepdim=True) >= top_p) & (top_p < 1)
    cut_by_min = top[:, -1:] < min_p * top[:, :1]
    if not bool(torch.where(has_top_k, top_k <= top.shape[-1], cut_by_mass | cut_by_min).all()):
        top = probabilities.sort(dim=-1, descending=True).values.double()
    inside = ~has_top_k | (torch.arange(top.shape[-1], device=device) < top_k)
    kept = top * inside
    kept = kept / torch.where(has_top_k, kept.sum(-1, keepdim=True), 1.0)
    inside &= kept.cumsum(-1) - kept < top_p
    inside &= kept >= min_p * kept[:, :1]
    threshold = top.gather(-1, inside.sum(-1, keepdim=True) - 1)
    return probabilities.masked_fill(probabilities < threshold, 0.0)


@dataclass(frozen=True)
class TokenLogprobs:
    """ln p of the chosen token and of the likeliest ones, under the network's own distribution."""

    chosen: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits (R, V) before bias, penalties and temperature, the token of each row."""
    logprobs = logits.detach().float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    pairs = (
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return list(map(TokenLogprobs, chosen, pairs))
