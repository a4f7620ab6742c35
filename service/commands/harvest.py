"""`forwardscope harvest MODEL TEXT...`: write the activations of a corpus to files."""

import argparse
import logging
import sys
from pathlib import Path
from typing import get_args

from model.analysis.harvest.harvest import DEFAULT_FILE_BYTES, DEFAULT_TOP_K, HarvestOptions, Store, harvest
from model.analysis.harvest.statistics import Statistic
from model.checkpoints.load import load_checkpoint
from model.choices import Dtype, Kernels, Quantization
from model.command_line import Parser, number, one_of
from model.device import find_device
from service.settings import read_size

DESCRIPTION = """Run a model over texts and write the rows of some stages, one for each token.

MODEL is a directory, a *.gguf file, a hub id or "bundled". A TEXT is a file in UTF-8, or a *.jsonl or *.parquet file
with a text or a list of token ids in each row. The same command goes on with a harvest that was interrupted.
docs/harvesting.md describes the files."""


def main() -> None:
    """Exit with 0, 1 after a failure, and 2 for a wrong command line."""
    options = make_parser().parse_args()
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    try:
        for path in options.texts:
            path.stat()  # a wrong path is told before the model is loaded
        checkpoint = load_checkpoint(
            options.model,
            dtype=options.dtype,
            device=find_device(options.device),
            quantize=options.quantize,
            kernels=options.kernels,
        )
        settings = HarvestOptions(
            context=options.context,
            packed=not options.by_document,
            store=options.store,
            statistics=tuple(options.statistics),
            top_k=options.top_k,
            file_bytes=options.file_bytes,
            field=options.field,
        )
        found = harvest(checkpoint, options.texts, options.stages, options.out, settings)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"forwardscope harvest: {error}\n")
        sys.exit(1)
    num_bytes = sum(each.num_bytes for each in found.files)
    sys.stdout.write(f"{found.num_tokens} tokens, {num_bytes} bytes in {options.out}\n")


def make_parser() -> Parser:
    parser = Parser(prog="forwardscope harvest", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("texts", metavar="TEXT", nargs="+", type=Path)
    parser.add_argument("--stages", nargs="+", required=True, metavar="GLOB", help='such as "blocks.3.resid_post"')
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
        default=[],
        type=one_of(*get_args(Statistic)),
        help=f"store these instead of the rows: {', '.join(get_args(Statistic))}",
    )
    parser.add_argument("--top-k", type=number(int, 1), default=DEFAULT_TOP_K, help="examples of each neuron")
    parser.add_argument(
        "--file-bytes", type=size, default=DEFAULT_FILE_BYTES, metavar="SIZE", help="of a file; default: 256M"
    )
    dtypes = ("auto", *get_args(Dtype))
    parser.add_argument("--dtype", default="auto", type=one_of(*dtypes), help="of the network; default: auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; default: auto")
    parser.add_argument("--quantize", default="stored", type=one_of(*get_args(Quantization)), help="default: stored")
    parser.add_argument("--kernels", default="auto", type=one_of(*get_args(Kernels)), help="default: auto")
    return parser


def size(text: str) -> int:
    try:
        found: int = read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found
