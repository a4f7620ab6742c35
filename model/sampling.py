"""Logits -> the next token. Randomness belongs to the request: one generator each, never shared.

The order is that of `transformers`: bias and penalties, temperature, top-k, top-p, min-p.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose a token. Raises `ValueError` naming the field that is out of range.

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

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature >= 0, "must not be negative"),
            "top_k": (self.top_k >= 0, "must not be negative"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "must be between 0 and 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "must be between 0.01 and 100"),
            "presence_penalty": (abs(self.presence_penalty) <= 2, "must be between -2 and 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 2, "must be between -2 and 2"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "must be between 0 and 2^63 - 1"),
        }
        for name, (is_valid, why) in ranges.items():
            if not is_valid:
                raise ValueError(f"{name}: {getattr(self, name)} {why}")
        for token_id, bias in self.logit_bias.items():
            if not abs(bias) <= 100:
                raise ValueError(f"logit_bias: {bias} for {token_id} must be between -100 and 100")


class Sampler:
    """Chooses the tokens of one sequence, remembering what it has produced."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if params.seed is None else params.seed)
        self._counts = torch.zeros(vocab_size)  # of the output
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)  # in prompt and output
        self._seen[list(prompt_ids)] = True
        self._bias = torch.zeros(vocab_size, dtype=torch.float64) if params.logit_bias else None
        if self._bias is not None:
            self._bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)

    def sample(self, logits: Tensor) -> int:
        """logits (V,) -> a token id. Raises `ValueError` when the logits hold NaN or +inf."""
        logits = logits.detach().cpu().double()  # so that no temperature above 0 is too small to divide by
        if not logits.max() < torch.inf:  # the largest of numbers with a NaN is NaN
            raise ValueError("the logits are not numbers")
        adjusted = self._adjust(logits)
        token_id = int(adjusted.argmax()) if self.params.temperature == 0 else self._draw(adjusted)
        self._counts[token_id] += 1
        self._seen[token_id] = True
        return token_id

    def _adjust(self, logits: Tensor) -> Tensor:
        params = self.params
        if self._bias is not None:
            logits = logits + self._bias
        if params.repetition_penalty != 1:
            weakened = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits = torch.where(self._seen, weakened, logits)
        if params.presence_penalty or params.frequency_penalty:
            logits = logits - params.presence_penalty * (self._counts > 0) - params.frequency_penalty * self._counts
        return logits

    def _draw(self, logits: Tensor) -> int:
        params = self.params
        # Shifted before the division: a tiny temperature gives zeros and -inf, never NaN.
        scaled = (logits - logits.max()) / params.temperature
        if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
            return int(torch.multinomial(scaled.softmax(0), 1, generator=self._generator))
        num_kept = min(params.top_k or len(scaled), len(scaled))
        kept, ids = scaled.topk(num_kept)  # likeliest first
        probabilities = kept.softmax(0)
        mass_before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(mass_before >= params.top_p, 0.0)
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities[0], 0.0)
        return int(ids[torch.multinomial(probabilities, 1, generator=self._generator)])


@dataclass(frozen=True)
class TokenLogprobs:
    """ln p of the chosen token and of the likeliest ones, under the network's own distribution."""

    chosen: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """logits (V,) before bias, penalties and temperature."""
    logprobs = logits.detach().float().log_softmax(0)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token_id]), list(zip(ids.tolist(), values.tolist(), strict=True)))
