"""Load a LoRA adapter that PEFT has saved, for the network of a loaded checkpoint.

As for checkpoints, loading is strict, and files are untrusted: only safetensors are read, and names, shapes and dtypes
of all tensors are checked before any data is read. The names of the changed modules are those of the checkpoint's
family, so that adapters of every family can be loaded.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoints.adapter_config import CONFIG, AdapterConfig, read_adapter_config
from model.checkpoints.families.family import Family, Part
from model.checkpoints.load import Checkpoint
from model.checkpoints.network_weights import DTYPES
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.checkpoints.tensor_source import TensorSource
from model.config import ModelConfig
from model.errors import CheckpointError, join_names
from model.network.adapters import Adapter, LowRankLayer

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PICKLE_REASON = "is a pickle, and pickles are refused, because opening one can run code"
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_VISION = re.compile(r"(^|\.)(vision_\w+|visual|multi_modal_projector)\.")
# Names of tensors that are not implemented -> what they are.
_REASONS = (
    (_VISION, "they change the part that reads images"),
    (r"lora_embedding_|embed_tokens|embed_in|\.wte\.|\.wpe\.", "they change the embedding"),
    (r"trainable_tokens_", "they train rows of the embedding"),
    (r"lora_magnitude_vector", "they belong to DoRA (use_dora)"),
    (r"(lm_head|embed_out)\.", "they change the head"),
    (r"\.experts\.|\.block_sparse_moe\.|\.mlp\.gate\.", "they change experts or their router"),
    (r"\.lora_[AB]\.\w+\.weight$", "they have the name of an adapter in theirs; save it with save_pretrained of PEFT"),
    (r"\.lora_[AB]\.bias$", "they are biases (lora_bias)"),
    (r"\.bias$", "they are biases of the base network"),
    (r"^(?!.*\.lora_)", "they are weights of the base network, trained with modules_to_save"),
    (r"^(?!base_model\.model\.)", f"their names lack {PREFIX}; save the adapter with save_pretrained of PEFT"),
)


@dataclass(frozen=True)
class Module:
    """A linear module of the network that an adapter was trained for, and the outputs of our layer that it computes."""

    part: Part
    layer: int  # its number in the network
    num_inputs: int
    first_output: int

    @property
    def name(self) -> str:
        return self.part.name.removesuffix(".weight")

    @property
    def num_outputs(self) -> int:
        return self.part.num_rows

    @property
    def names(self) -> tuple[str, str]:
        """The names of its two tensors."""
        return f"{PREFIX}{self.name}{LORA_A}", f"{PREFIX}{self.name}{LORA_B}"


def find_adapter(path: str | Path) -> Path:
    """The directory of an adapter. Raises `CheckpointError` if there is none."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"{path}: no such directory; use one with {CONFIG} and {WEIGHTS}, as PEFT saves them")
    return directory


def load_adapter(checkpoint: Checkpoint, path: str | Path, name: str | None = None) -> Adapter:
    """Load the adapter in the directory `path` for the network of `checkpoint`, in its dtype and on its device.

    `name` is by default the name of the directory. Raises `CheckpointError`, whose message says what is wrong.
    """
    directory = find_adapter(path)
    if not (directory / WEIGHTS).exists() and (directory / PICKLE).exists():
        raise CheckpointError(f"{directory / PICKLE}: {PICKLE_REASON}; save the adapter again, as {WEIGHTS}")
    if checkpoint.family is None:
        raise CheckpointError(f"{path}: adapters need a checkpoint that was loaded from files")
    config = read_adapter_config(directory / CONFIG)
    source = SafetensorsFiles(directory / WEIGHTS)
    layers = adaptable_layers(checkpoint.family, checkpoint.model.config)
    layers = with_stored_names(layers, source.headers, checkpoint.family.prefix)
    check_tensors(source, config, [module for modules in layers.values() for module in modules])
    weight, ops = checkpoint.model.embed.weight, checkpoint.model.backend.ops
    adapted, ranks = {}, set()
    for layer_name, modules in layers.items():
        own = [module for module in modules if module.names[0] in source.headers]
        if own:
            matrices = read_matrices(source, config, own, num_outputs=sum(each.num_outputs for each in modules))
            a, b = (matrix.to(weight.device, weight.dtype) for matrix in matrices)
            if not (a.isfinite().all() and b.isfinite().all()):
                names = join_names(name for module in own for name in module.names)
                raise CheckpointError(f"{WEIGHTS} has numbers that are not finite in {weight.dtype}: {names}")
            adapted[layer_name] = LowRankLayer(a, b, ops)
            ranks |= {config.rank_of(module.name) for module in own}
    return Adapter(name or directory.resolve().name, adapted, sorted(ranks))


def adaptable_layers(family: Family, config: ModelConfig) -> dict[str, list[Module]]:
    """The linear layers that an adapter may change, and the modules of the family that each of them computes.

    Embeddings, the head, and layers of experts are not among them.
    """
    width, num_heads = config.d_model, config.num_heads + 2 * config.num_kv_heads
    sizes = {
        "attn.qkv": (width, num_heads * config.d_head),
        "attn.out": (config.num_heads * config.d_head, width),
        "mlp.up": (width, config.d_mlp * (2 if config.gated else 1)),
        "mlp.down": (config.d_mlp, width),
    }
    return {
        f"blocks.{layer}.{place}": _modules(family, config, layer, place, *size)
        for layer in range(config.num_layers)
        for place, size in sizes.items()
        if place.startswith("attn.") or not config.has_experts(layer)
    }


