"""Choose the next token from logits, for many sequences at once, each with its own parameters.

The noise of a sequence depends only on its seed and on how many tokens it has drawn, so other sequences in the batch
do not change it. The parameters apply in the order in which Hugging Face's transformers applies them: biases and
penalties (here), then temperature, top-k, top-p and min-p (in the `SamplingOps` of the backend). Tokens that a grammar
excludes are removed after biases and penalties.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import Tensor

from model.errors import InvalidField, shortened
from model.ops.interface import Argmax, Draw
from model.ops.torch_ops import TORCH, SamplingOps
from model.ops.torch_sampling import unpack_masks
from model.text.constraint import TokenMasks
from model.text.token_rules import TokenRules

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens so far, logits (V,)) -> logits (V,). Processors run before biases, penalties and all other parameters."""

MASK_64 = (1 << 64) - 1
# Positive temperatures are clamped to this range, which fits in float32. At its lower end only the most likely tokens
# are drawn; at its upper end all tokens are equally likely.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
MAX_INT = 2**31 - 1  # far above any vocabulary, and exact as a float64, as which backends take `top_k`


class NoFiniteMaximum(ValueError):
    """A token cannot be drawn from a row of logits. If their largest one is -inf, every token is excluded."""

    def __init__(self, largest: float) -> None:
        super().__init__(
            "the largest logit is not a finite number: a logit is NaN or infinite, or every token is excluded (-inf)"
        )
        self.excludes_all = largest == -math.inf


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise `InvalidField` unless `value` is an int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(name, f"{shortened(value)} must be an integer between {low} and {high}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidField` unless `value` is an int or a float from `low` to `high`. `high` may be infinite."""
    if not _is_number(value) or not low <= value <= high:
        limits = f"of at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise InvalidField(name, f"{shortened(value)} must be a number {limits}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Raises `InvalidField` if a value is out of range.

    - `temperature`: 0 chooses the most likely token (exact argmax).
    - `top_k`: keep the `top_k` most likely tokens; 0 keeps all.
    - `top_p`: keep the most likely tokens, until their probabilities add up to `top_p`.
    - `min_p`: keep tokens with at least `min_p` times the probability of the most likely token.
    - `repetition_penalty` (Keskar et al. 2019): applies to the tokens of the prompt and the output.
    - `presence_penalty`: subtracted once from the logit of each token of the output.
    - `frequency_penalty`: subtracted once for each occurrence of a token in the output.
    - `logit_bias`: added to the logits of its token ids.
    - `seed`: determines the noise; None takes a random seed.
    - `processors`: functions that change the logits before all other parameters apply.
    - `rules`: which tokens may be chosen; they apply after the processors.
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
    rules: TokenRules = field(default_factory=TokenRules)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf)
        check_int("top_k", self.top_k, 0, MAX_INT)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidField("top_p", f"{shortened(self.top_p)} must be a number above 0 and at most 1")
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, 0, MAX_INT)
            if not _is_number(bias) or not -100 <= bias <= 100:
                reason = f"{shortened(bias)} for token {token_id} must be a number between -100 and 100"
                raise InvalidField("logit_bias", reason)

    @property
    def reads_tokens(self) -> bool:
        """Whether the logits change depending on the tokens so far."""
        return bool(self.processors or self.rules)

    def for_continuation(self, index: int) -> "SamplingParams":
        """The parameters of continuation `index` of a request. Its seed is the request's seed plus `index`."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % 2**63)


class Sampler:
    """The sampling state of one sequence: its parameters, its seed, and the tokens that penalties count."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._num_drawn = 0
        self._tokens = list(prompt_ids) if params.reads_tokens else []
        biased_ids, biases = list(params.logit_bias), list(params.logit_bias.values())
        self.bias = torch.tensor(biased_ids, dtype=torch.int64), torch.tensor(biases)
        """Token ids (K,), and the values (K,) to add to their logits."""
        self._has_penalties = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.changes_logits = self._has_penalties or len(params.logit_bias) > 0 or params.reads_tokens
        self._columns: dict[int, int] = {}  # token id -> its column in `_ids_and_counts`
        self._ids_and_counts = torch.zeros(2, 64, dtype=torch.int64)  # doubled in size when it is full
        if self._has_penalties:
            self._columns = {token_id: column for column, token_id in enumerate(dict.fromkeys(prompt_ids))}
            ids = torch.tensor(list(self._columns), dtype=torch.int64)
            prompt = torch.stack((ids, torch.zeros_like(ids)))
            self._ids_and_counts = torch.cat((prompt, self._ids_and_counts), dim=1)

    @property
    def token_counts(self) -> Tensor:
        """The tokens that penalties apply to, (2, K).

        Row 0 has the ids of all tokens in the prompt or the output, row 1 how often each occurs in the output.
        """
        return self._ids_and_counts[:, : len(self._columns)]

    def run_processors(self, logits: Tensor) -> Tensor:
        """Apply the request's own processors and rules: logits (V,) -> logits (V,)."""
        for processor in self.params.processors:
            processed = processor(self._tokens, logits)
            if processed.shape != logits.shape:
                raise ValueError(f"a processor returned {tuple(processed.shape)} for logits {tuple(logits.shape)}")
            logits = processed
        rules = self.params.rules
        return rules.apply(logits, self._tokens, self._num_drawn) if rules else logits

    def draw(self, row: int) -> Draw:
        """Describe how to draw the next token from the logits of row `row`."""
        params = self.params
        # A float, because PyTorch would convert an int such as 2**64 to an integer type, which it does not fit.
        temperature = float(min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE))
        return Draw(row, temperature, params.top_k, params.top_p, params.min_p, key_of(self._seed, self._num_drawn + 1))

    def ahead(self, draft: Sequence[int]) -> "list[Sampler]":
        """The samplers of the next token, this one, and of the tokens after 1, 2 ... drafted ones."""
        samplers = [self]
        for token_id in draft:
            samplers.append(samplers[-1].fork())
            samplers[-1].append(token_id)
        return samplers

    def fork(self) -> "Sampler":
        """A copy that draws the same tokens. Tokens that are added to it are not added here."""
        other = copy(self)
        if self._has_penalties:
            other._columns = dict(self._columns)
            other._ids_and_counts = self._ids_and_counts.clone()
        return other

    def append(self, token_id: int) -> None:
        """Add a token to the output."""
        self._num_drawn += 1
        if self.params.reads_tokens:
            self._tokens.append(token_id)
        if self._has_penalties:
            column = self._columns.setdefault(token_id, len(self._columns))
            if column == self._ids_and_counts.shape[1]:
                self._ids_and_counts = torch.cat((self._ids_and_counts, torch.zeros_like(self._ids_and_counts)), dim=1)
            self._ids_and_counts[0, column] = token_id
            self._ids_and_counts[1, column] += 1


