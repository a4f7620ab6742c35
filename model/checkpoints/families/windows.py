"""Read which layers have a sliding attention window, from `layer_types` or from older keys."""

from collections.abc import Callable
from typing import Any

from model.checkpoints.families.config_reader import ConfigReader
from model.config import MAX_SIZES
from model.errors import short_repr

SLIDING, FULL = "sliding_attention", "full_attention"


def read_layer_windows(config: ConfigReader, window: int | None, default: Callable[[int], bool]) -> dict[str, Any]:
    """Read the fields `window` and `windowed_layers` of a `ModelConfig`. No fields if no layer has a window.

    `default` says whether a layer has a window in a config without `layer_types`.
    """
    windowed = tuple(map(default, range(config.integer("num_hidden_layers", high=MAX_SIZES["num_layers"]))))
    kinds = config.take("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ValueError(f"config.json: layer_types = {short_repr(kinds)} is not a list")
        unknown = [kind for kind in kinds if kind not in (SLIDING, FULL)]
        if unknown:
            raise ValueError(f"config.json: layer_types {short_repr(unknown)} is not implemented")
        windowed = tuple(kind == SLIDING for kind in kinds)
    if not any(windowed):
        return {}
    if window is None:
        raise ValueError(f"config.json: layer_types asks for {SLIDING}, but there is no sliding_window")
    return {"window": window, "windowed_layers": windowed}
