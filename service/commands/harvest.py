"""`forwardscope harvest MODEL TEXT...`: write the activations of a corpus to files."""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from forwardscope import Client, ForwardscopeError
from forwardscope.local_harvest_of_server import served_model
from model.analysis.auto_quantization import resolve
from model.analysis.harvest.harvest import DEFAULT_FILE_BYTES, DEFAULT_TOP_K, HarvestOptions, Store, harvest
from model.analysis.harvest.passes import HarvestedModel, local_model
from model.analysis.harvest.statistics import Statistic
from model.checkpoints.load import load_checkpoint
from model.choices import Dtype, Kernels, Quantization
from model.command_line import Parser, number, one_of
from model.device import find_device
from model.errors import InvalidField
from model.server_address import is_url
from service import PREFIX
from service.settings import read_size

DESCRIPTION = """Run a model over texts and write the rows of some stages, one for each token.

MODEL is a directory, a *.gguf file, a hub id, "bundled" or the URL of a running server. A TEXT is a file in UTF-8, or
a *.jsonl or *.parquet file with a text or a list of token ids in each row. The same command goes on with a harvest that
was interrupted. docs/harvesting.md describes the files."""
OF_CHECKPOINT = {"dtype": "auto", "device": "auto", "quantize": "stored", "kernels": "auto"}
"""The options that a server decides, with their defaults."""


def main() -> None:
    """Exit with 0, 1 after a failure, and 2 for a wrong command line."""
    options = make_parser().parse_args()
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")  # otherwise a line for each pass of a server
    try:
        for path in options.texts:
            path.stat()  # a wrong path is told before the model is loaded
        settings = HarvestOptions(
            context=options.context,
            packed=not options.by_document,
            store=options.store,
            statistics=tuple(options.statistics),
            top_k=options.top_k,
            file_bytes=options.file_bytes,
            field=options.field,
        )
        with open_model(options) as model:
            found = harvest(model, options.texts, options.stages, options.out, settings)
    except (ValueError, OSError, ForwardscopeError) as error:
        sys.stderr.write(f"forwardscope harvest: {error}\n")
        sys.exit(1)
    num_bytes = sum(each.num_bytes for each in found.files)
    sys.stdout.write(f"{found.num_tokens} tokens, {num_bytes} bytes in {options.out}\n")


@contextmanager
def open_model(options: argparse.Namespace) -> Iterator[HarvestedModel]:
    """The model in this process, or that of a server. Raises `InvalidField` for an option that the server decides."""
    chosen: dict[str, Any] = {name: getattr(options, name) for name in OF_CHECKPOINT}
    if not is_url(options.model):
        chosen["device"] = find_device(options.device)
        chosen["quantize"] = resolve(options.model, options.quantize, None, options.kernels)  # calibrated, as by `load`
        yield local_model(load_checkpoint(options.model, **chosen))
        return
    for name, value in chosen.items():
        if value != OF_CHECKPOINT[name]:
            raise InvalidField(f"--{name}", "is decided by the server; leave it out")
    with Client(options.model, options.api_key or os.environ.get(f"{PREFIX}API_KEY")) as client:
        yield served_model(client._send)


def make_parser() -> Parser:
    parser = Parser(prog="forwardscope harvest", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("texts", metavar="TEXT", nargs="+", type=Path)
    parser.add_argument(
        "--stages", nargs="+", action="extend", required=True, metavar="GLOB", help='such as "blocks.3.resid_post"'
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIRECTORY", help="a new or an empty directory")
    parser.add_argument(
        "--context", type=number(int, 1), help="tokens of a pass; default: 1024, or the context of the model"
    )
    parser.add_argument(
        "--by-document", action="store_true", help="begin a context with each document, instead of full contexts"
    )
    parser.add_argument("--field", default="text", help="the key or the column that has the documents; default: text")
    parser.add_argument(
        "--store", default="auto", type=one_of(*get_args(Store)), help="dtype of the rows; default: that of the network"
    )
    parser.add_argument(
        "--statistics",
        nargs="+",
        action="extend",
        default=[],
        type=one_of(*get_args(Statistic)),
        help=f"store these instead of the rows: {', '.join(get_args(Statistic))}",
    )
    parser.add_argument("--top-k", type=number(int, 1), default=DEFAULT_TOP_K, help="examples of each neuron")
    parser.add_argument(
        "--file-bytes", type=size, default=DEFAULT_FILE_BYTES, metavar="SIZE", help="of a file; default: 256M"
    )
    dtypes = ("auto", *get_args(Dtype))
    parser.add_argument("--dtype", type=one_of(*dtypes), help="of the network; default: auto")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N; default: auto")
    parser.add_argument("--quantize", type=one_of(*get_args(Quantization)), help="default: stored")
    parser.add_argument("--kernels", type=one_of(*get_args(Kernels)), help="default: auto")
    parser.set_defaults(**OF_CHECKPOINT)
    parser.add_argument("--api-key", help=f"key of the server; default: {PREFIX}API_KEY of the environment")
    return parser


def size(text: str) -> int:
    try:
        found: int = read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found
