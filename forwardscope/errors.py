"""The exceptions of the clients. All of them are subclasses of `ForwardscopeError`."""

import difflib
from collections.abc import Collection


class ForwardscopeError(Exception):
    """A call failed. The message says why and, where possible, what to do."""


class ApiError(ForwardscopeError):
    """The server refused a request, or a stream ended with an error.

    `status` is the HTTP status, or None for an error inside a stream. `param` is the field of the request that caused
    the error, and `code` identifies the error for programs. `param` is None if no single field is the cause; both are
    None if the answer came from another program, such as a proxy.
    """

    def __init__(self, message: str, *, status: int | None, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


class InvalidArgument(ForwardscopeError, ValueError, TypeError):
    """An argument of a call cannot be used. `name` is the argument, and the message says what it takes."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class ConnectionFailed(ForwardscopeError, ConnectionError):
    """The server could not be reached, or the connection ended before the answer was complete."""


class RequestTimeout(ConnectionFailed, TimeoutError):
    """The server sent nothing for as long as the client's `timeout`."""


class UnknownWeight(ForwardscopeError, KeyError):
    """A model does not have this weight. The message names the weight that was probably meant."""

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"there is no weight {name!r}; {hint or 'list(weights) names all weights'}")

    def __str__(self) -> str:  # `KeyError.__str__` adds quotation marks
        return str(self.args[0])


class UnknownStage(ForwardscopeError, KeyError):
    """A trace does not have this stage. The message names similar stages that the trace has."""

    def __init__(self, name: str, known: Collection[str], hint: str = "") -> None:
        similar = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        own = f"similar names: {', '.join(similar)}" if similar else f"list(trace) names its {len(known)} stages"
        super().__init__(f"{name!r} is not among the stages of this trace; {hint or own}")

    def __str__(self) -> str:  # `KeyError.__str__` adds quotation marks
        return str(self.args[0])
