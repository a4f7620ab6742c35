"""The options of `forwardscope serve`, one for each setting, and errors in the words of the command line.

PyTorch is not imported here, so that `--help` and mistakes are answered at once.
"""

import argparse
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from model.command_line import Parser, describe_range, nearest
from model.errors import InvalidField, join_words, shortened
from service import PREFIX
from service.settings import Settings

TRUTHS = ("true", "false")
ANSWERS = {  # the options of vLLM, llama-server, TGI and transformers, by what to write in their place
    "--model": "-m --hf-repo -hf --model-id --model-path -hff --hf-file",
    "--model-name": "--served-model-name --alias -a",
    "--port": "-p",
    "--threads": "-t",
    "--tensor-parallel": "--tp -tp --tensor-parallel-size --num-shard",
    "--quantize": "--quantization",
    "--quantize int8": "--load-in-8bit",
    "--quantize int4": "--load-in-4bit",
    "--cache-bytes": "--gpu-memory-utilization --kv-cache-memory-bytes",
    "--kv-cache-dtype": "--cache-type-k --cache-type-v",
    "--max-num-seqs": "-np --parallel --max-batch-size",
    "--max-waiting-requests": "--max-concurrent-requests --max-queue-size",
    "--max-step-tokens": "--max-num-batched-tokens --batch-size -b",
    "--device": "-ngl --n-gpu-layers --gpu-layers",
    "--adapter": "--lora --lora-modules",
    "--cors-origin": "--allowed-origins",
    "--chat-template": "--chat-template-file",
    "--vectors": "--control-vector --control-vector-scaled",
    "--log-level": "--uvicorn-log-level --log-verbosity",
    "--log-level debug": "--verbose -v",
    "--otlp-endpoint": "--otlp-traces-endpoint",
    "--request-timeout-seconds": "--timeout -to",
    "--no-page": "--no-webui",
    "the environment variable HF_HUB_CACHE names the directory of downloads": "--download-dir",
    "the environment variable HF_TOKEN has the token of the hub": "--hf-token -hft",
    "there is nothing to compile, so no option is needed": "--enforce-eager",
    "a sequence without room in the cache is computed again later; give --cache-bytes for more room": "--swap-space",
    "a network lies on one device as a whole, or is divided with --tensor-parallel": "--cpu-offload-gb",
    "--draft": "--model-draft -md --draft-model --speculative-model",
    "drafts come from the text itself, and with --draft also from a smaller network": "--speculative-config",
    "the chat template says how the model thinks, so no option is needed": "--reasoning-parser --reasoning-format",
    "only --tensor-parallel divides a network": "--pipeline-parallel-size -pp",
    "run several replicas: deploy/README.md says how": "--data-parallel-size -dp",
    "--root-path": "--api-prefix",
    "it is always on and has no option": (
        "--enable-prefix-caching --enable-chunked-prefill --flash-attn -fa --cont-batching -cb --metrics"
    ),
    "give each adapter as --adapter NAME=PATH": "--enable-lora",
    "it is a field of each request, not an option of the server": (
        "--n-predict -n --temp --temperature --top-p --top-k --seed"
    ),
    "code of a checkpoint never runs, so no option is needed": "--trust-remote-code",
    "tools need no option: the chat template says how the model calls them": (
        "--enable-auto-tool-choice --tool-call-parser --jinja"
    ),
    "the context is that of the checkpoint": "--max-model-len --ctx-size -c --max-input-tokens --max-total-tokens",
    "the server speaks plain HTTP; put a reverse proxy in front of it for TLS": (
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file"
    ),
}
OTHERS = {option: answer for answer, options in ANSWERS.items() for option in options.split()}


