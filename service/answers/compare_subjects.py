"""The subjects of comparisons with the served model: uploaded stages, files of the operator, or other settings.

Clients name no paths or addresses of their own: a path is looked up below one directory that the operator has chosen.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path

import torch

from model.analysis.compare import record_stages, require_comparable
from model.analysis.compare.sources import Given, StageTensors, match_stages, read_safetensors_bytes, read_stage_file
from model.checkpoints.load import DTYPES, Checkpoint
from model.checkpoints.streamed import OpenCheckpoint, open_checkpoint
from model.choices import Quantization
from model.errors import CheckpointError
from model.ops.quantization import LayerFormats
from service.http.compare_schemas import CompareRequest, CompareSetting
from service.http.errors import invalid
from service.settings import Settings

STAGE_SUFFIXES = (".safetensors", ".npz")


def read_tensors(text: str) -> StageTensors:
    """The stages that a request holds as base64. Raises 400 if they are not a safetensors file."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("b.tensors", "is not base64; send the bytes of a safetensors file as base64") from None
    try:
        return read_safetensors_bytes(content, "b.tensors")
    except CheckpointError as error:
        raise invalid("b.tensors", str(error).removeprefix("b.tensors: ")) from None


def find_path(name: str, settings: Settings) -> Path:
    """The file or directory that a request names. Raises 400 if there is none, or if it is not below the directory."""
    if settings.compare_directory is None:
        raise invalid("b.path", "this server has no files to compare with; start it with --compare-directory DIRECTORY")
    root = settings.compare_directory.resolve()
    path = root / name
    try:
        path = path.resolve()
        is_found = path != root and path.is_relative_to(root) and path.exists()
    except (OSError, RuntimeError):  # such as a link to itself
        is_found = False
    if not is_found:
        raise invalid("b.path", f"{name!r} is not in the directory of --compare-directory")
    return path


def read_path(path: Path, root: Path, max_bytes: int) -> StageTensors | OpenCheckpoint:
    """Read a file of stages of up to `max_bytes`, or open a checkpoint. Errors name the path below `root` only."""
    try:
        if path.is_file() and path.suffix in STAGE_SUFFIXES:
            return read_stage_file(path, max_bytes)
        if path.is_dir() or path.suffix == ".gguf":
            return open_checkpoint(str(path), name=path.name)
    except (ValueError, OSError) as error:
        raise invalid("b.path", str(error).replace(f"{root}/", "")) from None
    raise invalid("b.path", "is neither a safetensors or npz file of stages nor a checkpoint")


def given_stages(
    body: CompareRequest,
    source: StageTensors | OpenCheckpoint | None,
    checkpoint: Checkpoint,
    opened: OpenCheckpoint,
    settings: Settings,
    ids: Sequence[int],
) -> Given:
    """The stages of B. If B is a network, it is computed here."""
    if isinstance(source, StageTensors):
        return match_stages(source, opened.config, ids, body.names)
    if isinstance(source, OpenCheckpoint):
        require_comparable(opened.config, source.config, len(ids))
        dtype = torch.float32 if source.dtype == torch.float64 else source.dtype
        dtype = dtype if body.dtype is None else DTYPES[body.dtype]
        return record_stages(source.name, source.network(dtype), ids, dtype, opened.config)
    assert body.b.setting is not None
    return _setting_stages(body.b.setting, checkpoint, opened, settings, ids)


def _setting_stages(
    setting: CompareSetting,
    checkpoint: Checkpoint,
    opened: OpenCheckpoint,
    settings: Settings,
    ids: Sequence[int],
) -> Given:
    served = checkpoint.model.embed.weight.dtype
    dtype = served if setting.dtype is None else DTYPES[setting.dtype]
    quantize = checkpoint.quantization if setting.quantize in (None, settings.quantize) else setting.quantize
    kernels = settings.kernels if setting.kernels is None else setting.kernels
    is_served = (dtype, quantize, kernels) == (served, checkpoint.quantization, settings.kernels)
    network = checkpoint.model if is_served else opened.network(dtype, quantize=quantize, kernels=kernels)
    described = ", ".join([str(dtype).removeprefix("torch."), *_described(quantize, settings), kernels])
    return record_stages(f"{checkpoint.name} ({described})", network, ids, dtype, opened.config)


def _described(quantize: Quantization | LayerFormats, settings: Settings) -> list[str]:
    if not isinstance(quantize, str):
        return [settings.quantize]
    return [] if quantize in ("none", "stored") else [quantize]
