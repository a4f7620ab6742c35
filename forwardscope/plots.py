"""Pictures of results, with matplotlib, which `pip install "forwardscope[plots]"` installs.

The methods `plot` of results return these pictures: maps of a stage, the logit lens, attributions, and the cells of a
sweep. A notebook shows a picture, and `savefig` writes it to a file.
"""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from forwardscope.directions import to_floats
from forwardscope.errors import InvalidArgument

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    raise InvalidArgument("plot", 'needs matplotlib: pip install "forwardscope[plots]"') from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
MAX_LABELS = 48  # of an axis; beyond it, it has numbers
MAX_MAPS = 64
NUM_COLUMNS = 4  # of maps
INCHES = 0.32  # for a labelled row or column


class Picture(Figure):
    """A figure that a notebook shows, also without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


def draw_stage(result: Any, name: Any) -> Picture:
    """The numbers of a stage: a map for each head, or one map, or bars for a number for each position."""
    values, dims = to_floats(result[name]), [dim for dim in result.dims(name) if dim != "batch"]
    if result.dims(name)[:1] == ("batch",):
        values = values[0]
    labels = {dim: labels_of(result, dim, size) for dim, size in zip(dims, values.shape, strict=True)}
    heads = next((dim for dim in dims if dim in ("head", "kv_head")), None)
    if values.ndim == 1:
        return draw_bars(labels[dims[0]], values, dims[0])
    if heads is None or values.ndim == 2:
        maps, titles = values[None], [""]
    else:
        maps, titles = np.moveaxis(values, dims.index(heads), 0), [f"{heads} {each}" for each in labels[heads]]
        dims.remove(heads)
    maps = maps.reshape(len(maps), maps.shape[1], -1)
    return draw_maps(maps, titles, dims, [labels[dims[0]], labels[dims[-1]]])


def draw_attribution(found: Any) -> Picture:
    """A whole attribution: shares, a bar for each token, the tokens of a lens, or the cells of a sweep."""
    match found.method:
        case "direct":
            return draw_shares(found.layers)
        case "integrated_gradients":
            return draw_bars(texts(found.tokens), found.attributions, "attribution")
        case "logit_lens":
            positions = [each.position for each in found.layers[0].positions]
            tops = [[each[0] for each in layer.positions] for layer in found.layers]
            return draw_lens(tops, [layer.stage for layer in found.layers], texts(found.tokens, positions))
        case "patching" | "attribution_patching":
            return draw_sweep(found)
    raise InvalidArgument("name", f"is missing; name one of the stages of {found.method!r}")


def draw_maps(values: Any, titles: Sequence[str], dims: Sequence[str], labels: Sequence[Sequence[str]]) -> Picture:
    """Maps (..., rows, columns) with one colour scale; numbers that are not finite are blank."""
    maps = to_floats(values)
    maps = maps.reshape(-1, *maps.shape[-2:])
    if len(maps) > MAX_MAPS:
        raise InvalidArgument("name", f"has {len(maps)} maps, more than {MAX_MAPS}; choose heads in the call")
    num_columns = min(NUM_COLUMNS, len(maps))
    num_rows = math.ceil(len(maps) / num_columns)
    height, width = (inches(len(each)) for each in labels)
    figure = Picture(figsize=(num_columns * width + 1, num_rows * height), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    finite = maps[np.isfinite(maps)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    bound = max(abs(low), abs(high))
    scale = (
        {"cmap": "Blues", "vmin": 0.0, "vmax": high} if low >= 0 else {"cmap": "RdBu", "vmin": -bound, "vmax": bound}
    )
    for axes, each, title in zip(grid, maps, titles, strict=False):
        image = axes.imshow(np.where(np.isfinite(each), each, np.nan), aspect="auto", interpolation="nearest", **scale)
        axes.set_title(title, fontsize="small")
        label_axes(axes, dims, labels)
    for axes in grid[len(maps) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=list(grid))
    return figure


def draw_bars(labels: Sequence[str], values: Any, name: str) -> Picture:
    """A bar for each number."""
    figure = Picture(figsize=(inches(len(labels)), 3), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(labels)), to_floats(values))
    axes.axhline(0, color="black", linewidth=0.5)
    if len(labels) <= MAX_LABELS:
        axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_ylabel(name)
    return figure


def draw_lens(tops: Sequence[Sequence[Any]], rows: Sequence[str], columns: Sequence[str]) -> Picture:
    """The most likely token of each layer and position, and its probability as a colour; the last layer is on top."""
    values = np.array([[each.probability for each in row] for row in tops][::-1], np.float64)
    width = max(5.0, 0.75 * len(columns) + 2)
    figure = Picture(figsize=(width, INCHES * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows[::-1])
    for row, tokens in enumerate(tops[::-1]):
        for column, token in enumerate(tokens):
            colour = "white" if values[row, column] > 0.5 else "black"
            axes.text(column, row, plain(token.text), ha="center", va="center", color=colour, fontsize="x-small")
    figure.colorbar(image, label="probability")
    return figure


def draw_shares(layers: Sequence[Any]) -> Picture:
    """The share of each head and each feed-forward network in a logit."""
    rows = [[*layer.heads, np.nan if layer.mlp is None else layer.mlp] for layer in layers]
    columns = [*map(str, range(len(rows[0]) - 1)), "mlp"]
    return draw_maps(np.array([rows], np.float64), [""], ["layer", "head"], [[*map(str, range(len(rows)))], columns])


def draw_sweep(result: Any) -> Picture:
    """The effect of each cell: a row for each stage, or a map for each stage with positions and heads."""
    names = list(result)
    kinds = {(result.dims(name), result[name].shape) for name in names}
    if len(kinds) > 1:
        raise InvalidArgument(
            "name", f"is missing; the stages have different cells, so name one of {', '.join(names[:3])}"
        )
    ((dims, shape),) = kinds
    values = np.stack([to_floats(result[name]) for name in names])
    labels = [labels_of(result, dim, size) for dim, size in zip(dims, shape, strict=True)]
    if len(dims) == 0:
        return draw_bars(names, values, "target")
    if len(dims) == 1:
        return draw_maps(values[None], [""], ["stage", dims[0]], [names, labels[0]])
    return draw_maps(values, names, dims, labels)


def labels_of(result: Any, dim: str, size: int) -> list[str]:
    """The labels of an axis: tokens for positions, and numbers for others."""
    indices: Sequence[int] = range(size)
    if dim in ("position", "query"):
        indices = chosen(result, "positions") or indices
    elif dim == "head":
        indices = chosen(result, "heads") or indices
    elif dim == "kv_head" and sorted(chosen(result, "heads")) != [*range(len(chosen(result, "heads")))]:
        return [""] * size  # the result does not say which ones these query heads read
    if dim in ("position", "query", "key") and hasattr(result, "tokens"):
        return texts(result.tokens, indices)
    return [*map(str, indices)]


def chosen(result: Any, name: Literal["positions", "heads"]) -> Sequence[int]:
    """The positions or heads of a result, as it names them or as its request did; empty: all."""
    found: Sequence[int] = getattr(result, name, ()) or vars(result).get(f"_{name}", ())
    return found


def texts(tokens: Sequence[Any], positions: Sequence[int] | None = None) -> list[str]:
    return [plain(tokens[each].text) for each in (range(len(tokens)) if positions is None else positions)]


def plain(text: str | None) -> str:
    """The text of a token as a label: line ends and spaces are visible, and no sign is markup."""
    return "?" if text is None else (text.strip() or repr(text)[1:-1]).replace("$", r"\$")


def inches(num_labels: int) -> float:
    return min(16.0, max(3.0, 1 + INCHES * num_labels)) if num_labels <= MAX_LABELS else 6.0


def label_axes(axes: "Axes", dims: Sequence[str], labels: Sequence[Sequence[str]]) -> None:
    axes.set_ylabel(dims[0])
    axes.set_xlabel(dims[-1])
    if len(labels[0]) <= MAX_LABELS:
        axes.set_yticks(range(len(labels[0])), labels[0])
    if len(labels[1]) <= MAX_LABELS:
        axes.set_xticks(range(len(labels[1])), labels[1], rotation=90)
