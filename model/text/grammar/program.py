"""A program that reads each grammar of a client in a process of its own. A hostile grammar ends only this process.

llguidance has limits on time and memory, but not for every grammar: long chains of rules overflow its stack, and some
repetitions and remainders take minutes. Our own readers have none. So this program forks a process for each grammar,
whose CPU time, memory and stack are limited: beyond a limit, the system ends the forked process. The program has a low
priority, so that streams do not wait for grammars.

Input: lines of JSON. The first is the description of the vocabulary, `{"vocab_size": V, "special": {id: name}}`. The
others are `{"source": what `source.py` takes, "cpu_seconds": limit}`. For each a line of JSON is printed: the
answer of `read`, or, if a process has ended, `{"ended": "time"}`, `{"ended": "memory"}` (or stack), or `{"ended":
"killed"}` if the system or a person has killed it.
"""

import json
import os
import re
import signal
import sys
import traceback
from dataclasses import asdict
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.text.grammar.limits import (
    LIMITS,
    MAX_DATA_BYTES,
    MAX_RULES_CHARACTERS,
    MAX_STACK_BYTES,
    NICENESS,
    InvalidGrammar,
)
from model.text.grammar.source import read_source

if sys.platform != "win32":
    import resource

# Any tokens may spell a text that the grammar prescribes. Otherwise llguidance would tokenize such texts itself, which
# takes very long for some grammars, and would be wrong for tokenizers that add a space to every text.
START = '%llguidance {"no_forcing": true}\nstart: @main'

RULES_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")


class SmallVocabulary:
    """The special tokens of a vocabulary, and after all its ids a token for each byte, as `LLTokenizer` takes them.

    The hazards are in the grammar, not in the vocabulary, so the text of the other tokens does not matter.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab_size: int, special: dict[str, str]) -> None:
        self.special_token_ids = list(map(int, special))
        self.tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)] + [b""]
        self.eos_token_id = len(self.tokens) - 1
        for token_id, name in special.items():
            self.tokens[int(token_id)] = name.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("no text is tokenized")


def read(tokenizer: LLTokenizer, source: dict[str, Any]) -> dict[str, Any]:
    """Write the grammar for llguidance as `{"grammar": text}`, with the fields of `Grammar`.

    For a source that is not valid, the answer is `{"error": text}`.

    The grammar is compiled, and its first mask is computed.
    """

    @cache
    def compiled(rules: str) -> tuple[str, str]:
        """The whole grammar, and the error of its compilation and of its first mask; an empty text if there is none."""
        text = json.dumps({"grammars": [{"lark_grammar": START}, {"name": "main", "lark_grammar": rules}]})
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return text, matcher.get_error() if matcher.is_error() else ""

    try:
        grammar = read_source(source, lambda rules: short_error(compiled(rules)[1]))
    except InvalidGrammar as error:
        return {"error": str(error)} | ({} if error.field is None else {"field": error.field})
    except RecursionError:
        return {"error": "is nested too deeply"}
    if len(grammar.rules) > MAX_RULES_CHARACTERS:
        return {"error": "is too complex: its grammar is too long"}
    text, error_text = compiled(grammar.rules)
    if source.keys() & {"json", "rules"}:  # the client has not written these rules
        error_text = short_error(error_text)
    return {"error": error_text} if error_text else {**asdict(grammar), "grammar": text}


def short_error(text: str) -> str:
    """An error of llguidance without places and lines of the rules."""
    return RULES_PLACE.sub("", text.partition("\n")[0])


def read_in_fork(tokenizer: LLTokenizer, job: dict[str, Any]) -> bytes:
    """Read one grammar in a forked process, and return the answer as JSON."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            for file in (0, 1, reader):  # so that the server notices the end of this program, not of its fork
                os.close(file)
            signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
            try:
                answer = read(tokenizer, job["source"])
            except MemoryError:
                answer = {"ended": "memory"}
            except BaseException:  # a panic of llguidance is no Exception
                traceback.print_exc()
                answer = {"error": "cannot be read, because of an error of this server, which is in its log"}
            with open(writer, "wb") as output:
                output.write(json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(process_id, 0)
    if os.WIFSIGNALED(status) or not text:
        reasons: dict[int, str] = {signal.SIGPROF: "time", signal.SIGKILL: "killed", signal.SIGTERM: "killed"}
        ended = reasons.get(os.WTERMSIG(status), "memory") if os.WIFSIGNALED(status) else "memory"
        return json.dumps({"ended": ended}).encode()
    return text


def main() -> None:
    # A thread with a niceness of its own may have started this program: the two must not add up.
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # this signal ends the process, also inside of llguidance
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the server closes the input
    vocabulary = SmallVocabulary(**json.loads(sys.stdin.buffer.readline()))
    tokenizer = LLTokenizer(vocabulary)  # type: ignore[arg-type]  # it only needs these attributes
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(read_in_fork(tokenizer, json.loads(line)) + b"\n")
        sys.stdout.buffer.flush()
