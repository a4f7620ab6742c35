"""Read calls as Python writes them: `NAME(KEY=VALUE)`, in a list or in lines."""

import ast
import json
import re
from functools import partial
from string import ascii_letters

from service.answers.call_text import NAME, CallText, NoCall, Read
from service.answers.xml_calls import json_of

DELIMITER = re.compile(r"""["'()\[\]{},]""")
KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)
IN_STRING = re.compile(r"""[^"'\\]+""")


def read_python_calls(source: CallText) -> Read[None]:
    """Read calls in a list, or in lines, where each may be printed."""
    if (yield from source.accept("[")):
        yield from source.read_list(partial(read_python_call, source), "]")
        return
    while True:
        is_printed = yield from source.accept("print(")
        yield from read_python_call(source)
        if is_printed:
            yield from source.skip()
            yield from source.expect(")")
        if not (yield from source.is_followed_by(ascii_letters + "_")):
            return


def read_python_call(source: CallText) -> Read[None]:
    name = yield from source.match(NAME)
    if name not in source.functions:
        raise NoCall
    yield from source.expect("(")
    source.begin_call(name)
    properties = list(source.properties(name))
    separator, index, is_last = "{", 0, False
    while not is_last:
        argument = yield from read_python_argument(source)
        is_last = source.text[source.place - 1] == ")"
        if not argument.strip():
            continue
        keyword = KEYWORD.match(argument)
        if keyword is None and index >= len(properties):
            raise NoCall
        key, value = (properties[index], argument) if keyword is None else (keyword[1], keyword[2])
        source.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {json_of_python(value.strip())}")
        separator, index = ", ", index + 1
    source.add_arguments("{}" if separator == "{" else "}")


def read_python_argument(source: CallText) -> Read[str]:
    """Read an argument and the comma or bracket after it."""
    parts: list[str] = []
    depth = 0
    while True:
        match = DELIMITER.search(source.text, source.place)
        end = len(source.text) if match is None else match.start()
        parts.append(source.text[source.place : end])
        source.place = end
        if match is None:
            if not (yield from source.peek()):
                raise NoCall
            continue
        character = match[0]
        if character in "\"'":
            parts.append((yield from read_python_string(source, character)))
            continue
        source.place += 1
        if depth == 0 and character in ",)":
            return "".join(parts)
        depth += (character in "([{") - (character in ")]}")
        parts.append(character)


def read_python_string(source: CallText, quote: str) -> Read[str]:
    parts = [quote]
    if (yield from source.accept(quote * 3)):
        parts = [quote := quote * 3]
    else:
        source.place += 1
    while not (yield from source.accept(quote)):
        run = IN_STRING.match(source.text, source.place)
        length = len(run[0]) if run else 2 if (yield from source.peek()) == "\\" else 1
        found = yield from source.peek_at(length)
        if len(found) < length:
            raise NoCall
        parts.append(found)
        source.place += length
    return "".join([*parts, quote])


def json_of_python(text: str) -> str:
    """The JSON of a literal of Python or of JSON; of any other text, the text."""
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no lone surrogates
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json_of(text, {})
