"""Statistics of stages over a corpus, updated context by context: moments, histograms, and top examples.

Each is computed for the numbers of a row: a stage (batch, position, ...) has D of them. Sums are in float64.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.analysis.harvest.contexts import Place
from model.analysis.harvest.documents import Tokens
from model.analysis.harvest.manifest import Manifest
from model.analysis.harvest.rows import COLUMNS, columns_of
from model.errors import InvalidField
from model.tracing.stages import Stage

Statistic = Literal["mean", "covariance", "histogram", "top"]
POWERS = 2.0 ** torch.arange(-16, 17)
EDGES = torch.cat([-POWERS.flip(0), POWERS])
"""The edges of the bins of histograms: powers of two of both signs. A bin has numbers from its lower edge on."""
MAX_BYTES = 4 << 30
SECONDS_PER_FILE = 30.0  # between two files


class Moments:
    """The mean (D,), and the sum of squared deviations (D,) or of their products (D, D).

    Parts are combined as in Chan, Golub and LeVeque 1979, so nothing cancels even if the mean is large.
    """

    def __init__(self, num_tokens: int, mean: Tensor, deviations: Tensor) -> None:
        self.num_tokens, self.mean, self.deviations = num_tokens, mean, deviations

    def add(self, rows: Tensor) -> None:
        """Add rows (T, D)."""
        own_mean = rows.mean(0, dtype=torch.float64)
        centred = rows.double() - own_mean
        shift, total = own_mean - self.mean, self.num_tokens + len(rows)
        weight = self.num_tokens * len(rows) / total
        if self.deviations.dim() == 2:
            self.deviations.addmm_(centred.T, centred).addr_(shift, shift, alpha=weight)
        else:
            self.deviations += centred.square().sum(0) + weight * shift.square()
        self.mean += shift * (len(rows) / total)
        self.num_tokens = total


class Histogram:
    """Counts (D, 67) of numbers in the bins between `EDGES`, of which the first and the last are open."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    def add(self, rows: Tensor) -> None:
        """Add rows (T, D)."""
        size, num_bins = self.counts.shape
        bins = torch.bucketize(rows.float(), EDGES, right=True) + num_bins * torch.arange(size)
        self.counts += bins.flatten().bincount(minlength=self.counts.numel()).view(size, num_bins)


class TopExamples:
    """The `k` tokens at which each of D numbers is largest: the values (k, D), and the columns (5, k, D) of the tokens.

    While there are fewer than k tokens, the other values are -inf.
    """

    def __init__(self, values: Tensor, columns: Tensor) -> None:
        self.values, self.columns = values, columns

    def add(self, rows: Tensor, columns: Tensor) -> None:
        """Add rows (T, D) of tokens with columns (5, T)."""
        k = len(self.values)
        self.values, index = torch.cat([self.values, rows.float()]).topk(k, dim=0)  # (k, D)
        old = self.columns.gather(1, index.clamp(max=k - 1).expand_as(self.columns))
        self.columns = torch.where(index < k, old, columns[:, (index - k).clamp(min=0)])


class Statistics:
    """The chosen statistics of some stages, on the CPU. They go on from those of a harvest that was interrupted."""

    def __init__(self, kinds: Sequence[Statistic], top_k: int, manifest: Manifest) -> None:
        self._kinds = kinds
        self._top_k = top_k
        self._moments: dict[str, Moments] = {}
        self._top: dict[str, TopExamples] = {}
        self._histograms: dict[str, Histogram] = {}
        self._columns = torch.empty(0)
        self._num_tokens = manifest.num_tokens
        if manifest.files:
            self._restore(load_file(manifest.directory / manifest.files[0].name))
        self._due = time.monotonic() + SECONDS_PER_FILE

    def must_write(self, num_tokens: int) -> bool:
        return time.monotonic() >= self._due

    def begin(self, tokens: Tokens) -> None:
        """Begin the pass of a context."""
        self._columns = columns_of(tokens)
        self._num_tokens += len(tokens)

    def keep(self, stage: Stage, tensor: Tensor) -> None:
        """Add a stage (1, T, ...) of the pass."""
        rows, name = tensor[0].flatten(1).cpu(), stage.name
        size = rows.shape[1]
        if "top" in self._kinds:
            if name not in self._top:
                values = torch.full((self._top_k, size), -math.inf)
                self._top[name] = TopExamples(values, torch.full((len(COLUMNS), *values.shape), -1))
            self._top[name].add(rows, self._columns)
        if "histogram" in self._kinds:
            if name not in self._histograms:
                self._histograms[name] = Histogram(torch.zeros((size, len(EDGES) + 1), dtype=torch.int64))
            self._histograms[name].add(rows)
        if "mean" in self._kinds or "covariance" in self._kinds:
            if name not in self._moments:
                shape = (size, size) if "covariance" in self._kinds else (size,)
                mean, deviations = (torch.zeros(each, dtype=torch.float64) for each in ((size,), shape))
                self._moments[name] = Moments(0, mean, deviations)
            self._moments[name].add(rows)

    def write(self, manifest: Manifest, place: Place) -> None:
        """Write a file with the statistics so far: STAGE/mean (D,), STAGE/variance (D,) or STAGE/covariance (D, D),
        STAGE/histogram (D, 67), STAGE/top (k, D), and STAGE/top_ids and others (k, D), the columns of the examples.

        Variances are divided by N - 1. `place` is that of the next token.
        """
        tensors: dict[str, Tensor] = {}
        for name, moments in self._moments.items():
            kind = "covariance" if moments.deviations.dim() == 2 else "variance"
            tensors[f"{name}/mean"] = moments.mean
            tensors[f"{name}/{kind}"] = moments.deviations / max(moments.num_tokens - 1, 1)
        tensors |= {f"{name}/histogram": histogram.counts for name, histogram in self._histograms.items()}
        for name, top in self._top.items():
            tensors[f"{name}/top"] = top.values
            tensors |= {f"{name}/top_{column}": each for column, each in zip(COLUMNS, top.columns, strict=True)}
        if tensors:
            manifest.replace(tensors, self._num_tokens, place)
        self._due = time.monotonic() + SECONDS_PER_FILE

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the tensors of a file."""
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            if kind in ("variance", "covariance"):
                deviations = tensor * max(self._num_tokens - 1, 1)
                self._moments[name] = Moments(self._num_tokens, tensors[f"{name}/mean"], deviations)
            elif kind == "histogram":
                self._histograms[name] = Histogram(tensor)
            elif kind == "top":
                columns = torch.stack([tensors[f"{name}/top_{column}"] for column in COLUMNS])
                self._top[name] = TopExamples(tensor, columns)


def check_size(stages: Sequence[Stage], sizes: Mapping[str, int], kinds: Sequence[Statistic], top_k: int) -> None:
    """Raise `InvalidField` if the statistics would take too much memory."""
    num_bytes = 0
    for stage in stages:
        size = math.prod(stage.shape(sizes))
        num_bytes += 8 * size * (size if "covariance" in kinds else 2)
        num_bytes += 8 * size * (len(EDGES) + 1) if "histogram" in kinds else 0
        num_bytes += size * top_k * (4 + 8 * len(COLUMNS)) if "top" in kinds else 0
    if num_bytes > MAX_BYTES:
        raise InvalidField("statistics", f"would take {num_bytes} bytes, more than {MAX_BYTES}; choose fewer stages")
