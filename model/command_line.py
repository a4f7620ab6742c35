"""Parse the arguments of a command. A mistake ends it with status 2 and one line in the words of the command line.

The line repeats the wrong value and says what is allowed; for an unknown option it names the nearest one.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from model.errors import join_words, shortened

WORDS = {  # parts of argparse's messages
    "expected one argument": "needs a value",
    "expected at least one argument": "needs a value",
    "ignored explicit argument": "takes no value, but is given",
    "the following arguments are required:": "these arguments are missing:",
}


class Parser(argparse.ArgumentParser):
    """A parser of options.

    `others` maps options of other programs, such as vLLM, to what this command has in their place: an option, or a
    sentence. `passed_on` is a parser to which the command passes other options on.
    """

    def __init__(
        self, others: Mapping[str, str] | None = None, passed_on: "Parser | None" = None, **settings: Any
    ) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self._others = others or {}
        self._passed_on = passed_on

    def parse_args(  # type: ignore[override]  # the overloads of argparse differ in nothing but the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        rest: list[str]
        found: argparse.Namespace
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        return found

    def parse_known_args(  # type: ignore[override]  # for the same reason
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        args = sys.argv[1:] if args is None else args
        for argument in args:  # otherwise argparse reads `-hf` as `-h`
            option = argument.partition("=")[0]
            if option in self._all_others() and option not in self._option_string_actions:
                self.refuse([argument])
        return super().parse_known_args(args, namespace)

    def _all_others(self) -> Mapping[str, str]:
        return self._others if self._passed_on is None else {**self._passed_on._others, **self._others}

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """End the command because of arguments that it does not have, with the option that is nearest to the first."""
        options = [argument.partition("=")[0] for argument in rest if argument.startswith("-") and argument != "-"]
        if not options:
            self.error(f"{shortened(rest[0])} is one argument too many")
        hint = self.suggestion(options[0])
        self.error(f"{options[0]} is not an option; {hint or f'`{self.prog} --help` lists all options'}")

    def suggestion(self, option: str) -> str:
        """A hint for an option that does not exist; empty if no option is similar to it."""
        other = self._all_others().get(option)
        other = self._others.get(other or "", other)
        if other is not None:
            return f"did you mean {other}?" if other.startswith("-") else other
        parsers = [self] if self._passed_on is None else [self, self._passed_on]
        known = [name for parser in parsers for name in parser._option_string_actions if name.startswith("--")]
        name = "--" + option.lstrip("-").replace("_", "-").lower()
        begun = [each for each in known if each.startswith(name)] if len(name) > 3 else []
        nearest = [name] if name in known else begun or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if nearest and nearest[0] in self._others:
            return self._others[nearest[0]]
        return f"did you mean {' or '.join(nearest[:3])}?" if nearest else ""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in WORDS.items():
            message = message.replace(theirs, ours)
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


MODEL_HELP = "a checkpoint directory, a *.gguf file, or a hub id such as org/name; default: the bundled model"


def one_of(*choices: str) -> Callable[[str], str]:
    """A type of arguments: one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{shortened(text)} is not {join_words(choices, 'or')}{nearest(text, choices)}"
            )
        return text

    return read


def nearest(text: str, choices: Sequence[str]) -> str:
    """A hint that names the choice which is nearest to a mistyped one, if any is: "; did you mean ...?"."""
    found = difflib.get_close_matches(text.lower(), choices, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def number(
    kind: type[int] | type[float], minimum: float = -math.inf, maximum: float = math.inf, *, above: float = -math.inf
) -> Callable[[str], Any]:
    """A type of arguments: a finite number from `minimum` to `maximum` that is larger than `above`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (minimum <= value <= maximum and above < value < math.inf):
            allowed = describe_range(kind, minimum, maximum, above)
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {allowed}")
        return value

    return read


def describe_range(kind: type, minimum: float = -math.inf, maximum: float = math.inf, above: float = -math.inf) -> str:
    """The numbers that are allowed, for example "a whole number from 0 to 65535"."""
    name = "a whole number" if kind is int else "a number"
    if above > -math.inf:
        return f"{name} above {above:g}" + ("" if maximum == math.inf else f" and up to {maximum:g}")
    if minimum == -math.inf:
        return name
    return f"{name} from {minimum:g} on" if maximum == math.inf else f"{name} from {minimum} to {maximum}"


SHARE = number(float, maximum=1, above=0)
"""A type of arguments: a share of something, such as 0.1."""
