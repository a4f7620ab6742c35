"""The table of stages: the name and dims of every tensor of the forward pass that can be read or changed.

Names follow TransformerLens without `hook_`. The table names the dims of each stage, so its shape follows
from the config and the length of the prompt, before the pass. This file does not import the network.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from model.config import ModelConfig
from model.tracing.globs import Names
from model.tracing.stage_hints import stage_hint


@dataclass(frozen=True)
class Stage:
    """One named tensor and the names of its dims, e.g. `blocks.0.attn.pattern` (batch, head, query, key).

    `has_selected_rows`: if a pass computes the logits of some positions only, the stage has only these positions.
    """

    name: str
    dims: tuple[str, ...]
    has_selected_rows: bool = False

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in self.dims)


RESIDUAL = ("batch", "position", "d_model")
HEADS = ("batch", "position", "head", "d_head")
KV_HEADS = ("batch", "position", "kv_head", "d_head")
PATTERN = ("batch", "head", "query", "key")
HIDDEN = ("batch", "position", "d_mlp")
VOCABULARY = ("batch", "position", "d_vocab")

OUTPUT_STAGES = (
    Stage("logits", VOCABULARY, has_selected_rows=True),
    Stage("probabilities", VOCABULARY, has_selected_rows=True),
    Stage("loss", ("batch", "position"), has_selected_rows=True),
)
AFTER_LOGITS = ("probabilities", "loss")  # computed after the pass, so nothing in it depends on them


def norm_stages(name: str, dims: tuple[str, ...] = RESIDUAL, *, has_selected_rows: bool = False) -> list[Stage]:
    """The three stages of a norm: the divisor, the result before gain and bias, and the result after them."""
    all_dims = {"scale": (*dims[:-1], "one"), "normalized": dims, "out": dims}
    return [Stage(f"{name}.{part}", part_dims, has_selected_rows) for part, part_dims in all_dims.items()]


def _attention_stages(config: ModelConfig, layer: int, adapters: bool) -> list[Stage]:
    stages = [Stage("attn.q", HEADS), Stage("attn.k", KV_HEADS), Stage("attn.v", KV_HEADS)]
    if adapters:
        stages = [Stage(stage.name.replace("attn.", "attn.lora_"), stage.dims) for stage in stages] + stages
    if config.qk_norm == "projection":  # all heads are normalized together
        stages += norm_stages("attn.q_norm", ("batch", "position", "d_q"))
        stages += norm_stages("attn.k_norm", ("batch", "position", "d_k"))
    elif config.qk_norm is not None:
        stages += norm_stages("attn.q_norm", HEADS) + norm_stages("attn.k_norm", KV_HEADS)
    if config.rotates(layer):
        stages += [Stage("attn.rot_q", HEADS), Stage("attn.rot_k", KV_HEADS)]
    stages += [Stage(f"attn.{name}", PATTERN) for name in ("scores", "attn_scores", "pattern")]
    return [*stages, Stage("attn.z", HEADS), *([Stage("attn.lora_out", RESIDUAL)] if adapters else ())]


def _mlp_stages(config: ModelConfig, layer: int, adapters: bool) -> list[Stage]:
    if config.has_experts(layer):
        chosen = ("batch", "position", "expert_rank")
        return [
            Stage("mlp.router_logits", ("batch", "position", "expert")),
            Stage("mlp.expert_weights", chosen),
            Stage("mlp.expert_indices", chosen),
        ]
    before = ("pre", "pre_linear") if config.gated else ("pre",)
    names = [*(f"lora_{name}" for name in before if adapters), *before, "post"]
    stages = [Stage(f"mlp.{name}", HIDDEN) for name in names]
    return [*stages, Stage("mlp.lora_out", RESIDUAL)] if adapters else stages


def _block_stages(config: ModelConfig, layer: int, adapters: bool) -> list[Stage]:
    """The stages of a block in the order of computation: see `Block`."""
    pre, mid, post, attn_out, mlp_out = (
        Stage(name, RESIDUAL) for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    )
    attention, mlp = _attention_stages(config, layer, adapters), _mlp_stages(config, layer, adapters)
    ln1, ln2 = norm_stages("ln1"), norm_stages("ln2")
    if config.norm_placement == "post":
        return [pre, *attention, attn_out, mid, *ln1, *mlp, mlp_out, post, *ln2]
    norms_output = config.norm_placement in ("both", "output")
    after = norm_stages("ln1_post"), norm_stages("ln2_post")
    attention = [*attention, *(after[0] if norms_output else ()), attn_out]
    mlp = [*mlp, *(after[1] if norms_output else ()), mlp_out]
    if config.norm_placement == "output":
        ln1, ln2 = [], []
    if config.shared_norm:
        ln2 = []
    middle = [] if config.parallel_residual else [mid]
    return [pre, *ln1, *attention, *middle, *ln2, *mlp, post]


def stages_of(config: ModelConfig, *, adapters: bool = False) -> list[Stage]:
    """Every stage of a `Transformer` with this config, in the order of computation.

    `adapters`: also those that show what adapters add, which a pass has if any adapter is loaded.
    """
    stages = [Stage("embed", RESIDUAL)]
    if config.positions != "rotary":
        stages.append(Stage("pos_embed", RESIDUAL))
    for layer in range(config.num_layers):
        stages += [
            Stage(f"blocks.{layer}.{stage.name}", stage.dims) for stage in _block_stages(config, layer, adapters)
        ]
    if config.has_final_norm:
        stages += norm_stages("ln_final", has_selected_rows=True)
    return [*stages, *OUTPUT_STAGES]


class Widths(Protocol):
    """The sizes that determine the shapes of stages; a `ModelConfig` and a `WorkedExample` have them."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def d_head(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def d_mlp(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def sizes_of(config: Widths, num_positions: int) -> dict[str, int]:
    """The length of each named dim for one prompt of `num_positions` tokens, computed without a cache."""
    sizes = {
        "batch": 1,
        "one": 1,
        "position": num_positions,
        "query": num_positions,
        "key": num_positions,
        "head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "d_head": config.d_head,
        "d_model": config.d_model,
        "d_mlp": config.d_mlp,
        "d_vocab": config.vocab_size,
        "d_q": config.num_heads * config.d_head,
        "d_k": config.num_kv_heads * config.d_head,
    }
    if isinstance(config, ModelConfig) and config.num_experts:
        sizes |= {"expert": config.num_experts, "expert_rank": config.num_experts_per_token}
    return sizes


