"""The logit lens: decode the residual stream at every layer, as if the following layers did nothing.

With the translators of a tuned lens, each residual is translated first. The work is one pass and many short parts, so
that a server can do other work in between. Dims: R positions, C width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from model.analysis.edit_sources import edited_pass
from model.checkpoints.translators import Translators
from model.config import ModelConfig
from model.network.joint_passes import AdaptedNetwork
from model.tracing.edits import BoundEdits
from model.tracing.predictions import Predictions, predict
from model.tracing.stages import Stage, last_residuals, stages_of
from model.tracing.tap import Recorder

LOGITS_PER_PART = 1 << 21
PREDICTIONS_PER_PART = 1 << 13


@dataclass(frozen=True)
class FollowedToken:
    """One token at one position: `rank` counts the tokens with a larger logit."""

    logit: float
    probability: float
    rank: int


@dataclass(frozen=True)
class LensPart:
    """The rows from `first` to before `end` of the residual `stage`, which are decoded together."""

    layer: int
    stage: str
    first: int
    end: int


@dataclass(frozen=True)
class LensResult:
    """A decoded part: the most likely tokens of each of its positions, and the followed tokens.

    `final` follows the token that the network predicts at each position, which is the most likely one after the last
    layer.
    """

    stage: str
    is_translated: bool
    top: Sequence[Predictions]
    followed: Sequence[FollowedToken] | None
    final: Sequence[FollowedToken]


def lens_stages(config: ModelConfig) -> list[Stage]:
    """The residual before every block, and the last one, which gives the real logits."""
    before = [stage for stage in stages_of(config) if stage.name.endswith(".resid_pre")]
    return [*before, last_residuals(config)[-1]]


@dataclass
class LensRun:
    """A run of the logit lens: one pass over `ids`, then decoding of the residuals, part by part."""

    network: AdaptedNetwork
    ids: Sequence[int]
    positions: Sequence[int]
    top_k: int
    _: KW_ONLY
    token: int | None = None
    translators: Translators | None = None
    edits: BoundEdits | None = None

    def __post_init__(self) -> None:
        self._model = self.network.model
        self._stages = lens_stages(self._model.config)
        self._residuals: dict[str, Tensor] = {}
        self._final: dict[int, list[int]] = {}  # the tokens of each part of the last residual, by its first row

    def parts(self) -> list[LensPart]:
        """List the parts in decoding order. The last residual comes first: all parts follow the tokens it predicts."""
        size, num_rows = rows_per_part(self._model.config, self.top_k), len(self.positions)
        *before, last = enumerate(self._stages)
        return [
            LensPart(layer, stage.name, first, min(first + size, num_rows))
            for layer, stage in (last, *before)
            for first in range(0, num_rows, size)
        ]

    @torch.inference_mode()
    def run_pass(self) -> None:
        rows = torch.tensor(list(self.positions), device=self._model.embed.weight.device)
        recorder = Recorder(self._stages, lambda stage, tensor: tensor[0, rows])
        edited_pass(self.network, self.ids, self.edits, tap=recorder, rows=[0])
        self._residuals = recorder.kept

    @torch.inference_mode()
    def decode(self, part: LensPart) -> LensResult:
        residual, translators = self._residuals[part.stage][part.first : part.end], self.translators  # (R, C)
        is_translated = translators is not None and part.layer < len(translators)
        if translators is not None and is_translated:
            residual = translators.translate(part.layer, residual)
        logits = self._model.compute_logits(residual[None])[0]  # (R, V)
        top = predict(logits, self.top_k, self._model.backend.summaries)
        followed = None if self.token is None else follow(logits, [self.token] * len(logits))
        final = self._final.setdefault(part.first, [each.token_ids[0] for each in top])
        return LensResult(part.stage, is_translated, top, followed, follow(logits, final))

    @property
    def stage_names(self) -> list[str]:
        """The residuals from the first to the last."""
        return [stage.name for stage in self._stages]

    def final_tokens(self) -> list[int]:
        """The most likely token of each position after the last layer. Call it after all parts are decoded."""
        return [token for first in sorted(self._final) for token in self._final[first]]


def rows_per_part(config: ModelConfig, top_k: int) -> int:
    """Choose how many rows to decode together: so few that a part takes a fraction of a second."""
    return max(1, min(LOGITS_PER_PART // config.vocab_size, PREDICTIONS_PER_PART // top_k))


def follow(logits: Tensor, tokens: Sequence[int]) -> list[FollowedToken]:
    """Look up the logit, probability and rank of one token in each of the R rows of logits (R, V)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own = wide.gather(-1, index)[:, 0]
    probabilities = wide.softmax(-1).gather(-1, index)[:, 0].tolist()
    ranks = (wide > own[:, None]).sum(-1).tolist()
    return list(map(FollowedToken, own.tolist(), probabilities, ranks))
