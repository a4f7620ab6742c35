"""The console command `forwardscope`, also `python -m forwardscope`: find the command, and run its module.

A module is imported only when its command runs, so that `--help` and mistakes are answered at once.
"""

import difflib
import errno
import os
import shlex
import sys
from importlib import import_module
from typing import NoReturn

from model import __version__
from service.commands import COMMANDS
from service.commands.interrupts import LINE, STATUS, leave_from_now_on, leaving_at_once

OTHER_NAMES = {"check": "doctor", "run": "chat", "pull": "serve", "start": "serve", "server": "serve", "api": "serve"}
PIPE_STATUS = 128 + 13  # of a process that SIGPIPE has ended
HELP = """usage: forwardscope COMMAND [arguments]

{commands}

forwardscope serve [MODEL] [options]
                         MODEL is a directory, a *.gguf file, a hub id such as org/name, or "bundled" (the default)
forwardscope COMMAND --help
                         show the arguments of a command
forwardscope --version   show the version
"""


def main() -> None:
    """Run the command that `sys.argv` names. It exits with 0, 1 after a failure, or 2 for a wrong command line."""
    open_standard_files()
    try:
        try:
            run_command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
        if error.errno == errno.ENOSPC:
            exit_with(1, f"{error.filename or 'the output'} cannot be written: {error.strerror}")
        sys.exit(PIPE_STATUS)  # nobody reads the output any more, as after `| head`


def open_standard_files() -> None:
    """Open /dev/null in place of standard files that are closed, as after `2>&-`.

    Otherwise `sys.stderr` is None, and a file or a connection gets the number 2, and with it messages of libraries.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  # until the process ends


def run_command() -> None:
    first = sys.argv[1] if len(sys.argv) > 1 else "serve"
    if first in ("--help", "-h", "help"):
        lines = (f"  {name:11} {description}" for name, (_, description) in COMMANDS.items())
        sys.stdout.write(HELP.format(commands="\n".join(lines)))
    elif first == "--version":
        sys.stdout.write(f"forwardscope {__version__}\n")
    elif first.startswith("-"):
        run("serve", sys.argv[1:])
    elif first in COMMANDS:
        run(first, sys.argv[2:])
    elif "/" in first or first.endswith(".gguf") or os.path.exists(first):
        serve = f"forwardscope serve {shlex.quote(first)}"
        exit_with(2, f"{first!r} is not a command ({', '.join(COMMANDS)}); to serve this model: {serve}")
    else:
        nearest = (
            [OTHER_NAMES[first]]
            if first in OTHER_NAMES
            else difflib.get_close_matches(first, COMMANDS, n=1, cutoff=0.5)
        )
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
        exit_with(2, f"{first!r} is not a command; {hint}")


def run(name: str, arguments: list[str]) -> None:
    sys.argv = [f"forwardscope {name}", *arguments]
    try:
        with leaving_at_once():
            module = import_module(COMMANDS[name][0])
        module.main()
    except ModuleNotFoundError as error:
        if name != "train":  # every other command needs only what is always installed
            raise
        exit_with(1, f"train needs {error.name}, which is not installed: pip install 'forwardscope[train]'")
    except KeyboardInterrupt:
        sys.stderr.write(LINE)
        sys.exit(STATUS)
    finally:
        leave_from_now_on()


def exit_with(status: int, message: str) -> NoReturn:
    sys.stderr.write(f"forwardscope: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