def count_numbers(stages: Iterable[Stage], sizes: Mapping[str, int]) -> int:
    """Count the numbers of some stages whose dims have these sizes."""
    return sum(math.prod(stage.shape(sizes)) for stage in stages)


class UnknownStage(ValueError):
    """A glob matches no stage. `index` is the place of the glob in the list of globs."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def select(stages: Iterable[Stage], patterns: Sequence[str]) -> list[Stage]:
    """Select the stages whose name matches any of the globs, in the order of computation.

    TransformerLens's `hook_` is removed from the globs. Raises `UnknownStage`, which is a `ValueError`, for the first
    glob that matches nothing; the message says what is wrong, or names similar stages.
    """
    stages = list(stages)
    names = _names(tuple(stage.name for stage in stages))
    selected = 0
    for index, pattern in enumerate(patterns):
        glob = pattern.replace("hook_", "")
        matched = names.match(glob)
        if not matched:
            hint = stage_hint(glob, [stage.name for stage in stages], lambda other: bool(names.match(other)))
            reason = f"matches no stage; {hint}" if hint else "matches no stage"
            end = "" if reason.endswith("?") else "."
            raise UnknownStage(index, f"{pattern!r} {reason}{end} GET /model lists all stages.")
        selected |= matched
    return [stages[index] for index in names.indices(selected)]


def select_rows(stages: Sequence[Stage], name: str) -> Stage:
    """Select the one stage with this name. Raises `UnknownStage` unless it has a row for each position of a pass."""
    selected = select(stages, [name])
    if len(selected) > 1:
        raise UnknownStage(0, f"{name!r} matches {len(selected)} stages; name one")
    [stage] = selected
    if "key" in stage.dims or stage.has_selected_rows:
        reason = f"{stage.name} has no row for each position that a pass computes; take one such as resid_post"
        raise UnknownStage(0, reason)
    return stage


@lru_cache(maxsize=8)
def _names(names: tuple[str, ...]) -> Names:
    """Index the stage names of a network. The index is cached: building it takes longer than matching most globs."""
    return Names(names)


def last_residuals(config: ModelConfig) -> list[Stage]:
    """The stage of each block that the logit lens decodes. Decoding that of the last block gives the real logits."""
    name = "ln2.out" if config.norm_placement == "post" else "resid_post"
    names = {f"blocks.{layer}.{name}" for layer in range(config.num_layers)}
    return [stage for stage in stages_of(config) if stage.name in names]
