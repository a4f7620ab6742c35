"""Recognition of stages among the tensors of another program, by name, and conversion of their axes to our order.

Known names: ours, those of TransformerLens, and those of `transformers`: `hidden_states`, `attentions`, and the modules
of Llama-like networks and of GPT-2, whose outputs forward hooks record.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from model.config import ModelConfig
from model.errors import InvalidField, printable_name
from model.tracing.stages import Stage

ID_NAMES = ("input_ids", "tokens", "token_ids", "ids")
_HIDDEN = re.compile(r"(?:.*[./])?hidden_states?[._\[]?(\d{1,6})\]?")
_ATTENTIONS = re.compile(r"(?:.*[./])?attentions?[._\[](\d{1,6})\]?")
# `*+` does not backtrack, so a name with many such parts takes linear time.
_MODELS = r"(?:model\.|transformer\.|base_model\.)*+"
_MODULE = re.compile(_MODELS + r"(?:layers|h)\.(\d{1,6})(?:\.(.+?))?(?:\.(?:out|output))?")
_OUTER = re.compile(_MODELS + r"(.+?)(?:\.(?:out|output))?")
# The modules of a block in transformers -> the stage that is their output, in blocks whose norms come first.
_OF_BLOCK = {
    None: "resid_post",
    "input_layernorm": "ln1.out",
    "ln_1": "ln1.out",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn_out",
    "attn.c_proj": "attn_out",
    "post_attention_layernorm": "ln2.out",
    "ln_2": "ln2.out",
    "mlp.gate_proj": "mlp.pre",
    "mlp.up_proj": "mlp.pre_linear",
    "mlp.c_fc": "mlp.pre",
    "mlp.down_proj": "mlp_out",
    "mlp.c_proj": "mlp_out",
    "mlp": "mlp_out",
}
_OUTSIDE = {"embed_tokens": "embed", "wte": "embed", "wpe": "pos_embed", "norm": "ln_final.out", "ln_f": "ln_final.out"}
_OUTSIDE |= {"lm_head": "logits"}


def stage_name(name: str, config: ModelConfig, stages: Mapping[str, Stage]) -> str | None:
    """Translate another program's name of a tensor to ours; None if the tensor is not a stage of this network."""
    plain = name.replace("hook_", "")
    if "hook_" in name and config.norm == "layer" and plain.endswith(".normalized"):
        plain = plain.removesuffix("normalized") + "out"  # TransformerLens reads it after gain and bias
    if plain in stages:
        return plain
    found = _transformers_name(name, config)
    return found if found in stages else None


def _transformers_name(name: str, config: ModelConfig) -> str | None:
    if (hidden := _HIDDEN.fullmatch(name)) is not None:
        layer = int(hidden[1])
        if layer == config.num_layers:  # the last one is read after the final norm
            return "ln_final.out" if config.has_final_norm else None
        return f"blocks.{layer}.resid_pre"
    if (attentions := _ATTENTIONS.fullmatch(name)) is not None:
        return f"blocks.{int(attentions[1])}.attn.pattern"
    if config.norm_placement != "pre":
        return None
    if (module := _MODULE.fullmatch(name)) is not None and module[2] in _OF_BLOCK:
        part = _OF_BLOCK[module[2]]
        return None if part in _scaled_later(config) else f"blocks.{int(module[1])}.{part}"
    outer = _OUTER.fullmatch(name)
    outside = None if outer is None else _OUTSIDE.get(outer[1])
    return None if outside in _scaled_later(config) else outside


def _scaled_later(config: ModelConfig) -> set[str]:
    """The stages that `transformers` multiplies or caps after the module: the output of the module is not the stage."""
    stages = {"embed"} if config.embedding_scale != 1.0 else set()
    if config.residual_scale != 1.0:
        stages |= {"attn_out", "mlp_out"}
    if config.logits_scale != 1.0 or config.logits_softcap is not None:
        stages.add("logits")
    return stages


def unstacked(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Divide `hidden_states` and `attentions`, if they are stored as one tensor whose first axis is the layer."""
    divided = dict(tensors)
    for name, count in (("hidden_states", config.num_layers + 1), ("attentions", config.num_layers)):
        if name in divided and divided[name].dim() >= 3 and divided[name].shape[0] == count:
            divided |= {f"{name}.{layer}": each for layer, each in enumerate(divided.pop(name))}
    return divided


@dataclass(frozen=True)
class Layout:
    """A tensor in the shape of its stage, and the change that gave it this shape (empty: none)."""

    tensor: Tensor
    change: str


def layouts(name: str, tensor: Tensor, stage: Stage, sizes: Mapping[str, int]) -> Sequence[Layout]:
    """Every way in which a tensor can have the shape of a stage.

    There are two ways if a tensor of heads has as many positions as heads. Raises `InvalidField` with both shapes if
    there is none.
    """
    expected = stage.shape(sizes)
    found = [layout for layout in _candidates(tensor, stage, sizes) if layout.tensor.shape == expected]
    if not found:
        dims = ", ".join(stage.dims)
        reason = f"has the shape {tuple(tensor.shape)}, but {stage.name} is {expected} ({dims})"
        raise InvalidField(printable_name(name), f"{reason}; export one prompt, and all of its positions")
    return found


def _candidates(tensor: Tensor, stage: Stage, sizes: Mapping[str, int]) -> Iterator[Layout]:
    whole = Layout(tensor, "")
    batched = Layout(tensor[None], "the batch axis was added")
    for layout in (whole, batched):
        yield layout
        x, done = layout.tensor, f"{layout.change}; " if layout.change else ""
        if stage.dims[-1] == "one":
            yield Layout(x[..., None], f"{done}the last axis was added")
        if stage.dims[1:] in (("position", "head", "d_head"), ("position", "kv_head", "d_head")):
            if x.dim() == 4:
                yield Layout(x.transpose(1, 2), f"{done}heads and positions were exchanged")
            if x.dim() == 3 and x.shape[-1] == sizes[stage.dims[2]] * sizes["d_head"]:
                yield Layout(
                    x.reshape(*x.shape[:2], -1, sizes["d_head"]), f"{done}the last axis was divided into heads"
                )
