"""A program that compiles each grammar of a client in a process of its own. A hostile grammar ends only this process.

llguidance has limits on time and memory, but not for every grammar: long chains of rules overflow its stack, and some
repetitions and remainders take minutes. So a grammar is compiled here first. This program forks a process for each
grammar, whose CPU time, memory and stack are limited: beyond a limit, the system ends the forked process.

Input: lines of JSON. The first is the description of the vocabulary, `{"vocab_size": V, "special": {id: name}}`. The
others are `{"grammar": a grammar for llguidance}` or `{"ebnf": text}`, with the limit `cpu_seconds`. For each a line of
JSON is printed: `{"error": text}`, empty if the grammar is valid, `{"lark": text}`, or, if a process has ended,
`{"ended": "time"}` or `{"ended": "memory"}` (or stack). This file imports nothing else of the project.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

CPU_SECONDS = 2.0  # a last resort: LIMITS and grammar_limits.py refuse most grammars long before
QUICK_CPU_SECONDS = 0.1  # grammars that take longer wait for each other, and delay no others
MAX_STACK_BYTES = 1 << 20  # far less than the threads of the server have
MAX_DATA_BYTES = 1 << 29
# The limits of llguidance, also when the server compiles the grammar, and while a text is generated. Lower ones than
# llguidance's own, because a mask of one sequence delays all others.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}


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


def parser_limits() -> LLParserLimits:
    return LLParserLimits(**LIMITS)


def check(tokenizer: LLTokenizer, job: dict[str, str]) -> dict[str, str]:
    """Compile one grammar, and compute its first mask."""
    if "ebnf" in job:
        try:
            return {"lark": any_to_lark(job["ebnf"])}
        except Exception as error:  # the parser of llguidance has no common class of errors
            return {"error": f"not valid EBNF: {error}"}
    matcher = LLMatcher(tokenizer, job["grammar"], log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"error": matcher.get_error()}


def check_in_fork(tokenizer: LLTokenizer, job: dict[str, Any]) -> bytes:
    """Compile one grammar in a forked process, and return the answer as JSON."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            for file in (0, 1, reader):  # so that the server notices the end of this program, not of its fork
                os.close(file)
            signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
            with open(writer, "wb") as output:
                output.write(json.dumps(check(tokenizer, job)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(process_id, 0)
    if os.WIFSIGNALED(status) or not answer:
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        return json.dumps({"ended": "time" if is_late else "memory"}).encode()
    return answer


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # this signal ends the process, also inside of llguidance
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the server closes the input
    vocabulary = SmallVocabulary(**json.loads(sys.stdin.buffer.readline()))
    tokenizer = LLTokenizer(vocabulary)  # type: ignore[arg-type]  # it only needs these attributes
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(check_in_fork(tokenizer, json.loads(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
