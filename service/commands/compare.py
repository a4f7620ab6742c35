"""`forwardscope compare A B`: find the first stage at which two models differ."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from forwardscope import Client, ForwardscopeError
from model.analysis.auto_quantization import resolve
from model.analysis.compare import Comparison, Options, compare, compare_bytes, record_stages, require_comparable
from model.analysis.compare.report import report
from model.analysis.compare.sources import (
    Given,
    StageTensors,
    check_equal_ids,
    match_stages,
    read_name_map,
    read_stage_file,
)
from model.checkpoints.streamed import OpenCheckpoint, find_dtype, open_checkpoint
from model.choices import Dtype, Kernels, Quantization
from model.command_line import Parser, one_of
from model.errors import InvalidField, shortened
from model.server_address import is_url
from model.tracing.stages import stages_of
from service import PREFIX
from service.answers.comparisons import describe_comparison
from service.http.encoding import to_json

DEFAULT_PROMPT = "When Mary and John went to the store, John gave a drink to"
MAX_BYTES = 16 << 30  # of the stages in memory
STAGES_PER_REQUEST = 16
DESCRIPTION = """Find the first stage at which B differs from A, and say why, where a known mistake explains it.

A is a checkpoint: a directory, a GGUF file, a hub id or "bundled". It is computed in float64. B is one of
  - a safetensors or npz file of stages, named as ours, as in TransformerLens, or as in transformers
  - another checkpoint, or the same one with --dtype, --quantize or --kernels
  - the URL of a running Forwardscope
