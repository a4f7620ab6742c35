"""The stages: every named tensor of the forward pass, and the tap that reads or edits them.

Names are TransformerLens's without `hook_`. A stage knows its dims by name, so its shape follows from the prompt
before anything is computed. This file knows nothing of the network's maths.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from model.config import ModelConfig
from model.globs import Names

Tap = Callable[[str, Tensor], Tensor]
"""Called with a stage's name and value as it is computed; the pass goes on with what it returns."""


@dataclass(frozen=True)
class Stage:
    """One named tensor and the names of its dims, e.g. `blocks.0.attn.pattern` (batch, head, query, key)."""

    name: str
    dims: tuple[str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in self.dims)


RESIDUAL = ("batch", "position", "d_model")
HEADS = ("batch", "position", "head", "d_head")
KV_HEADS = ("batch", "position", "kv_head", "d_head")
PATTERN = ("batch", "head", "query", "key")
HIDDEN = ("batch", "position", "d_mlp")
VOCABULARY = ("batch", "position", "d_vocab")

READ_OUT = (Stage("logits", VOCABULARY), Stage("probabilities", VOCABULARY), Stage("loss", ("batch", "position")))


def norm_stages(name: str, dims: tuple[str, ...] = RESIDUAL) -> list[Stage]:
    """The three stages of one norm: what it divides by, the result before gain and bias, and after."""
    return [Stage(f"{name}.scale", (*dims[:-1], "one")), Stage(f"{name}.normalized", dims), Stage(f"{name}.out", dims)]


def _attention_stages(config: ModelConfig) -> list[Stage]:
    stages = [Stage("attn.q", HEADS), Stage("attn.k", KV_HEADS), Stage("attn.v", KV_HEADS)]
    if config.qk_norm:
        stages += norm_stages("attn.q_norm", HEADS) + norm_stages("attn.k_norm", KV_HEADS)
    if config.positions == "rotary":
        stages += [Stage("attn.rot_q", HEADS), Stage("attn.rot_k", KV_HEADS)]
    stages += [Stage(f"attn.{name}", PATTERN) for name in ("scores", "attn_scores", "pattern")]
    return [*stages, Stage("attn.z", HEADS), Stage("attn_out", RESIDUAL)]


def _mlp_stages(config: ModelConfig) -> list[Stage]:
    names = ("mlp.pre", "mlp.pre_linear", "mlp.post") if config.gated else ("mlp.pre", "mlp.post")
    return [*(Stage(name, HIDDEN) for name in names), Stage("mlp_out", RESIDUAL)]


def _block_stages(config: ModelConfig) -> list[Stage]:
    pre, mid, post = (Stage(name, RESIDUAL) for name in ("resid_pre", "resid_mid", "resid_post"))
    ln1, ln2 = norm_stages("ln1"), norm_stages("ln2")
    attention, mlp = _attention_stages(config), _mlp_stages(config)
    if config.norm_placement == "pre":
        return [pre, *ln1, *attention, mid, *ln2, *mlp, post]
    return [pre, *attention, mid, *ln1, *mlp, post, *ln2]


def stages_of(config: ModelConfig) -> list[Stage]:
    """Every stage of a `Transformer` with this config, in firing order."""
    stages = [Stage("embed", RESIDUAL)]
    if config.positions != "rotary":
        stages.append(Stage("pos_embed", RESIDUAL))
    for layer in range(config.num_layers):
        stages += [Stage(f"blocks.{layer}.{stage.name}", stage.dims) for stage in _block_stages(config)]
    if config.has_final_norm:
        stages += norm_stages("ln_final")
    return [*stages, *READ_OUT]


class Widths(Protocol):
    """What the shapes of stages follow from: a `ModelConfig`, or a worked example."""

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
    """How long each named dim is for one prompt of `num_positions` tokens with no cache."""
    return {
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
    }


