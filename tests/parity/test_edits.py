"""Edits compute what hooks in Hugging Face `transformers` compute, for each operation on each kind of stage.

Hooks on modules change most stages. Stages inside of attention are changed in an attention function of our own, which
takes the place of the "eager" one, and the divisor of a norm in a hook that computes the norm again.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.analysis.edit_sources import compute_sources, edited_pass
from model.checkpoints.load import load_checkpoint
from model.network.transformer import Transformer
from model.tracing.edits import Edit, EditSource, plan_edits
from model.tracing.edits.bound_edit import normal_noise
from model.tracing.stages import Stage, stages_of
from tests.parity.reference import config_of
from tests.tiny import ROUNDING, quick, random_ids, write_reference

Change = Callable[[Tensor], Tensor]
"""A stage in our layout, with the dims of the stage table -> the stage with which the pass continues."""
LAYER, NUM_TOKENS = 0, 11
POSITIONS, KEYS, HEADS = [1, -3, (5, 6)], [0, 2, 5], [1, 2]
INDICES = [1, 8, 5, 6]  # what POSITIONS mean
FROM = [2, 7, 4, 9]  # positions of another prompt, for patches
EAGER = ("attn.rot_q", "attn.rot_k", "attn.scores", "attn.attn_scores", "attn.pattern")
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
# Where a stage is in a network of transformers: the output of a module, or its first input.
GATED = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.z": "input of self_attn.o_proj",
    "ln1.out": "input_layernorm",
    "mlp.pre": "mlp.gate_proj",
    "mlp.pre_linear": "mlp.up_proj",
    "mlp.post": "input of mlp.down_proj",
}
LLAMA = GATED | {"attn_out": "self_attn", "ln2.out": "post_attention_layernorm", "mlp_out": "mlp"}
GEMMA = GATED | {
    "attn_out": "post_attention_layernorm",
    "ln1_post.out": "post_attention_layernorm",
    "ln2.out": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
MODULES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "attn.q": "attn.c_attn",
        "attn.k": "attn.c_attn",
        "attn.v": "attn.c_attn",
        "attn.z": "input of attn.c_proj",
        "attn_out": "attn",
        "ln1.out": "ln_1",
        "ln2.out": "ln_2",
        "mlp.pre": "mlp.c_fc",
        "mlp.post": "input of mlp.c_proj",
        "mlp_out": "mlp",
    },
    "llama": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"attn.q_norm.out": "self_attn.q_norm", "attn.k_norm.out": "self_attn.k_norm"},
}
IN_BLOCK = ("resid_pre", "resid_mid", "resid_post", "ln1.scale", "ln2.normalized")
OUTER = {"gpt2": {"embed": "wte", "pos_embed": "wpe", "ln_final.out": "ln_f"}}


def stages_to_edit(family: str) -> list[str]:
    rotary = [] if family == "gpt2" else EAGER[:2]
    block = [*MODULES[family], *IN_BLOCK, *rotary, *EAGER[2:]]
    outer = OUTER.get(family, {"embed": "", "ln_final.out": ""})
    return [*(f"blocks.{LAYER}.{stage}" for stage in block), *outer, "logits"]


@contextmanager
def hooked(reference: Any, family: str, stage: str, change: Change) -> Iterator[None]:
    """Change a stage of a network of transformers."""
    body, name = reference.base_model, stage.removeprefix(f"blocks.{LAYER}.")
    layers = body.h if family == "gpt2" else body.layers
    block = layers[LAYER]
    with ExitStack() as stack:
        if name in EAGER:
            module = importlib.import_module(type(reference).__module__)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(module, "eager_attention_forward", partial(attention, name, change))
        elif name in ("resid_pre", "resid_post"):
            before = block if name == "resid_pre" else layers[LAYER + 1]
            stack.callback(before.register_forward_pre_hook(partial(change_input, change)).remove)
        elif name == "resid_mid":
            residual: list[Tensor] = []
            keep = block.register_forward_pre_hook(lambda module, given: residual.append(given[0]))
            stack.callback(keep.remove)
            added = block.get_submodule(MODULES[family]["attn_out"])
            change_sum = partial(change_output, lambda x: change(residual[-1] + x) - residual[-1])
            stack.callback(added.register_forward_hook(change_sum).remove)
        elif name.endswith((".scale", ".normalized")):
            norm = block.get_submodule(MODULES[family][f"{name.partition('.')[0]}.out"])
            stack.callback(norm.register_forward_hook(partial(norm_again, name, change)).remove)
        elif name in MODULES[family]:
            place = MODULES[family][name]
            own = block.get_submodule(place.removeprefix("input of "))
            change_heads = partial(with_heads, family, name, reference.config, change)
            if place.startswith("input of "):
                stack.callback(own.register_forward_pre_hook(partial(change_input, change_heads)).remove)
            else:
                stack.callback(own.register_forward_hook(partial(change_output, change_heads)).remove)
        elif name != "logits":
            outer = OUTER.get(family, {"embed": "embed_tokens", "ln_final.out": "norm"})
            stack.callback(body.get_submodule(outer[name]).register_forward_hook(partial(change_output, change)).remove)
        yield


def change_input(change: Change, module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (change(given[0]), *given[1:])


def change_output(change: Change, module: Any, given: Any, output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def with_heads(family: str, name: str, config: Any, change: Change, x: Tensor) -> Tensor:
    """Change a tensor whose heads are not a dim of their own."""
    if "_norm" in name:  # (B, H, T, D)
        return change(x.transpose(1, 2)).transpose(1, 2)
    if not name.startswith("attn."):
        return change(x)
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = x.unflatten(-1, (-1, d_head))
    if family != "gpt2" or name == "attn.z":
        return change(heads).flatten(2)
    q, k, v = heads.chunk(3, dim=2)
    parts = {"attn.q": q, "attn.k": k, "attn.v": v}
    return torch.cat([change(part) if part_name == name else part for part_name, part in parts.items()], 2).flatten(2)


def norm_again(name: str, change: Change, module: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """LayerNorm or RMSNorm, whose divisor or quotient is changed."""
    (x,) = given
    gain: Tensor
    bias: Tensor
    if isinstance(module, torch.nn.LayerNorm):
        x, eps, gain, bias = x - x.mean(-1, keepdim=True), module.eps, module.weight, module.bias
    else:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        gain, bias = module.weight + ("Gemma" in type(module).__name__), torch.zeros(())
    scale = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if name.endswith("scale"):
        return x / change(scale) * gain + bias
    return change(x / scale) * gain + bias


def attention(
    stage: str,
    change: Change,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by its formula, with the change of one stage in one layer."""

    def probe(name: str, x: Tensor) -> Tensor:
        return change(x) if module.layer_idx == LAYER and stage == f"attn.{name}" else x

    query = probe("rot_q", query.transpose(1, 2)).transpose(1, 2)
    key = probe("rot_k", key.transpose(1, 2)).transpose(1, 2)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = probe("attn_scores", probe("scores", scores).masked_fill(attention_mask < -1, -math.inf))
    pattern = probe("pattern", scores.softmax(-1))
    return (pattern @ value).transpose(1, 2), pattern