docs/comparing.md shows how to export stages. The exit status is 0 if nothing differs, 3 if a stage differs."""


def main() -> None:
    """Exit with 0 if no stage differs, 3 if one does, 1 after a failure, and 2 for a wrong command line."""
    options = make_parser().parse_args()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    try:
        found, name = run(options)
    except (ValueError, OSError, ForwardscopeError) as error:
        sys.stderr.write(f"forwardscope compare: {error}\n")
        sys.exit(1)
    text = (
        to_json(describe_comparison(found, name)).decode()
        if options.json
        else report(found, name, table=not options.verdict)
    )
    sys.stdout.write(text + "\n")
    sys.exit(0 if found.first is None else 3)


def make_parser() -> Parser:
    parser = Parser(prog="forwardscope compare", description=DESCRIPTION)
    parser.add_argument("a", metavar="A", help="the reference: a checkpoint")
    parser.add_argument("b", metavar="B", help="a file of stages, a checkpoint, or the URL of a running server")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text; default: the ids in the file of B, or a sentence about Mary and John")
    prompt.add_argument("--ids", type=read_ids, help="token ids, separated by commas")
    parser.add_argument(
        "--dtype",
        type=one_of(*get_args(Dtype)),
        help="the dtype in which B computes, which sets the noise floor; default: as B's weights are stored, or as the "
        "numbers in its file show",
    )
    parser.add_argument(
        "--quantize", type=one_of(*get_args(Quantization)), help="of B, if it is a checkpoint; default: none"
    )
    parser.add_argument(
        "--kernels", type=one_of(*get_args(Kernels)), help="of B, if it is a checkpoint; default: torch"
    )
    parser.add_argument("--map", type=Path, help="JSON file: name in the file of B -> our stage, null to leave it out")
    parser.add_argument("--per-position", action="store_true", help="also the error of each position")
    parser.add_argument("--per-head", action="store_true", help="also the error of each head")
    parser.add_argument("--verdict", action="store_true", help="without the table of stages")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--api-key", help=f"key of the server B; default: {PREFIX}API_KEY of the environment")
    return parser


def read_ids(text: str) -> list[int]:
    try:
        return [int(each) for each in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a list of token ids such as 1,2,3") from None


def run(options: argparse.Namespace) -> tuple[Comparison, str]:
    """The comparison, and the name of A."""
    check_options(options)
    a = open_checkpoint(options.a)
    tensors = read_stage_file(Path(options.b)) if is_stage_file(options.b) else None
    ids = find_ids(options, a, None if tensors is None else tensors.ids)
    num_bytes = compare_bytes(a.config, [stage.name for stage in stages_of(a.config)], len(ids))
    if num_bytes > MAX_BYTES:
        raise InvalidField("prompt", f"{len(ids)} tokens would take up to {num_bytes} bytes; use a shorter prompt")
    dtype = None if options.dtype is None else find_dtype(options.dtype)
    if tensors is not None:
        names = None if options.map is None else read_name_map(options.map)
        given = match_stages(tensors, a.config, ids, names)
    elif is_url(options.b):
        with Client(options.b, options.api_key or os.environ.get(f"{PREFIX}API_KEY")) as client:
            given = match_stages(fetch_stages(client, ids), a.config, ids)
    else:
        given = compute_stages(options, a, ids, dtype)
    return compare(a, given, ids, Options(options.per_position, options.per_head), dtype), a.name


def check_options(options: argparse.Namespace) -> None:
    """Raise `InvalidField` for an option that this kind of B cannot use."""
    is_file, is_server = is_stage_file(options.b), is_url(options.b)
    if options.map is not None and not is_file:
        raise InvalidField("--map", "is only for a file of stages")
    if options.api_key is not None and not is_server:
        raise InvalidField("--api-key", "is only for the URL of a running server")
    for name in ("quantize", "kernels"):
        if getattr(options, name) is not None and (is_file or is_server):
            raise InvalidField(f"--{name}", "is only for a checkpoint; what B has computed cannot be changed")


def is_stage_file(source: str) -> bool:
    """Whether B is a file of stages. A safetensors file with a config.json beside it and no stages is a checkpoint."""
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return not ((path.parent / "config.json").exists() and path.name.startswith("model"))
    return path.suffix in (".safetensors", ".npz", ".npy", ".pt", ".pth", ".bin") and "://" not in source


def find_ids(options: argparse.Namespace, a: OpenCheckpoint, stored: Sequence[int] | None) -> list[int]:
    """The token ids to compare on. Raises `InvalidField` if A cannot take them."""
    if options.ids is not None:
        ids = list(options.ids)
    elif options.prompt is None and stored is not None:
        ids = list(stored)
    elif a.tokenizer is not None:
        ids = a.tokenizer.encode(DEFAULT_PROMPT if options.prompt is None else options.prompt)
    else:
        raise InvalidField("--ids", "A has no tokenizer.json; give token ids")
    if not 1 <= len(ids) <= a.config.max_positions:
        raise InvalidField("prompt", f"has {len(ids)} tokens; A takes 1 to {a.config.max_positions}")
    for position, each in enumerate(ids):
        if not 0 <= each < a.config.vocab_size:
            raise InvalidField("prompt", f"{each} at position {position} is no token id of A")
    return ids


def compute_stages(
    options: argparse.Namespace, a: OpenCheckpoint, ids: Sequence[int], dtype: torch.dtype | None
) -> Given:
    """The stages of B, if it is a checkpoint."""
    b = open_checkpoint(options.b)
    require_comparable(a.config, b.config, len(ids))
    if a.tokenizer is not None and b.tokenizer is not None and options.ids is None:
        text = DEFAULT_PROMPT if options.prompt is None else options.prompt
        check_equal_ids(ids, b.tokenizer.encode(text))
    own = dtype or (torch.float32 if b.dtype == torch.float64 else b.dtype)
    setting: Quantization = options.quantize or "none"
    kernels: Kernels = options.kernels or "torch"
    quantize = resolve(options.b, setting, None, kernels)  # calibrated, as in a server with this setting
    network = b.network(own, quantize=quantize, kernels=kernels)
    described = ", ".join([str(own).removeprefix("torch."), *([] if setting == "none" else [setting]), kernels])
    return record_stages(f"{b.name} ({described})", network, ids, own, a.config)


def fetch_stages(client: Client, ids: Sequence[int]) -> StageTensors:
    """All stages of a running server, a few at a time, because its answers are limited."""
    info = client.model()
    names = [name for name, _ in info.stages]
    tensors: dict[str, torch.Tensor] = {}
    for first in range(0, len(names), STAGES_PER_REQUEST):
        trace = client.run(list(ids), names[first : first + STAGES_PER_REQUEST], top_k=0)
        tensors |= {name: torch.from_numpy(trace[name]) for name in trace}
    return StageTensors(f"{info.name} at {client.url}", tensors, list(ids))
