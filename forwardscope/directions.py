"""Directions in activations that separate texts: difference of means, PCA of differences, and probes.

`read_rows` reads activations of texts from a model of `load` or from a `Client`; a `Harvest` has them as well. A
direction becomes a vector of edits, in a call or in a file for `--vectors`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forwardscope.arguments import shown, to_texts
from forwardscope.errors import InvalidArgument
from forwardscope.stage_keys import StageKey, stage_name
from forwardscope.tensor_files import write_safetensors

Floats = NDArray[np.float64]
Vector = NDArray[np.float32]
Rows = Mapping[str, Any]
"""Stage -> rows (N, ...): numpy arrays or tensors."""
NUM_FOLDS = 5


class Directions(Mapping[str, Vector]):
    """A direction for each stage: `directions["blocks.3.resid_post"]` is an array with the shape of one row.

    `norms` has the mean l2 norm of the rows of each stage, and `scores` how well a probe predicts rows that it was not
    fitted to: the accuracy of a logistic probe, and R² of a linear one; it is empty for other methods.
    """

    def __init__(
        self, vectors: Mapping[str, Vector], norms: Mapping[str, float], scores: Mapping[str, float] | None = None
    ) -> None:
        self._vectors = dict(vectors)
        self.norms = dict(norms)
        self.scores = dict(scores or {})

    def __repr__(self) -> str:
        best = max(self.scores, key=lambda name: self.scores[name], default=None)
        note = "" if best is None else f", best score {self.scores[best]:.3f} at {best}"
        return f"<directions of {len(self)} stages{note}>"

    def __getitem__(self, name: StageKey) -> Vector:
        return self._vectors[stage_name(name, self._vectors)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def scaled(self, strength: float) -> "Directions":
        """The directions with a length of `strength` times the mean norm of the rows of the stage."""
        lengths = {name: float(np.linalg.norm(vector)) or 1.0 for name, vector in self.items()}
        factors = {name: np.float32(strength * self.norms[name] / length) for name, length in lengths.items()}
        return Directions({name: factors[name] * vector for name, vector in self.items()}, self.norms, self.scores)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `*.safetensors` file with a tensor for each stage, for `--vectors` and `Client.put_vector`."""
        if Path(path).suffix != ".safetensors":
            raise InvalidArgument("path", f"{shown(str(path))} does not end in .safetensors")
        Path(path).write_bytes(write_safetensors(self._vectors))


def read_rows(
    model: Any, texts: Sequence[str], stages: str | Sequence[str], position: int | Literal["mean"] = -1
) -> dict[str, Vector]:
    """The activations of texts: stage -> (N, ...), at one position of each text, or their mean over all positions.

    `model` is a model of `load` or a `Client`. The default is the last position.
    """
    rows: dict[str, list[Vector]] = {}
    has_logits = any(fnmatchcase("logits", glob) for glob in to_texts(stages, "stages"))  # a trace of `load` always has
    for text in to_texts(texts, "texts"):
        trace = model.run(text, stages, positions=None if position == "mean" else [position], top_k=0)
        for name in (each for each in trace if each != "logits" or has_logits):
            if trace.dims(name)[:2] != ("batch", "position"):
                raise InvalidArgument("stages", f"{name} has no row for each position")
            rows.setdefault(name, []).append(to_floats(trace[name])[0].mean(0).astype(np.float32))
    return {name: np.stack(each) for name, each in rows.items()}


def difference_of_means(rows: Rows, labels: Any) -> Directions:
    """The mean of the rows whose label is true, minus that of the others. Its length is that of the difference."""
    return _fit(rows, _to_classes(labels), lambda values, own: values[own].mean(0) - values[~own].mean(0))


def pca_of_differences(rows: Rows, labels: Any) -> Directions:
    """The first principal component of the differences of pairs, of length 1 (as in repeng, "pca_diff").

    The first row whose label is true and the first of the others are a pair, and so on. In most pairs, the row whose
    label is true is further along the direction.
    """
    own = _to_classes(labels)
    if 2 * own.sum() != len(own):
        counts = f"{int(own.sum())} of {len(own)}"
        raise InvalidArgument("labels", f"{counts} are true; pairs need as many true ones as others")
    return _fit(rows, own, _first_component)


def logistic_probe(rows: Rows, labels: Any, *, groups: Any = None, regularization: float = 1.0) -> Directions:
    """The normal of a logistic regression, of length 1, which points to the rows whose label is true.

    Features are standardized for the fit. Rows with equal `groups`, such as the documents of a harvest, are never
    in the fitted and in the scored part at once. Needs `pip install "forwardscope[probes]"`.
    """
    linear_model = _sklearn("linear_model")
    probe = linear_model.LogisticRegression(C=1 / regularization, max_iter=1000)
    return _probe(rows, _to_classes(labels), groups, probe, "accuracy")