def read_settings(arguments: Sequence[str], parser: Parser | None = None) -> Settings:
    """The settings of a command line and of the environment. A first argument that is not an option is the model.

    Ends the command with status 2, and a line for each mistake. `parser` is that of the command; default: of `serve`.
    """
    parser = parser or make_parser()
    options = vars(parser.parse_args(arguments))
    model = options.pop("MODEL", None)
    if model is not None:
        if "model" in options:
            parser.error("the model is given twice, as an argument and as --model")
        options["model"] = model
    given = {name: value for name, value in options.items() if value != ""}  # as in the environment
    try:
        return Settings(**given)
    except ValidationError as error:
        lines = [f"{parser.prog}: {describe_error(each, given)}\n" for each in error.errors()]
        parser.exit(2, "".join(lines))


DESCRIPTION = (
    "Serve a model over HTTP. MODEL is a checkpoint directory, a *.gguf file or a hub id such as org/name; without "
    f"one, the bundled model is served. Every option is also an environment variable, such as {PREFIX}PORT for --port. "
    "Sizes may have units, as in 512M or 4G."
)


def make_parser(command: str = "serve", description: str = DESCRIPTION) -> Parser:
    """The parser of a command that has the options of `forwardscope serve`."""
    parser = Parser(
        OTHERS,
        prog=f"forwardscope {command}",
        usage=f"forwardscope {command} [MODEL] [options]",
        description=description,
        formatter_class=argparse.HelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("MODEL", nargs="?", help="the same as --model")
    for name, field in Settings.model_fields.items():
        option, text = option_of(name), f"{field.description}".replace("%", "%%")
        if field.default not in (None, []) and "default" not in text:
            text += f" (default: {field.default})"
        if field.annotation is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        elif is_list(field):
            parser.add_argument(option, action="append", metavar=metavar_of(name, field), help=text)
        else:
            parser.add_argument(option, metavar=metavar_of(name, field), help=text)
    return parser


def unknown_variables() -> list[str]:
    """The variables of the environment that are named like a setting, but are none."""
    names = sorted(name for name in os.environ if name.startswith(PREFIX))
    return [name for name in names if name.removeprefix(PREFIX).lower() not in Settings.model_fields]


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is list


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The words that a setting may have; empty if it may have others."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def metavar_of(name: str, field: FieldInfo) -> str:
    """The placeholder of a value in the help text."""
    choices = choices_of(field.annotation)
    if choices:
        return f"{{{','.join(choices)}}}"
    for ending, word in (("_bytes", "SIZE"), ("_seconds", "SECONDS")):
        if name.endswith(ending):
            return word
    kinds = {field.annotation, *typing.get_args(field.annotation)}
    return "N" if kinds & {int, float} else "PATH" if Path in kinds else name.rpartition("_")[2].upper()


def describe_error(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """One line about a wrong setting: where it was set, its value, and what is allowed.

    `given` are the settings of the command line; others come from the environment.
    """
    cause = error.get("ctx", {}).get("error")
    name = cause.field if isinstance(cause, InvalidField) else str(error["loc"][0]) if error["loc"] else ""
    where = option_of(name) if name in given or f"{PREFIX}{name.upper()}" not in os.environ else PREFIX + name.upper()
    if isinstance(cause, InvalidField):
        return f"{where}: {cause.reason}"
    if isinstance(cause, ValueError):
        return f"{where}: {cause}"
    field, value = Settings.model_fields[name], error["input"]
    choices = TRUTHS if field.annotation is bool else choices_of(field.annotation)
    if choices:
        return f"{where}: {shortened(value)} is not {join_words(choices, 'or')}{nearest(str(value), choices)}"
    return f"{where}: {shortened(value)} is not {allowed_number(field)}"


def allowed_number(field: FieldInfo) -> str:
    """The numbers that a setting may have."""
    kinds = {field.annotation, *typing.get_args(field.annotation)}
    bounds = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "le", "gt") if hasattr(each, name)
    }
    names = {"ge": "minimum", "le": "maximum", "gt": "above"}
    return describe_range(int if int in kinds else float, **{names[name]: bound for name, bound in bounds.items()})
