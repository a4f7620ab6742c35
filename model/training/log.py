"""The log of a training run, and its plot."""

import json
from pathlib import Path
from typing import Any


class Log:
    """The log `training.jsonl`: the recipe, a line per evaluation, and the score of the saved checkpoint at the end.

    Before these, it has the lines of the run with which this one started.
    """

    NAME = "training.jsonl"

    def __init__(self, directory: Path, entries: list[dict[str, Any]]) -> None:
        self._path = directory / self.NAME
        self.entries = entries

    @classmethod
    def read(cls, directory: Path | None) -> list[dict[str, Any]]:
        """The entries of the log in a directory; none if there is none."""
        if directory is None or not (directory / cls.NAME).exists():
            return []
        return [json.loads(line) for line in (directory / cls.NAME).read_text().splitlines()]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Those of this run."""
        start = max(index for index, entry in enumerate(self.entries) if "recipe" in entry)
        return [entry for entry in self.entries[start:] if "step" in entry]

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))

    def plot(self, path: Path) -> None:
        """Write a plot of training and validation loss over the number of tokens."""
        from matplotlib.figure import Figure  # imported here because the import is slow

        evaluations: list[dict[str, Any]] = []
        tokens: list[int] = []
        earlier = 0
        for entry in self.entries:
            if "recipe" in entry:
                earlier = tokens[-1] if tokens else 0
            elif "step" in entry:
                evaluations.append(entry)
                tokens.append(earlier + entry["tokens"])
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key, label in (("training_loss", "training"), ("validation_loss", "held out")):
            axes.plot([number / 1e6 for number in tokens], [entry[key] for entry in evaluations], label=label)
        axes.set(xlabel="million tokens", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=120)
