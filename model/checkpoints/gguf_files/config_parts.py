"""The parts of a config.json that all architectures of GGUF files share: sizes, heads, rotary positions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.checkpoints.gguf_files.dequantize import TensorRows
from model.checkpoints.gguf_files.header import StoredTensor
from model.checkpoints.gguf_files.metadata import MetadataReader
from model.checkpoints.gguf_files.rope import read_rope
from model.checkpoints.gguf_files.tensors import CONFIG_TENSORS
from model.config import MAX_SIZES
from model.errors import CheckpointError


@dataclass(frozen=True)
class ConfigSource:
    """The metadata and the tensors of a GGUF file, from which a config is read."""

    reader: MetadataReader
    tensors: Mapping[str, StoredTensor]

    def has(self, name: str) -> bool:
        """Whether the first layer has a tensor."""
        return f"blk.0.{name}" in self.tensors


def read_sizes(source: ConfigSource) -> dict[str, Any]:
    """The sizes that every architecture has. They are checked here, because later steps compute with them."""
    size = source.reader.size
    num_heads = size("attention.head_count", MAX_SIZES["num_heads"])
    return {
        "hidden_size": size("embedding_length", MAX_SIZES["d_model"]),
        "num_hidden_layers": size("block_count", MAX_SIZES["num_layers"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", MAX_SIZES["num_kv_heads"], num_heads),
        "max_position_embeddings": size("context_length", MAX_SIZES["max_positions"]),
    }


def read_head_dim(source: ConfigSource, sizes: Mapping[str, Any]) -> int:
    """The size of a head. By default the heads share the width of the network."""
    default = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_dim = source.reader.size("attention.key_length", MAX_SIZES["d_head"], default)
    source.reader.expect("attention.value_length", head_dim)
    return head_dim


def read_rotary(source: ConfigSource, rotary_dim: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys `rope_theta` and `rope_scaling`. Some files store the scaling of each frequency as a tensor."""
    factors = {}
    for name in CONFIG_TENSORS:
        tensor = source.tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != (rotary_dim // 2,):
            raise CheckpointError(f"{tensor.file}: {name} has the shape {tensor.shape}, not ({rotary_dim // 2},)")
        factors[name.removesuffix(".weight")] = TensorRows(tensor).values(0, 1)[0].float().numpy()
    return read_rope(source.reader, factors, rotary_dim, sizes["max_position_embeddings"])


def read_common(
    source: ConfigSource,
    model_type: str,
    *,
    always_head_dim: bool = False,
    partial_key: str | None = None,
    eps_key: str = "rms_norm_eps",
) -> dict[str, Any]:
    """The keys of most architectures.

    `always_head_dim`: state `head_dim` also where it is hidden_size / num_attention_heads. `partial_key`: the key for
    the part of each head that is rotated; None if all of it is. `eps_key`: the key of the epsilon of norms.
    """
    reader, sizes = source.reader, read_sizes(source)
    reader.ignore("rope.scaling.finetuned")
    head_dim = read_head_dim(source, sizes)
    stored_eps = "layer_norm_rms_epsilon" if eps_key == "rms_norm_eps" else "layer_norm_epsilon"
    config = {
        "model_type": model_type,
        **sizes,
        "intermediate_size": reader.integer("feed_forward_length"),
        eps_key: reader.number(f"attention.{stored_eps}"),
    }
    if always_head_dim or head_dim * sizes["num_attention_heads"] != sizes["hidden_size"]:
        config["head_dim"] = head_dim
    rotary_dim = reader.size("rope.dimension_count", head_dim, head_dim)
    if partial_key is None and rotary_dim != head_dim:
        raise reader.error("rope.dimension_count", f"is {rotary_dim}, but the size of a head is {head_dim}")
    if partial_key is not None:
        config[partial_key] = _fraction(rotary_dim, head_dim)
    return config | read_rotary(source, rotary_dim, sizes)


def _fraction(part: int, whole: int) -> float:
    """The fraction that gives `part` again when it is multiplied by `whole` and cut to an integer."""
    fraction = part / whole
    return fraction if int(fraction * whole) == part else math.nextafter(fraction, 2.0)
