"""The ways to name a stage of a trace: `trace["blocks.3.hook_resid_pre"]`, or `trace["resid_pre", 3]`."""

from collections.abc import Collection
from typing import Any

from forwardscope.errors import UnknownStage

StageKey = str | tuple[str, int] | tuple[str, int, str]
PLACES = ("", "attn.", "mlp.")  # of the stages of a block


def stage_name(key: StageKey, known: Collection[str]) -> str:
    """The stage that a key names, among those of a trace.

    A key is a full name, with or without TransformerLens's `hook_`, or as there a name, the number of its block and
    perhaps a part of the block: `("resid_pre", 3)`, `("scale", 0, "ln1")`. Raises `UnknownStage`, which names similar
    stages, also for a negative number: a trace does not know how many blocks the model has.
    """
    names = candidates(key) if isinstance(key, tuple) else [str(key).replace("hook_", "")]
    for name in names:
        if name in known:
            return name
    if names[0].startswith("blocks.-"):
        raise UnknownStage(names[0], known, "a block has a number from 0: a trace may lack the last ones of the model")
    raise UnknownStage(key if isinstance(key, str) else names[0], known)


def candidates(key: tuple[Any, ...]) -> list[str]:
    name, layer, place, *_ = (*key, None, None, None)
    name = str(name).replace("hook_", "")
    if layer is None:
        return [name]
    if place is not None:
        return [f"blocks.{layer}.{place}.{name}"]
    own = "pattern" if name == "attn" else name
    return [f"blocks.{layer}.{place}{own}" for place in PLACES]