class UnknownStage(ValueError):
    """The glob at `index` of those given matches no stage."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def select(stages: Iterable[Stage], patterns: Sequence[str]) -> list[Stage]:
    """The stages whose name matches any glob, in firing order; TransformerLens's `hook_` in a glob is dropped.

    Raises `UnknownStage`, a `ValueError`, naming the first pattern that matches nothing, with the nearest names.
    """
    stages = list(stages)
    names = _names(tuple(stage.name for stage in stages))
    selected = 0
    for index, pattern in enumerate(patterns):
        glob = pattern.replace("hook_", "")
        matched = names.match(glob)
        if not matched:
            near = _nearest(glob, [stage.name for stage in stages])
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise UnknownStage(index, f"{pattern!r} matches no stage{hint}. GET /model lists them.")
        selected |= matched
    return [stages[index] for index in names.indices(selected)]


@lru_cache(maxsize=8)
def _names(names: tuple[str, ...]) -> Names:
    """The index of a network's stages, which takes longer to build than most globs take to match."""
    return Names(names)


def _nearest(glob: str, names: Sequence[str]) -> list[str]:
    """Up to three names like this glob, of its own layer or else of the first: all layers have the same stages."""
    layer = re.search(r"\.\d+\.", glob)
    of_layer = layer[0] if layer and any(layer[0] in name for name in names) else ".0."
    candidates = [name for name in names if of_layer in name or not re.search(r"\.\d+\.", name)]
    return difflib.get_close_matches(glob, candidates, n=3, cutoff=0.4)


class Probe:
    """The tap as one module of the network sees it: stage names are relative to the module's place.

    Without a tap it hands each tensor back. A tap may have a method `wants(name) -> bool`; a stage that it does not
    want is not offered to it, and where a fused kernel skips that stage, it is not computed. A tap that changes a stage
    returns another tensor of that shape and dtype, else `ValueError`; it never writes into the one that it was given.
    """

    __slots__ = ("_prefix", "_tap", "_wants")

    def __init__(self, tap: Tap | None, prefix: str = "") -> None:
        self._tap = tap
        self._prefix = prefix
        self._wants: Callable[[str], bool] = getattr(tap, "wants", lambda name: True)

    def at(self, place: str) -> "Probe":
        """The same tap, one step further inside: `probe.at("attn")("q", x)` is the stage `attn.q`."""
        return self if self._tap is None else Probe(self._tap, f"{self._prefix}{place}.")

    def of(self, tap: Tap) -> "Probe":
        """Another tap at the same place."""
        return Probe(tap, self._prefix)

    def wants(self, *names: str) -> bool:
        return self._tap is not None and any(self._wants(self._prefix + name) for name in names)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self._tap is None:
            return tensor
        full_name = self._prefix + name
        return tapped(self._tap, full_name, tensor) if self._wants(full_name) else tensor


def tapped(tap: Tap, name: str, tensor: Tensor) -> Tensor:
    """What a tap makes of a stage. `ValueError` unless it is a tensor of that shape and dtype: kernels trust them."""
    given = tap(name, tensor)
    if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
        raise ValueError(f"{name}: the tap returned no {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    return given


class Recorder:
    """A tap that keeps the chosen stages and changes nothing.

    `keep` turns a stage's value into what is stored (a slice, a summary; by default the tensor), so nothing more is
    held than was asked for.
    """

    def __init__(self, stages: Iterable[Stage], keep: Callable[[Stage, Tensor], Any] = lambda stage, tensor: tensor):
        self._stages = {stage.name: stage for stage in stages}
        self._keep = keep
        self.kept: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        return name in self._stages

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.kept[name] = self._keep(self._stages[name], tensor)
        return tensor


class Editor:
    """A tap that replaces stages: ablation, steering and patching are functions of the tensor.

    `edits` maps a stage's full name to a function.
    """

    def __init__(self, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._edits = dict(edits)

    def wants(self, name: str) -> bool:
        return name in self._edits

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return self._edits[name](tensor)


class Chain:
    """Several taps, each seeing what the one before it returned: an `Editor` and then a `Recorder`, say."""

    def __init__(self, *taps: Tap) -> None:
        self._probes = [Probe(tap) for tap in taps]

    def wants(self, name: str) -> bool:
        return any(probe.wants(name) for probe in self._probes)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for probe in self._probes:
            tensor = probe(name, tensor)
        return tensor