def key_of(seed: int, num_drawn: int) -> int:
    """The 64-bit key of a draw's noise.

    It is the output number `num_drawn` of a SplitMix64 generator (Steele et al. 2014), whose state begins with the
    mixed seed.
    """
    return _mix64(_mix64(seed) + num_drawn * 0x9E3779B97F4A7C15 & MASK_64)


def _mix64(state: int) -> int:
    """The mixing function of SplitMix64."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK_64
    return state ^ state >> 31


def sample(
    logits: Tensor,
    samplers: Sequence[Sampler],
    ops: SamplingOps = TORCH.sampling,
    argmax: Argmax | None = None,
    masks: TokenMasks | None = None,
) -> list[int | Exception]:
    """Choose one token per row: logits (R, V) and one sampler per row -> R token ids, appended to their samplers.

    `argmax` is the argmax of each row, if it is already known. `masks` say which tokens may be chosen. A row that fails
    has an exception as its result; the other rows are chosen as if that row were not there.
    """
    logits = logits.detach()
    failures = dict(masks.failures) if masks is not None else {}
    words = masks.words if masks is not None else None
    if words is not None:
        argmax = None
    if any(sampler.changes_logits for sampler in samplers):
        logits, argmax = _adjust_logits(logits.float(), samplers, failures), None
    largest, indices = argmax or ops.argmax(logits, words)
    token_ids, maxima = indices.tolist(), largest.tolist()
    is_valid = [math.isfinite(value) for value in maxima]  # the largest value is NaN if any value is NaN
    draws: list[Draw] = []
    for row, sampler in enumerate(samplers):
        if sampler.params.temperature > 0 and is_valid[row] and row not in failures:
            try:
                draws.append(sampler.draw(row))
            except Exception as error:  # only this row fails
                failures[row] = error
    if draws:
        for draw, token_id in zip(draws, _draw_each(logits, draws, ops, words), strict=True):
            if isinstance(token_id, Exception):
                failures[draw.row] = token_id
            else:
                token_ids[draw.row] = token_id
    results: list[int | Exception] = []
    for row, sampler in enumerate(samplers):
        if row in failures or not is_valid[row]:
            results.append(failures.get(row) or NoFiniteMaximum(maxima[row]))
        else:
            sampler.append(token_ids[row])
            results.append(token_ids[row])
    return results


def _draw_each(
    logits: Tensor, draws: Sequence[Draw], ops: SamplingOps, words: Tensor | None
) -> Sequence[int | Exception]:
    """Draw a token for each draw. A draw that also fails without the others has an exception as its result."""
    try:
        return list(ops.draw(logits, draws, words))
    except Exception as error:  # usually the error of a single row, so each row is tried alone
        if len(draws) == 1:
            return [error]
    separate = [_draw_each(logits, [draw], ops, words)[0] for draw in draws]
    good = [draw for draw, token_id in zip(draws, separate, strict=True) if not isinstance(token_id, Exception)]
    if not 0 < len(good) < len(draws):
        return separate
    # Draw the good rows again as one batch, so that rounding is the same as without the rows that fail.
    together = iter(_draw_each(logits, good, ops, words))
    return [token_id if isinstance(token_id, Exception) else next(together) for token_id in separate]


def _adjust_logits(logits: Tensor, samplers: Sequence[Sampler], failures: dict[int, Exception]) -> Tensor:
    """Apply processors, biases and penalties: logits (R, V) -> (R, V). The errors of rows are added to `failures`."""
    for row, sampler in enumerate(samplers):
        if sampler.params.reads_tokens:
            try:
                processed = sampler.run_processors(logits[row].clone())
                logits = logits.index_copy(0, torch.tensor([row], device=logits.device), processed.float()[None])
            except Exception as error:  # an error in the request's own code fails only this row
                failures[row] = error
    rows = [row for row in range(len(samplers)) if row not in failures]
    try:
        return _apply_biases_and_penalties(logits, samplers, rows)
    except Exception:  # find the rows that also fail alone, and leave them out
        for row in rows:
            try:
                _apply_biases_and_penalties(logits, samplers, [row])
            except Exception as error:  # only this row fails
                failures[row] = error
        return _apply_biases_and_penalties(logits, samplers, [row for row in rows if row not in failures])


def _apply_biases_and_penalties(logits: Tensor, samplers: Sequence[Sampler], rows: Sequence[int]) -> Tensor:
    """Apply the biases and penalties of these rows: logits (R, V) -> (R, V)."""
    device = logits.device
    biased = [row for row in rows if len(samplers[row].bias[0])]
    penalized = [row for row in rows if samplers[row].token_counts.shape[1]]
    if biased or penalized:
        logits = logits.clone()
    if biased:
        index = _repeat_each(biased, [len(samplers[row].bias[0]) for row in biased]).to(device)
        ids = torch.cat([samplers[row].bias[0] for row in biased]).to(device)
        logits[index, ids] += torch.cat([samplers[row].bias[1] for row in biased]).to(device)
    if penalized:
        num_tokens = [samplers[row].token_counts.shape[1] for row in penalized]
        index = _repeat_each(penalized, num_tokens).to(device)
        ids, counts = torch.cat([samplers[row].token_counts for row in penalized], dim=1).to(device)
        repetition, presence, frequency = (
            _repeat_each([getattr(samplers[row].params, name) for row in penalized], num_tokens).to(device)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
        values = logits[index, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[index, ids] = values - presence * (counts > 0) - frequency * counts
    return logits


def _repeat_each(values: list[int] | list[float], repeats: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(repeats))


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities of the chosen token and of the most likely tokens.

    The probabilities are those of the network, before bias, penalties and temperature. `rank` is 1 for the most likely
    token.
    """

    chosen: float
    top: list[tuple[int, float]]  # (token id, logprob)
    rank: int


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The logprobs of one token per row and of the `num_top` most likely tokens, from unchanged logits (R, V)."""
    logprobs = logits.detach().float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])  # (R, 1)
    ranks = (logprobs > chosen).sum(-1) + 1
    top = TORCH.summaries.top(logprobs, min(num_top, logprobs.shape[-1]))
    pairs = (
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return list(map(TokenLogprobs, chosen[:, 0].tolist(), pairs, ranks.tolist()))


@dataclass(frozen=True)
class ConstraintEffect:
    """The effect of a grammar on a chosen token, under the network's own distribution.

    `logprob` is the token's log-probability, and `constrained_logprob` the one among the allowed tokens alone.
    `removed_mass` is the probability of all excluded tokens together.
    """

    logprob: float
    constrained_logprob: float
    removed_mass: float


def constraint_effect(logits: Tensor, words: Tensor, token_id: int) -> ConstraintEffect:
    """Compute the effect of a mask (W,) on a token, from unmasked logits (V,)."""
    logprobs = logits.detach().double().log_softmax(-1)
    allowed = unpack_masks(words[None], logprobs[None])[0]
    total = logprobs.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    removed = logprobs.masked_fill(allowed, -torch.inf).logsumexp(-1).exp()
    logprob = logprobs[token_id]
    return ConstraintEffect(logprob.item(), (logprob - total).item(), removed.item())
