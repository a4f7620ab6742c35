"""`forwardscope completion SHELL`: print the completions of all commands and their options, for a shell to read."""

import argparse
import sys
from importlib import import_module

from model.command_line import Parser, one_of
from service.commands import COMMANDS

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("DIRECTORY", "MODEL", "PATH", "TEXT")  # placeholders of arguments that are files or directories


def make_parser() -> Parser:
    parser = Parser(
        prog="forwardscope completion",
        description="Print the completions of all commands. In bash: `source <(forwardscope completion bash)`.",
    )
    parser.add_argument("shell", type=one_of(*SHELLS), help=", ".join(SHELLS))
    return parser


def main() -> None:
    parser = make_parser()
    shell = parser.parse_args().shell
    try:
        import shtab
    except ModuleNotFoundError:
        parser.exit(1, 'completions need shtab, which is not installed: pip install "forwardscope[completion]"\n')
    sys.stdout.write(f"{shtab.complete(all_commands(), shell)}\n")


def all_commands() -> argparse.ArgumentParser:
    """A parser of the whole command line, with the values that options may have, and a mark at those that are files."""
    import shtab

    whole = argparse.ArgumentParser("forwardscope")
    commands = whole.add_subparsers()
    for name, (module, description) in COMMANDS.items():
        parser = import_module(module).make_parser()
        for action in parser._actions:
            metavar = str(action.metavar)
            if metavar.startswith("{"):
                action.choices = metavar.strip("{}").split(",")
            elif metavar in FILES or action.dest == "texts":
                action.complete = shtab.FILE  # shtab reads this attribute
        commands.add_parser(name, parents=[parser], add_help=False, help=description)
    return whole
