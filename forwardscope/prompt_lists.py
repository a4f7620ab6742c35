"""Lists of prompts as arguments: the calls that they mean, and the types of the methods that take them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from forwardscope.errors import InvalidArgument

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
One = TypeVar("One", covariant=True)
Many = TypeVar("Many", covariant=True)
Method = TypeVar("Method", covariant=True)
Prompt = str | Sequence[int]
Prompts = Sequence[str] | Sequence[Sequence[int]]
Messages = str | Sequence[Mapping[str, Any]]
Conversations = Sequence[str] | Sequence[Sequence[Mapping[str, Any]]]
PROMPTS = ("prompt", "messages")
PER_PROMPT = ("corrupted", "token", "minus")
"""Other arguments that may have an entry for each prompt of a list."""


def calls_of_list(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> list[Callable[[], Result]] | None:
    """A call of the function for each prompt, if its argument is a list of prompts or of conversations; else None.

    Raises `InvalidArgument` for a list of another argument with more or fewer entries.
    """
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself raises a better one
        return None
    name = next((each for each in PROMPTS if each in given), None)
    if name is None or not is_list_of_prompts(given[name]):
        return None
    lists = {name: list(given[name])}
    for other in PER_PROMPT:
        value = given.get(other)
        if is_list_of_prompts(value) if other == "corrupted" else is_list(value):
            lists[other] = list(given[other])
            if len(lists[other]) != len(lists[name]):
                counts = f"{len(lists[other])} of {len(lists[name])}"
                raise InvalidArgument(other, f"has {counts} entries; give one for each prompt")
    calls: list[Callable[[], Result]] = []
    for entries in zip(*lists.values(), strict=True):
        own = inspect.BoundArguments(signature, type(given)(given | dict(zip(lists, entries, strict=True))))
        calls.append(partial(function, *own.args, **own.kwargs))
    return calls


def is_list_of_prompts(value: Any) -> bool:
    """Whether a prompt is a list of texts or of lists; one of token ids or of messages is a single prompt."""
    first = next(iter(value), None) if is_list(value) else None
    return isinstance(first, str) or is_list(first)


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple, an array or a tensor."""
    return (
        hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping) and getattr(value, "shape", 1) != ()
    )


class OfPrompt(Protocol[Arguments, One]):
    def __call__(self, prompt: Prompt, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...


class OfMessages(Protocol[Arguments, One]):
    def __call__(self, messages: Messages, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...


class OfMethodAndPrompt(Protocol[Arguments, One]):
    def __call__(self, method: str, prompt: Prompt, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...


class PromptMethod(Protocol[Arguments, One, Many]):
    """A method that takes a prompt, or a list of prompts; `Many` is the type of the list of their results."""

    @overload
    def __call__(self, prompt: Prompt, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...
    @overload
    def __call__(self, prompt: Prompts, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Many: ...


class ChatMethod(Protocol[Arguments, One, Many]):
    @overload
    def __call__(self, messages: Messages, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...
    @overload
    def __call__(self, messages: Conversations, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Many: ...


class AttributeMethod(Protocol[Arguments, One, Many]):
    @overload
    def __call__(self, method: str, prompt: Prompt, *args: Arguments.args, **kwargs: Arguments.kwargs) -> One: ...
    @overload
    def __call__(self, method: str, prompt: Prompts, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Many: ...


class Attached(Protocol[Method]):
    """`Method` as an attribute of a class, which gets no `self` of the caller."""

    def __get__(self, model: Any, kind: Any = None) -> Method: ...