def logits_of(reference: Any, family: str, ids: Sequence[int], stage: str, change: Change) -> Tensor:
    with torch.no_grad(), hooked(reference, family, stage, change):
        logits: Tensor = reference(torch.tensor([ids]), use_cache=False).logits
    return (change(logits) if stage == "logits" else logits)[0]


def captured(reference: Any, family: str, ids: Sequence[int], stage: str) -> Tensor:
    """A stage of a network of transformers."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    logits_of(reference, family, ids, stage, keep)
    return kept[-1]


class Part:
    """The part of a stage that is edited, as (N positions, h heads, D numbers), or without heads (N, D)."""

    def __init__(self, stage: Stage, model: Transformer, window: int | None) -> None:
        self.stage = stage
        self.has_keys = "key" in stage.dims
        self.heads: list[int] | None = None
        if "head" in stage.dims:
            self.heads = HEADS
        elif "kv_head" in stage.dims:
            group = model.config.num_heads // model.config.num_kv_heads
            self.heads = sorted({head // group for head in HEADS})
        self.window = window

    @property
    def options(self) -> dict[str, Any]:
        """The fields of an edit that choose the part."""
        heads = {} if self.heads is None else {"heads": HEADS}
        return {"stage": self.stage.name, "positions": POSITIONS} | heads | ({"keys": KEYS} if self.has_keys else {})

    def take(self, x: Tensor, positions: Sequence[int] = INDICES) -> Tensor:
        x = x[0].transpose(0, 1) if self.has_keys else x[0]
        x = x[positions] if self.heads is None else x[positions][:, self.heads]
        return x[..., KEYS] if self.has_keys else x

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """Replace the part, except for keys that a query does not see."""
        x = x.clone()
        rows = x[0].transpose(0, 1) if self.has_keys else x[0]
        for n, position in enumerate(INDICES):
            for h, head in enumerate([None] if self.heads is None else self.heads):
                row = rows[position] if head is None else rows[position, head]
                new = part[n] if head is None else part[n, h]
                if not self.has_keys:
                    row[:] = new
                    continue
                for i, key in enumerate(KEYS):
                    if position - (self.window or NUM_TOKENS) < key <= position:
                        row[key] = new[i]
        return x

    def changed_by(self, change: Change, x: Tensor) -> Tensor:
        return self.put(x, change(self.take(x)))


Case = tuple[dict[str, Any], Change]


def cases(part: Part, size: torch.Size, other: Sequence[int], source: Tensor) -> dict[str, Case]:
    """The fields of an edit for each operation, and the same as a function of the part. `source`: the stage of the
    other prompt."""
    generator = torch.Generator().manual_seed(3)
    direction, full = torch.randn(size[-1:], generator=generator), torch.randn(size, generator=generator)
    unit = direction / direction.norm()
    dims = size if part.heads is None else (size[0], size[1], size[2])
    heads = [0] if part.heads is None else part.heads
    from_positions = INDICES if part.has_keys else FROM
    num_noise = max(INDICES) + 1 if part.has_keys else size[-1]
    places = [(position, head) for position in INDICES for head in heads]
    noise = normal_noise(5, part.stage.name, places, num_noise).view(len(INDICES), len(heads), -1).float()
    noise = (noise[..., KEYS] if part.has_keys else noise).reshape(dims)

    def along(x: Tensor) -> Tensor:
        coordinate: Tensor = (x @ unit)[..., None]
        return coordinate

    found: dict[str, Case] = {
        "zero": ({"op": "zero"}, torch.zeros_like),
        "set a value": ({"op": "set", "value": 0.4}, lambda x: torch.full_like(x, 0.4)),
        "set": (
            {"op": "set", "vector": full.transpose(0, 1) if part.has_keys else full},
            lambda x: full,
        ),
        "patch": (
            {"op": "patch", "source": EditSource(ids=other, positions=from_positions)},
            lambda x: part.take(source, from_positions),
        ),
        "add": ({"op": "add", "vector": direction, "scale": 1.5}, lambda x: x + 1.5 * direction),
        "add a value": ({"op": "add", "value": -0.7}, lambda x: x - 0.7),
        "scale": ({"op": "scale", "factor": -0.5}, lambda x: -0.5 * x),
        "cap": ({"op": "cap", "min": -0.1, "max": 0.2}, lambda x: x.clamp(-0.1, 0.2)),
        "noise": ({"op": "noise", "std": 0.3, "seed": 5}, lambda x: x + 0.3 * noise),
    }
    if part.has_keys:
        return found
    rows = source[0] if part.heads is None else source[0][:, part.heads]
    return found | {
        "mean": ({"op": "mean", "source": EditSource(ids=other)}, lambda x: rows.mean(0).expand_as(x)),
        "project": ({"op": "project", "vector": direction}, lambda x: x - along(x) * unit),
        "project a part": ({"op": "project", "vector": direction, "coeff": 2}, lambda x: x + along(x) * unit),
        "cap a component": (
            {"op": "cap", "vector": direction, "max": -3},
            lambda x: x + (along(x).clamp(max=-3) - along(x)) * unit,
        ),
    }


def is_sensible(family: str, name: str, case: str) -> bool:
    """The divisor of a norm must stay away from 0. LayerNorm removes a constant from the residual stream."""
    if name.endswith(".scale"):
        return case in ("set a value", "patch", "scale", "mean")
    is_residual = name.endswith(("embed", "attn_out", "mlp_out", "resid_pre", "resid_mid", "resid_post"))
    return not (case == "add a value" and family == "gpt2" and is_residual)


@pytest.mark.parametrize("family", quick(2, FAMILIES))
def test_every_operation_on_every_kind_of_stage_equals_hooks_in_transformers(family: str, tmp_path: Path) -> None:
    reference = write_reference(config_of(family, dict(FAMILIES[family])), tmp_path)
    model = load_checkpoint(str(tmp_path), dtype="float32").model
    ids, other = (random_ids(model.config.vocab_size, NUM_TOKENS, seed=seed)[0].tolist() for seed in (1, 2))
    table = {stage.name: stage for stage in stages_of(model.config)}
    plain = logits_of(reference, family, ids, "logits", lambda x: x)
    for name in stages_to_edit(family):
        part = Part(table[name], model, model.config.window_of(LAYER))
        source = captured(reference, family, other, name)
        for case, (fields, change) in cases(part, part.take(source).shape, other, source).items():
            if not is_sensible(family, name, case):
                continue
            plan = plan_edits([Edit(**part.options, **fields)], model.config, list(table.values()), ids, NUM_TOKENS)
            found = edited_pass(model, ids, plan.bind(compute_sources(model, plan)))
            expected = logits_of(reference, family, ids, name, partial(part.changed_by, change))
            assert (expected - plain).abs().max() > 1e-3, f"{name}: {case} changes nothing"
            tolerance = ROUNDING[torch.float32] * max(1.0, float(expected.abs().max()) / 10)
            difference = float((found - expected).abs().max())
            assert difference < tolerance, f"{name}: {case} differs by {difference}"
