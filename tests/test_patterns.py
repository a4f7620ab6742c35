"""Regular expressions take time in proportion to the length of a text, because the text may be a client's.

An expression holds Python's lock while it runs, so a slow one would stop the whole process.
"""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.conftest import source_tree

ROOT = source_tree()
PACKAGES = ("forwardscope", "model", "service")
SOURCES = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
# The program, a module that needs the extra `train`, and one that needs Triton.
NOT_IMPORTED = {"service.__main__", "model.training.train", "model.ops.gpu.kernels"}
SIZE = 1 << 14  # characters
MAX_CPU_SECONDS = 0.25  # linear expressions take up to 0.005, quadratic ones 0.7 and more
# Modules that use expressions which are not compiled when the module is imported, and why that is right.
OTHERS = {
    "model/checkpoints/adapters.py": "names of tensors of an adapter, with the patterns of a table",
    "model/text/special_token_names.py": "the names of special tokens: alternatives without repetition",
    "model/checkpoints/adapter_config.py": "the operator's adapter; which characters it may contain is checked",
    "model/tracing/stage_hints.py": "globs, which have at most 200 characters",
    "model/network/ranks.py": "an error of torch",
    "model/network/weight_hints.py": "names of our own weights",
    "model/text/grammar/negation.py": "single characters, in a process whose time is limited",
    "service/answers/tool_calls.py": "our own marks of calls, and quotes",
    "model/text/grammar/schema.py": "clients' patterns, in a process whose time is limited",
    "model/checkpoints/families/__init__.py": "single digits",
    "service/commands/mcp_tools.py": "names of stages of the server",
    "service/http/field_names.py": "single characters of names of our own fields, and of unknown ones up to a limit",
}


@cache
def patterns() -> dict[str, Any]:
    """All compiled expressions by the names of their variables."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}
    variables = {name: vars(importlib.import_module(name)) for name in sorted(names - NOT_IMPORTED)}
    return {
        f"{name}.{variable}": value
        for name, values in variables.items()
        for variable, value in values.items()
        if isinstance(value, re.Pattern)
    }


def methods_of(variable: str) -> set[str]:
    """The methods of an expression that the code calls."""
    call = rf"\b{variable}\.(match|fullmatch|search|sub|split|findall|finditer)\b"
    return set(re.findall(call, "".join(SOURCES.values())))


def hostile_texts(pattern: str) -> Iterator[str]:
    """Repetitions of the literal parts of a pattern and of other characters, which do not match at their ends."""
    literals = sorted({part for part in re.split(r"[\\()\[\]{}*+?|^$.]+", pattern) if part})
    parts = [*literals, *".,\"'\\/ -[]{}<>%*#:=\t_a1", '\\"', "\\/", "model.", "%-1"]
    texts = [(begin, part) for begin, part in product(["", *literals, '"', "/", "<", "%(", "["], parts)]
    for (begin, part), end in product(texts, ("", "\n")):
        yield begin + (part * (SIZE // len(part) + 1))[:SIZE] + end


@pytest.mark.parametrize("name", patterns())
def test_the_time_of_an_expression_is_proportional_to_the_length_of_the_text(name: str) -> None:
    pattern = patterns()[name]
    is_bytes = isinstance(pattern.pattern, bytes)
    methods = methods_of(name.rpartition(".")[2]) or {"search"}  # others are passed to a function
    for text in hostile_texts(pattern.pattern.decode() if is_bytes else pattern.pattern):
        for method in methods:
            arguments = ("", text) if method == "sub" else (text,)
            began = time.thread_time()
            found = getattr(pattern, method)(*(each.encode() for each in arguments) if is_bytes else arguments)
            if method == "finditer":
                assert all(found)
            assert time.thread_time() - began < MAX_CPU_SECONDS, f"{method}: {text[:40]!r}...{text[-2:]!r}"


def test_other_expressions_have_a_reason() -> None:
    """The test above only finds expressions that are compiled when a module is imported."""
    found = set()
    for path, source in SOURCES.items():
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        for node in (inner for function in functions for inner in ast.walk(function)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr != "escape":
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == OTHERS.keys()
