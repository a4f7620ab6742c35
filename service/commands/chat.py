"""`forwardscope chat [URL or MODEL]`: a conversation with a model on the terminal.

With a URL the model is that of a running server. With a MODEL, a server is started for it, and stopped at the end.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from forwardscope import Client, ForwardscopeError
from forwardscope.transport import DEFAULT_URL
from model.command_line import Parser, number
from model.server_address import server_url
from service import PREFIX
from service.commands import options as serve_options
from service.commands.child_server import ServerFailed, started_server

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends the program, Ctrl-C stops an answer"
OTHERS = {  # options of `vllm chat` and of llama-cli
    "--model": "the model is an argument: forwardscope chat MODEL",
    "-m": "the model is an argument: forwardscope chat MODEL",
    "--url": "the address is an argument: forwardscope chat URL",
}


def main() -> None:
    parser = make_parser()
    options, rest = parser.parse_known_args(sys.argv[1:])
    is_url = options.target.startswith(("http://", "https://"))
    unknown = serve_options.make_parser().parse_known_args(rest)[1]
    if unknown:
        parser.refuse(unknown)
    if is_url and rest:
        parser.error(f"{rest[0]} is for a server that `chat MODEL` starts, but that of {options.target} runs already")
    if not is_url:
        if (address := server_url(options.target)) is not None:
            parser.error(f"{options.target} is no model; for a running server, write {address}")
        serve_options.read_settings([options.target, *rest])  # ends the command if a setting is wrong
    try:
        with contextlib.nullcontext(options.target) if is_url else started_server(options.target, rest) as url:
            api_key = options.api_key or os.environ.get(f"{PREFIX}API_KEY") or None
            with Client(url, api_key=api_key) as client:
                client.health()
                Conversation(client, options).run()
    except (ForwardscopeError, ServerFailed) as error:
        hint = " `forwardscope chat MODEL` starts one." if options.target == DEFAULT_URL else ""
        sys.stderr.write(f"forwardscope chat: {error}{hint}\n")
        sys.exit(1)


def make_parser() -> Parser:
    parser = Parser(
        OTHERS,
        passed_on=serve_options.make_parser(),
        prog="forwardscope chat",
        usage="forwardscope chat [URL | MODEL [options of serve]] [options]",
        description=f"Talk to a model. {COMMANDS}.",
    )
    parser.add_argument(
        "target",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL or MODEL",
        help="a running server (default: %(default)s); or a directory, a *.gguf file or a hub id, for which a server "
        "is started",
    )
    parser.add_argument("--system", help="the system message, which says how the model is to behave")
    parser.add_argument("--max-tokens", type=number(int, 1), help="maximum number of tokens of an answer")
    parser.add_argument("--temperature", type=number(float, 0), help="0 always takes the most likely token")
    parser.add_argument("--seed", type=number(int, 0), help="makes the answers reproducible")
    parser.add_argument("--api-key", help=f"key of the server; default: {PREFIX}API_KEY of the environment")
    return parser


class Conversation:
    """The messages so far, and the loop that reads questions and prints answers."""

    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._fields = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
        self._system = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._messages: list[dict[str, str]] = list(self._system)

    def run(self) -> None:
        """Read lines until the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (it gives `input` line editing and a history)
        say(f"{COMMANDS}.\n")
        for line in read_lines():
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._system)
            elif line.startswith("/"):
                say(f"{line.split()[0]} is not known. {COMMANDS}.\n")
            elif line:
                self._ask(line)

    def _ask(self, question: str) -> None:
        """Print the answer while it arrives. Keep what was printed of a stopped answer, but drop a failed question."""
        messages = [*self._messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        thinks = False  # the last event did
        try:
            with self._client.stream_chat(messages, **self._fields) as events:
                for event in events:
                    say(event.reasoning)
                    if event.text and thinks:
                        say("\n\n")
                    thinks = bool(event.reasoning)
                    pieces.append(event.text)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            say(" (stopped)")
        except ForwardscopeError as error:
            say(("\n" if pieces else "") + f"error: {error}\n")
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def read_lines() -> Iterator[str]:
    """The lines that the user types. Ctrl-C discards the current line."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            say("\n/exit or Ctrl-D ends the program.\n")


def say(text: str) -> None:
    """Write something that is not part of an answer. Only answers go to standard output."""
    sys.stderr.write(text)
    sys.stderr.flush()
