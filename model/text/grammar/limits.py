"""The limits for grammars of clients: on their length, on the process that reads them, and on llguidance."""

from llguidance import LLParserLimits

MAX_BYTES = 1 << 16  # of a schema, a grammar, a regular expression or all choices together
CPU_SECONDS = 2.0  # a last resort: LIMITS refuse most grammars long before
QUICK_CPU_SECONDS = 0.1  # grammars that take longer wait for each other, and delay no others
NICENESS = 10
MAX_STACK_BYTES = 1 << 20  # far less than the threads of the server have
MAX_DATA_BYTES = 1 << 29
MAX_RULES_CHARACTERS = 1 << 21  # of the grammar that the limited process writes, which the server reads
# The limits of llguidance, also when the server compiles the grammar, and while a text is generated. Lower ones than
# llguidance's own, because a mask of one sequence delays all others.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class InvalidGrammar(ValueError):
    """A grammar is invalid, or too expensive. The message says why. `field`: the field of the request, if not all."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.field = field
