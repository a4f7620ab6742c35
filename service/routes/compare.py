"""POST /compare: find the first stage at which the served model differs from another one.

The other one is uploaded stages, files of the operator, or the served model with other settings. Clients name no paths
or addresses of their own: a path is looked up below one directory that the operator has chosen.
"""

import base64
from functools import partial
from pathlib import Path

import torch
from fastapi import APIRouter, Response

from forwardscope.results import comparisons
from model.analysis.compare import Comparison, Options, compare_bytes, record_stages, require_comparable
from model.analysis.compare import compare as compare_stages
from model.analysis.compare.sources import Given, StageTensors, match_stages, read_safetensors_bytes, read_stage_file
from model.checkpoints.load import DTYPES, Checkpoint
from model.checkpoints.streamed import OpenCheckpoint, open_checkpoint
from model.choices import Quantization
from model.errors import CheckpointError, InvalidField
from model.ops.quantization import LayerFormats
from model.tracing.pauses import pause
from model.tracing.stages import stages_of
from service.answers.budget import Budget, ResponseContents, check_num_tokens
from service.answers.call import CallDep, ModelCall, model_call
from service.answers.comparisons import MAX_NOT_COMPARED, describe_comparison
from service.answers.prompts import prompt_ids
from service.http.bodies import JsonRoute
from service.http.compare_schemas import CompareRequest, CompareSetting
from service.http.encoding import to_json
from service.http.errors import ApiError, invalid
from service.settings import Settings

router = APIRouter(route_class=JsonRoute, tags=["inside"])
STAGE_SUFFIXES = (".safetensors", ".npz")
STAGE_BYTES = 1024  # the most bytes of a stage in the answer, without its errors by position and head
ERROR_BYTES = 27  # of one number in JSON
NAME_BYTES = 12 * 200  # of the name of a tensor that is not compared: 200 characters, escaped in JSON
FIELDS = {"prompt": "prompt", "b": "b", "map": "names"}  # of errors of a comparison; others are names of tensors
CONVERTED_BYTES = 8  # of a number of a weight, while its layer computes in float64
Source = StageTensors | OpenCheckpoint | None
"""The file of B, read or opened; None if B is the served model."""


@router.post(
    "/compare",
    summary="The first stage at which two models differ",
    response_model=comparisons.Comparison,
)
async def compare(body: CompareRequest, route: CallDep) -> Response:
    call, state = model_call(body, route), route.state
    if state.ranks is not None:
        message = (
            "a server with --tensor-parallel cannot compare: each process has only a share of the weights; use a "
            "server without the option, or the command `forwardscope compare`"
        )
        raise ApiError(400, message, code="tensor_parallel")
    if call.adapter is not None:
        raise invalid("model", "an adapter cannot be compared; name the served model, or leave the field out")
    if body.names and body.b.setting is not None:
        raise invalid("names", "is only for stages of a file; leave the field out")
    ids = await prompt_ids(call, body.prompt)
    limit = state.settings.max_compare_tokens
    check_num_tokens("prompt", len(ids), limit, "a comparison", "--max-compare-tokens")
    budget = make_budget(body, call.checkpoint, len(ids))
    budget.check(state)
    call.note_tokens(len(ids))
    return await call.respond(budget.response_bytes, partial(run, body, call, ids))


def make_budget(body: CompareRequest, checkpoint: Checkpoint, num_tokens: int) -> Budget:
    """Bound the answer, and the memory of all stages and of the largest weight."""
    config = checkpoint.model.config
    stages = [stage.name for stage in stages_of(config)]
    num_errors = num_tokens * body.per_position + config.num_heads * body.per_head
    extra_bytes = len(stages) * (STAGE_BYTES + ERROR_BYTES * num_errors) + MAX_NOT_COMPARED * NAME_BYTES
    contents = ResponseContents(num_records=1, extra_bytes=extra_bytes)
    largest_weight = CONVERTED_BYTES * config.d_model * max(config.vocab_size, 3 * config.d_mlp)
    num_bytes = compare_bytes(config, stages, num_tokens) + largest_weight
    return Budget(contents.num_bytes, num_bytes, "the prompt")


async def run(body: CompareRequest, call: ModelCall, ids: list[int]) -> bytes:
    """Compare, within the timeout, beside the network, and encode the answer.

    If the client disconnects, the comparison ends after the block that is computed, or when the files are read.
    """
    state = call.state
    state.worker.check_room(len(ids))
    found = await state.worker.executors.run_long("comparisons", partial(compare_all, body, call, ids))
    state.metrics.num_prompt_tokens += len(ids)
    return to_json(describe_comparison(found, call.checkpoint.name))


def open_sources(body: CompareRequest, call: ModelCall) -> tuple[OpenCheckpoint, Source]:
    """The files of A and of B. Those of A are opened once."""
    state, checkpoint = call.state, call.checkpoint
    if state.opened_checkpoint is None:
        assert checkpoint.location is not None, "the served checkpoint was loaded from files"
        state.opened_checkpoint = open_checkpoint(checkpoint.location, name=checkpoint.name)
    if body.b.tensors is not None:
        return state.opened_checkpoint, read_tensors(body.b.tensors)
    if body.b.path is not None:
        path = find_path(body.b.path, state.settings)
        return state.opened_checkpoint, read_path(path, path.parent, state.settings.max_pass_bytes)
    return state.opened_checkpoint, None


def compare_all(body: CompareRequest, call: ModelCall, ids: list[int]) -> Comparison:
    """Open the files, compute B's stages if B is a network, and compare. Raises 400 for stages that do not fit A."""
    opened, source = open_sources(body, call)
    pause()
    options = Options(per_position=body.per_position, per_head=body.per_head)
    dtype = None if body.dtype is None else DTYPES[body.dtype]
    try:
        given = given_stages(body, source, call, opened, ids)
        return compare_stages(opened, given, ids, options, dtype)
    except InvalidField as error:
        field = FIELDS.get(error.field)
        raise (invalid("b", str(error)) if field is None else invalid(field, error.reason)) from None
    except CheckpointError as error:
        raise invalid("b", str(error)) from None


def read_tensors(text: str) -> StageTensors:
    """The stages that a request holds as base64. Raises 400 if they are not a safetensors file."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
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
    body: CompareRequest, source: Source, call: ModelCall, opened: OpenCheckpoint, ids: list[int]
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
    return _setting_stages(body.b.setting, call, opened, ids)


def _setting_stages(setting: CompareSetting, call: ModelCall, opened: OpenCheckpoint, ids: list[int]) -> Given:
    checkpoint, settings = call.checkpoint, call.state.settings
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
    if quantize in ("int5", "int4"):  # a start with this setting calibrates, which takes too long for a request
        return [f"{quantize} rounded to nearest"]
    return [] if quantize in ("none", "stored") else [quantize]