def _modules(
    family: Family, config: ModelConfig, layer: int, place: str, num_inputs: int, num_outputs: int
) -> list[Module]:
    parts = family.parts(f"blocks.{layer}.{place}.weight", (num_outputs, num_inputs), config)
    ends = accumulate(part.num_rows for part in parts)
    return [Module(part, layer, num_inputs, end - part.num_rows) for part, end in zip(parts, ends, strict=True)]


def with_stored_names(
    layers: Mapping[str, list[Module]], names: Collection[str], prefix: str
) -> dict[str, list[Module]]:
    """The same modules with the names that they have in the base network of an adapter.

    It may have been the network without its head, whose modules have no `prefix`, or a part of a larger model.
    """
    known = {module.name.removeprefix(prefix) for modules in layers.values() for module in modules}
    found = {stored for name in names if (stored := _stored_prefix(name, known)) is not None}
    if prefix in found or len(found) != 1:
        return dict(layers)
    (stored_prefix,) = found

    def renamed(module: Module) -> Module:
        name = stored_prefix + module.part.name.removeprefix(prefix)
        return replace(module, part=replace(module.part, name=name))

    return {layer: [renamed(module) for module in modules] for layer, modules in layers.items()}


def _stored_prefix(tensor_name: str, known: Collection[str]) -> str | None:
    """The part of a tensor's name before the name of a known module. None for other tensors."""
    name = tensor_name.removeprefix(PREFIX).removesuffix(LORA_A)
    parts = name.split(".")
    for begin in range(len(parts)):
        if (rest := ".".join(parts[begin:])) in known:
            return None if _VISION.search(name) else name.removesuffix(rest)
    return None


def _reason(name: str, prefix: str, num_layers: int) -> str:
    """Say why a tensor of an adapter cannot be used."""
    layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    for pattern, reason in _REASONS:
        if re.search(pattern, name):
            return reason
    if layer is not None and int(layer[1]) >= num_layers:
        return f"layer {layer[1]} does not exist, because the network has {num_layers} layers"
    return f"the network has no such module; the names of its modules begin with {prefix or 'layers.'}"


def check_tensors(source: TensorSource, config: AdapterConfig, modules: Sequence[Module]) -> None:
    """Raise `CheckpointError` unless the file has exactly the tensors that the config asks for, in the right shapes.

    Only headers are read.
    """
    headers = source.headers
    surplus = sorted(headers.keys() - {name for module in modules for name in module.names})
    if surplus:
        prefix, num_layers = modules[0].name.rsplit(".", 4)[0] + ".", 1 + max(module.layer for module in modules)
        by_reason: dict[str, list[str]] = {}
        for name in surplus:
            by_reason.setdefault(_reason(name, prefix, num_layers), []).append(name)
        reasons = ". ".join(f"{join_names(names)}; {reason}" for reason, names in by_reason.items())
        raise CheckpointError(
            f"{WEIGHTS} has tensors that are not implemented: {reasons}. An adapter may change linear layers of "
            "attention and of feed-forward networks, but not embeddings, the head or experts"
        )
    stored = [module for module in modules if any(name in headers for name in module.names)]
    wanted = [module for module in modules if config.includes(module.name, module.layer)] if config.is_complete else []
    missing = sorted({name for module in (*stored, *wanted) for name in module.names} - headers.keys())
    if missing:
        raise CheckpointError(f"{WEIGHTS} lacks {join_names(missing)}")
    if config.is_complete and len(wanted) < len(stored):
        others = [name for module in stored if module not in wanted for name in module.names]
        raise CheckpointError(f"{WEIGHTS} has tensors that {CONFIG} does not name: {join_names(others)}")
    if not stored:
        raise CheckpointError(f"{WEIGHTS} has no tensors")
    for module in stored:
        rank = config.rank_of(module.name)
        shapes = (rank, module.num_inputs), (module.num_outputs, rank)
        for name, shape in zip(module.names, shapes, strict=True):
            header = headers[name]
            if header.shape != shape:
                raise CheckpointError(f"{name} has the shape {header.shape}, but network and config ask for {shape}")
            if header.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{name} is {header.stored_as}, which is not implemented; known: {', '.join(DTYPES)}"
                )


def read_matrices(
    source: TensorSource, config: AdapterConfig, modules: Sequence[Module], *, num_outputs: int
) -> tuple[Tensor, Tensor]:
    """The matrices a (r, K) and b (N, r) in float64 that add to one of our layers what all its modules add.

    `a` has the rows of all modules. In `b`, which includes the scales, each module has its own rows and columns.
    """
    parts = [source.read(module.names[0]).double() for module in modules]
    b = torch.zeros(num_outputs, sum(map(len, parts)), dtype=torch.float64)
    begin = 0
    for module, part in zip(modules, parts, strict=True):
        own = source.read(module.names[1]).double() * config.scale_of(module.name)
        if module.part.layout == "interleaved":
            own = module.part.to_rows(own)  # in the order of our rows, as the weight
        outputs = slice(module.first_output, module.first_output + module.num_outputs)
        b[outputs, begin : begin + len(part)] = own
        begin += len(part)
    return torch.cat(parts), b
