"""Harvest a corpus: run a network over its contexts, and write the rows of stages, or their statistics, to a directory.

The rows are those of a pass over the context alone, bit for bit. A harvest that was interrupted goes on where its last
file ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from model.analysis.harvest.contexts import Context, contexts
from model.analysis.harvest.documents import Corpus, Source
from model.analysis.harvest.manifest import Manifest
from model.analysis.harvest.passes import HarvestedModel
from model.analysis.harvest.rows import Rows, bytes_per_token
from model.analysis.harvest.statistics import Statistic, Statistics, check_size
from model.checkpoints.load import DTYPES
from model.errors import InvalidField, join_words, short_repr
from model.progress import Progress
from model.tracing.stages import OUTPUT_STAGES, Stage, UnknownStage, select

DEFAULT_CONTEXT = 1024
DEFAULT_FILE_BYTES = 256 << 20
DEFAULT_TOP_K = 10
MAX_TOP_K = 1000
Store = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class HarvestOptions:
    """The settings of a harvest.

    `context` is the number of tokens of a context, at most that of the network; None: the smaller of 1,024 and that.
    `packed` contexts are full, and go on across the ends of documents; otherwise each document has its own. `store` is
    the dtype of the rows; "auto" is that of the network. With `statistics`, no rows are stored. `file_bytes` is about
    the size of a file, and the memory for its rows. `field` is the key or the column of documents in files.
    """

    context: int | None = None
    packed: bool = True
    store: Store = "auto"
    statistics: tuple[Statistic, ...] = ()
    top_k: int = DEFAULT_TOP_K
    file_bytes: int = DEFAULT_FILE_BYTES
    field: str = "text"

    def __post_init__(self) -> None:
        if self.store not in get_args(Store):
            raise InvalidField("store", f"{short_repr(self.store)} is not {join_words(get_args(Store), 'or')}")
        for each in self.statistics:
            if each not in get_args(Statistic):
                words = join_words(get_args(Statistic), "or")
                raise InvalidField("statistics", f"{short_repr(each)} is not {words}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise InvalidField("top_k", f"{self.top_k} must be from 1 to {MAX_TOP_K}")
        if self.top_k != DEFAULT_TOP_K and "top" not in self.statistics:
            raise InvalidField("top_k", "counts examples of the statistic top, which is not asked for; leave it out")
        if self.file_bytes < 1:
            raise InvalidField("file_bytes", f"{self.file_bytes} must be at least 1")


def harvest(
    model: HarvestedModel, sources: Sequence[Source], stages: Sequence[str], directory: Path, options: HarvestOptions
) -> Manifest:
    """Harvest the stages that match the globs `stages`, or go on with a harvest that was interrupted.

    Raises `InvalidField`, `CheckpointError` or `OSError`.
    """
    chosen, length, sizes = choose_stages(model, stages), context_of(model, options.context), model.sizes
    if options.statistics:
        check_size(chosen, sizes, options.statistics, options.top_k)
    end_id = model.end_id if options.packed else None
    corpus = Corpus(sources, model.tokenizer, sizes["d_vocab"], options.field, end_id)
    settings = asdict(options) | {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "stages": {stage.name: [list(stage.dims[2:]), list(stage.shape(sizes)[2:])] for stage in chosen},
        "context": length,
        "corpus": corpus.describe(),
    }
    manifest = Manifest.open(directory, settings)
    if manifest.is_complete:
        return manifest
    sink: Rows | Statistics
    if options.statistics:
        sink = Statistics(options.statistics, options.top_k, manifest)
    else:
        store = DTYPES.get(options.store)
        num_bytes = bytes_per_token(chosen, sizes, (store or model.dtype).itemsize)
        sink = Rows(max(length, options.file_bytes // num_bytes), store)
    run(model, chosen, contexts(corpus, length, packed=options.packed, start=manifest.next), sink, manifest, corpus)
    return manifest


def run(
    model: HarvestedModel,
    stages: Sequence[Stage],
    passes: Iterable[Context],
    sink: Rows | Statistics,
    manifest: Manifest,
    corpus: Corpus,
) -> None:
    """Run the passes that are left, and write the files."""
    place, progress = manifest.next, Progress("harvesting", corpus.size)
    try:
        for context in passes:
            if sink.must_write(len(context.tokens)):
                sink.write(manifest, place)
            sink.begin(context.tokens)
            model.run(torch.from_numpy(context.tokens[:, 0]), stages, sink.keep)
            place = context.next
            progress.advance(context.size)
        sink.write(manifest, place)
    finally:
        progress.finish()
    if not manifest.files:
        raise InvalidField("corpus", "has no tokens")
    manifest.finish()


def choose_stages(model: HarvestedModel, globs: Sequence[str]) -> list[Stage]:
    """The stages that match any of the globs. Raises `InvalidField` if one matches none, or a stage without rows."""
    try:
        chosen = select(model.stages, globs)
    except UnknownStage as error:
        raise InvalidField("stages", str(error)) from None
    if not chosen:
        raise InvalidField("stages", "is empty; name at least one stage")
    for stage in chosen:
        if "key" in stage.dims:
            raise InvalidField("stages", f"{stage.name} has a number for each key, not a row for each token; use `run`")
        if stage.name in {each.name for each in OUTPUT_STAGES}:
            raise InvalidField("stages", f"{stage.name} is not harvested, because the head is not computed; use `run`")
    return chosen


def context_of(model: HarvestedModel, context: int | None) -> int:
    """The number of tokens of a context."""
    longest = model.max_positions
    if context is None:
        return min(DEFAULT_CONTEXT, longest)
    if not 1 <= context <= longest:
        raise InvalidField("context", f"{context} must be from 1 to {longest}, the context of this model")
    return context
