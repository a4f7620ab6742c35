"""A harvest: the rows of stages over a corpus, or statistics of them, which the method `harvest` writes to files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from forwardscope.arguments import shown, to_integer, to_list, to_prompt, to_text, to_texts
from forwardscope.errors import InvalidArgument
from forwardscope.stage_keys import StageKey, stage_name
from model.analysis.harvest.documents import Source
from model.analysis.harvest.harvest import HarvestOptions, harvest
from model.analysis.harvest.manifest import Manifest
from model.analysis.harvest.passes import HarvestedModel
from model.analysis.harvest.rows import COLUMNS
from model.analysis.harvest.statistics import EDGES
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.errors import InvalidField


@dataclass(frozen=True, eq=False)
class TopExamples:
    """The tokens at which each of D numbers is largest: `values` (k, D), from the largest on, and the place of each.

    The tensors (k, D) `ids`, `documents`, `begins`, `ends` and `positions` are those of `Harvest`.
    """

    values: Tensor
    ids: Tensor
    documents: Tensor
    begins: Tensor
    ends: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class StageStatistics:
    """Statistics of the D numbers of a row. The ones that were not asked for are None.

    `mean` (D,), `variance` (D,) and `covariance` (D, D) are float64; the latter two are divided by N - 1. `histogram`
    (D, 67) counts the numbers between `edges` (66,), powers of two of both signs; the first and the last bin are open.
    """

    mean: Tensor | None
    variance: Tensor | None
    covariance: Tensor | None
    histogram: Tensor | None
    top: TopExamples | None
    edges: ClassVar[Tensor] = EDGES


def column(name: str) -> Any:
    """The property of a harvest that reads the tensor of this name."""
    return property(lambda harvest: harvest._rows(name))


class Harvest(Mapping[str, Tensor]):
    """The harvest in a directory: `harvest["blocks.3.resid_post"]` has the rows (N, ...) of a stage.

    The tensors (N,) `ids`, `documents`, `begins`, `ends` and `positions` say which token each row belongs to: its id,
    the number of its document, its characters in the text of the document, and its position in its context. `parts`
    has the files one by one, mapped into memory, for a harvest that does not fit there. `statistics` has those of each
    stage. A harvest that `is_complete` has the whole corpus.
    """

    ids: Tensor = column("ids")
    documents: Tensor = column("documents")
    begins: Tensor = column("begins")
    ends: Tensor = column("ends")
    positions: Tensor = column("positions")

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        manifest = Manifest.read(self.directory)
        self.num_tokens = manifest.num_tokens
        self.is_complete = manifest.is_complete
        self.settings = manifest.settings
        self._stages = list(manifest.settings["stages"])
        self._files = [SafetensorsFiles(self.directory / each.name) for each in manifest.files]

    def __repr__(self) -> str:
        kind = "statistics" if self.settings["statistics"] else "rows"
        state = "" if self.is_complete else ", not complete"
        return f"<{kind} of {self.num_tokens:,} tokens and {len(self._stages)} stages in {self.directory}{state}>"

    def __getitem__(self, name: StageKey) -> Tensor:
        return self._rows(stage_name(name, self._stages))

    def __iter__(self) -> Iterator[str]:
        return iter([] if self.settings["statistics"] else self._stages)

    def __len__(self) -> int:
        return 0 if self.settings["statistics"] else len(self._stages)

    @property
    def parts(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of each file: the stages, and `ids` and the other columns."""
        for file in self._files:
            yield {name: file.read(name) for name in file.headers}

    @property
    def statistics(self) -> dict[str, StageStatistics]:
        """The statistics of each stage."""
        if not self.settings["statistics"]:
            raise InvalidField("statistics", "this harvest has rows; harvest again with `statistics`")
        (file,) = self._files
        found = {}
        for name in self._stages:
            kinds = ("mean", "variance", "covariance", "histogram", "top")
            tensors = {each: file.read(f"{name}/{each}") for each in kinds if f"{name}/{each}" in file.headers}
            top = tensors.pop("top", None)
            places = {} if top is None else {each: file.read(f"{name}/top_{each}") for each in COLUMNS}
            examples = None if top is None else TopExamples(top, **places)
            found[name] = StageStatistics(**dict.fromkeys(kinds[:-1]) | tensors, top=examples)
        return found

    def _rows(self, name: str) -> Tensor:
        if self.settings["statistics"]:
            raise InvalidField("statistics", "this harvest has statistics, and no rows")
        parts = [file.read(name) for file in self._files]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def harvest_job(
    model: HarvestedModel, corpus: Any, stages: Any, out: str | PathLike[str], options: Mapping[str, Any]
) -> Callable[[], Manifest]:
    """Check the arguments of the method `harvest`, and return what it does."""
    unknown = options.keys() - {each.name for each in fields(HarvestOptions)}
    if unknown:
        raise InvalidArgument(min(unknown), "is not an option of `harvest`")
    own = {name: value for name, value in options.items() if value is not None}
    own["statistics"] = tuple(to_texts(own.get("statistics", ()), "statistics"))
    for name in own.keys() & {"context", "top_k", "file_bytes"}:
        own[name] = to_integer(own[name], name, "give a whole number")
    if not isinstance(own.get("packed", True), bool):
        raise InvalidArgument("packed", f"{shown(own['packed'])} is not True or False")
    to_text(own.get("field", ""), "field")
    names = to_texts(stages, "stages")
    return partial(harvest, model, to_sources(corpus), names, Path(out), HarvestOptions(**own))


def to_sources(corpus: Any) -> list[Source]:
    """A text, a path, or a list of texts, paths and lists of token ids."""
    if isinstance(corpus, str | PathLike):
        corpus = [corpus]
    takes = "a text, a path, or a list of texts, paths and lists of token ids"
    return [
        Path(each) if isinstance(each, PathLike) else to_prompt(each, f"corpus.{index}")
        for index, each in enumerate(to_list(corpus, "corpus", takes))
    ]