def linear_probe(rows: Rows, targets: Any, *, groups: Any = None, regularization: float = 1.0) -> Directions:
    """The direction of a ridge regression, of length 1, along which the numbers `targets` grow.

    `groups` are those of `logistic_probe`. Needs `pip install "forwardscope[probes]"`.
    """
    own = to_floats(targets)
    if own.ndim != 1 or not np.isfinite(own).all():
        raise InvalidArgument("targets", "must be a list of finite numbers, one for each row")
    return _probe(rows, own, groups, _sklearn("linear_model").Ridge(alpha=regularization), "r2")


def _probe(rows: Rows, targets: NDArray[Any], groups: Any, probe: Any, scoring: str) -> Directions:
    preprocessing, pipeline, selection = (_sklearn(each) for each in ("preprocessing", "pipeline", "model_selection"))
    scores: list[float] = []
    counts = np.bincount(targets) if scoring == "accuracy" else [len(targets)]  # of the rows of each kind
    if groups is None and (max(counts) < NUM_FOLDS or min(counts) < 2):
        reason = f"a probe is scored in {NUM_FOLDS} parts; give at least {NUM_FOLDS} of each kind"
        raise InvalidArgument("rows", f"has {' and '.join(map(str, counts))} rows of a kind, but {reason}")
    folds: Any = selection.KFold(NUM_FOLDS, shuffle=True, random_state=0)
    if groups is not None:
        folds = selection.GroupKFold(NUM_FOLDS)
        groups = np.asarray(groups)
        if len(groups) != len(targets):
            raise InvalidArgument("groups", f"has {len(groups)} entries for {len(targets)} rows")
        num_groups = len(np.unique(groups))
        if num_groups < NUM_FOLDS:
            reason = f"a probe is scored in {NUM_FOLDS} parts; give rows of at least {NUM_FOLDS} groups"
            raise InvalidArgument("groups", f"has {num_groups} different groups, but {reason}")
    elif scoring == "accuracy":
        folds = selection.StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=0)

    def fit(values: Floats, own: NDArray[Any]) -> Floats:
        steps = pipeline.make_pipeline(preprocessing.StandardScaler(), probe)
        found = selection.cross_val_score(steps, values, own, groups=groups, cv=folds, scoring=scoring)
        scores.append(float(found.mean()))
        steps.fit(values, own)
        normal: Floats = steps[-1].coef_.reshape(-1) / steps[0].scale_
        return normal / (float(np.linalg.norm(normal)) or 1.0)

    found = _fit(rows, targets, fit)
    return Directions(dict(found), found.norms, dict(zip(found, scores, strict=True)))


def _fit(rows: Rows, targets: NDArray[Any], fit: Callable[[Floats, NDArray[Any]], Floats]) -> Directions:
    """Fit a direction (D,) to the rows (N, D) of each stage."""
    vectors, norms = {}, {}
    for name in rows:
        values = to_floats(rows[name])
        if len(values) != len(targets):
            raise InvalidArgument("labels", f"has {len(targets)} entries for the {len(values)} rows of {name}")
        flat = values.reshape(len(values), -1)
        vectors[name] = fit(flat, targets).reshape(values.shape[1:]).astype(np.float32)
        norms[name] = float(np.linalg.norm(flat, axis=1).mean())
    if not vectors:
        raise InvalidArgument("rows", "has no stages")
    return Directions(vectors, norms)


def _first_component(values: Floats, own: NDArray[Any]) -> Floats:
    differences = values[own] - values[~own]
    if (differences == differences[0]).all():
        raise InvalidArgument("rows", "has pairs with one difference only, which has no components; give more pairs")
    direction: Floats = np.linalg.svd(differences - differences.mean(0), full_matrices=False)[2][0]
    along = differences @ direction
    return -direction if (along < 0).sum() > (along > 0).sum() else direction


def _to_classes(labels: Any) -> NDArray[np.bool_]:
    found = np.asarray(labels)
    if found.ndim != 1 or not np.isin(found, (0, 1)).all():
        raise InvalidArgument("labels", "must be a list of true and false, or 1 and 0, one for each row")
    own = found.astype(np.bool_)
    if not 0 < own.sum() < len(own):
        raise InvalidArgument("labels", f"are all {bool(own[:1].any())}; a direction needs rows of both kinds")
    return own


def to_floats(array: Any) -> Floats:
    """Numbers of a list, an array or a tensor of any dtype, on any device."""
    return np.asarray(array.detach().cpu().double() if hasattr(array, "detach") else array, np.float64)


def _sklearn(module: str) -> Any:
    try:
        from importlib import import_module

        return import_module(f"sklearn.{module}")
    except ModuleNotFoundError:
        raise InvalidArgument("probe", 'needs scikit-learn: pip install "forwardscope[probes]"') from None
