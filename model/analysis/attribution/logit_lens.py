"""The logit lens: decode the residual stream at every layer, as if the following layers did nothing.

With the translators of a tuned lens, each residual is translated first. Dims: R positions, C width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.network.adapters import Adapter, PassAdapters
from model.network.transformer import Transformer
from model.network.translators import Translators
from model.tracing.predictions import Predictions, predict
from model.tracing.stages import Stage, last_residuals, stages_of
from model.tracing.tap import Recorder


@dataclass(frozen=True)
class FollowedToken:
    """One token at one position: `rank` counts the tokens with a larger logit."""

    logit: float
    probability: float
    rank: int


@dataclass(frozen=True)
class LensResult:
    """One decoded residual: the most likely tokens of each position, and the followed token if there is one."""

    stage: str
    is_translated: bool
    top: Sequence[Predictions]
    followed: Sequence[FollowedToken] | None


def lens_stages(config: ModelConfig) -> list[Stage]:
    """The residual before every block, and the last one, which gives the real logits."""
    before = [stage for stage in stages_of(config) if stage.name.endswith(".resid_pre")]
    return [*before, last_residuals(config)[-1]]


@torch.inference_mode()
def logit_lens(
    model: Transformer,
    ids: Sequence[int],
    positions: Sequence[int],
    top_k: int,
    *,
    token: int | None = None,
    translators: Translators | None = None,
    adapter: Adapter | None = None,
) -> list[LensResult]:
    """Run one pass over `ids`, and decode the residuals of the positions one layer after the other."""
    batch = torch.tensor([list(ids)], device=model.embed.weight.device)
    rows = torch.tensor(list(positions), device=batch.device)
    stages = lens_stages(model.config)
    recorder = Recorder(stages, lambda stage, tensor: tensor[0, rows])
    model(batch, tap=recorder, rows=[0], adapters=None if adapter is None else PassAdapters.of(adapter))
    results = []
    for layer, stage in enumerate(stages):
        residual = recorder.kept[stage.name]  # (R, C)
        is_translated = translators is not None and layer < len(translators)
        if translators is not None and is_translated:
            residual = translators.translate(layer, residual)
        logits = model.decode(residual[None])[0]  # (R, V)
        followed = None if token is None else follow(logits, token)
        results.append(LensResult(stage.name, is_translated, predict(logits, top_k), followed))
    return results


def follow(logits: Tensor, token: int) -> list[FollowedToken]:
    """The token in each row of logits (R, V)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = wide[:, token]
    probabilities = wide.softmax(-1)[:, token].tolist()
    ranks = (wide > own[:, None]).sum(-1).tolist()
    return list(map(FollowedToken, own.tolist(), probabilities, ranks))
