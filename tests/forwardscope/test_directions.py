"""Directions are those of their definitions, and a saved one is a vector for edits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forwardscope import Client, InvalidArgument, directions
from forwardscope.local import LocalModel
from model.checkpoints.vector_files import read_vectors

GENERATOR = np.random.default_rng(0)
STAGE = "blocks.3.resid_post"
LABELS = np.tile([True, False], 40)
SIGNAL = GENERATOR.normal(size=(2, 3))
ROWS = {STAGE: GENERATOR.normal(size=(80, 2, 3)) + 3 * LABELS[:, None, None] * SIGNAL}


def along(vector: Any, expected: Any) -> float:
    """The cosine of two directions."""
    first, second = np.ravel(vector), np.ravel(expected)
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_the_difference_of_means_is_that_of_the_rows() -> None:
    found = directions.difference_of_means(ROWS, LABELS)
    values = ROWS[STAGE]
    assert found[STAGE] == pytest.approx(values[LABELS].mean(0) - values[~LABELS].mean(0), rel=1e-6)
    assert found.norms[STAGE] == pytest.approx(np.mean([np.linalg.norm(row) for row in values]))
    assert np.array_equal(found["resid_post", 3], found[STAGE])


def test_a_scaled_direction_has_a_length_relative_to_the_rows() -> None:
    found = directions.difference_of_means(ROWS, LABELS).scaled(-0.5)
    assert np.linalg.norm(found[STAGE]) == pytest.approx(0.5 * found.norms[STAGE])
    assert along(found[STAGE], directions.difference_of_means(ROWS, LABELS)[STAGE]) == pytest.approx(-1)


def test_the_component_of_differences_is_that_of_repeng() -> None:
    """Scikit-learn's PCA of the differences of pairs, with the sign for which most true rows are further along it."""
    from sklearn.decomposition import PCA

    flat = ROWS[STAGE].reshape(80, -1)
    expected = PCA(n_components=1).fit(flat[::2] - flat[1::2]).components_[0]
    assert abs(along(directions.pca_of_differences(ROWS, LABELS)[STAGE], expected)) == pytest.approx(1, abs=1e-5)
    for seed in range(8):  # the sign of a component is arbitrary, so each of them would be right by chance
        signal = np.random.default_rng(seed).normal(size=6)
        noise = np.random.default_rng(100 + seed).normal(size=(80, 1))
        rows = {STAGE: LABELS[:, None] * (3 + noise) * signal}
        assert along(directions.pca_of_differences(rows, LABELS)[STAGE], signal) > 0.99


def test_a_probe_finds_the_direction_of_the_signal_and_scores_held_out_rows() -> None:
    logistic = directions.logistic_probe(ROWS, LABELS)
    assert along(logistic[STAGE], SIGNAL) > 0.9
    assert logistic.scores[STAGE] > 0.9
    assert np.linalg.norm(logistic[STAGE]) == pytest.approx(1)
    scaled = {STAGE: ROWS[STAGE] * [1.0, 10.0, 0.1]}
    linear = directions.linear_probe(scaled, scaled[STAGE].reshape(80, -1) @ SIGNAL.reshape(-1), regularization=1e-3)
    assert along(linear[STAGE], SIGNAL) > 0.99
    assert linear.scores[STAGE] > 0.99
    noise = {STAGE: np.random.default_rng(1).normal(size=(80, 60))}
    assert abs(directions.logistic_probe(noise, LABELS).scores[STAGE] - 0.5) < 0.25, "not the score of the fit, 1.0"


def test_rows_of_the_same_group_are_not_in_the_fitted_and_in_the_scored_part() -> None:
    """Each group has its own pattern and label: with its other rows, a probe would know the label."""
    groups = np.repeat(np.arange(10), 8)
    labels = groups % 2 == 0
    generator = np.random.default_rng(2)
    rows = {STAGE: 5 * generator.normal(size=(10, 40))[groups] + 0.1 * generator.normal(size=(80, 40))}
    assert directions.logistic_probe(rows, labels).scores[STAGE] == 1
    assert directions.logistic_probe(rows, labels, groups=groups).scores[STAGE] < 0.9


def test_a_saved_direction_is_a_vector_of_its_stages_and_steers(local: LocalModel, tmp_path: Path) -> None:
    texts = ["They swam in the lake", "The river was cold", "They walked in the forest", "The tree was old"]
    rows = directions.read_rows(local, texts, "*.resid_post")
    found = directions.difference_of_means(rows, [1, 1, 0, 0])
    found.save(tmp_path / "water.safetensors")
    stored = read_vectors(tmp_path, local.checkpoint.model.config, local.checkpoint.stages)["water"]
    assert stored.by_stage
    assert {name: tuple(each.shape) for name, each in stored.tensors.items()} == dict.fromkeys(found, (256,))
    trace = local.run(texts[0], STAGE)[STAGE]
    edited = local.run(texts[0], STAGE, edits=[{"stage": "*.resid_post", "op": "add", "vector": {STAGE: found[STAGE]}}])
    difference = (edited[STAGE] - trace)[0, -1].double()
    assert along(difference, found[STAGE]) > 0.999
    assert difference.norm() == pytest.approx(np.linalg.norm(found[STAGE]), rel=0.01)


def test_the_rows_of_a_client_are_those_of_the_model_in_this_process(client: Client, local: LocalModel) -> None:
    texts = ["the cat", "the dog sat"]
    for position in (-1, 0, "mean"):
        ours, theirs = (
            directions.read_rows(each, texts, "blocks.[01].resid_post", position) for each in (local, client)
        )
        assert list(ours) == list(theirs) == ["blocks.0.resid_post", "blocks.1.resid_post"]
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    mean = local.run(texts[1], "blocks.1.resid_post")["blocks.1.resid_post"][0].float().mean(0)
    assert ours["blocks.1.resid_post"][1] == pytest.approx(mean.numpy(), rel=1e-3, abs=1e-5)


def test_a_wrong_argument_is_named(local: LocalModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="labels: has 3 entries for the 80 rows"):
        directions.difference_of_means(ROWS, [1, 0, 0])
    with pytest.raises(InvalidArgument, match="labels: must be a list of true and false"):
        directions.difference_of_means(ROWS, np.arange(80))
    with pytest.raises(InvalidArgument, match="labels: are all True"):
        directions.logistic_probe(ROWS, [1] * 80)
    with pytest.raises(InvalidArgument, match="labels: 1 of 80 are true; pairs need as many"):
        directions.pca_of_differences(ROWS, [1] + [0] * 79)
    with pytest.raises(InvalidArgument, match="targets: must be a list of finite numbers"):
        directions.linear_probe(ROWS, [np.nan] * 80)
    with pytest.raises(InvalidArgument, match=r"path: .* does not end in .safetensors"):
        directions.difference_of_means(ROWS, LABELS).save(tmp_path / "water.npz")
    with pytest.raises(InvalidArgument, match=r"stages: .*pattern has no row"):
        directions.read_rows(local, ["the cat"], "blocks.0.attn.pattern")


def test_too_few_rows_are_an_error_that_says_how_many_are_needed() -> None:
    few = {STAGE: ROWS[STAGE][:8]}
    with pytest.raises(InvalidArgument, match=r"rows: has 4 and 4 rows of a kind, .* give at least 5 of each"):
        directions.logistic_probe(few, LABELS[:8])
    with pytest.raises(InvalidArgument, match="rows: has 79 and 1 rows of a kind"):
        directions.logistic_probe(ROWS, [1] + [0] * 79)
    with pytest.raises(InvalidArgument, match="rows: has 4 rows of a kind"):
        directions.linear_probe({STAGE: ROWS[STAGE][:4]}, [1, 2, 3, 4])
    with pytest.raises(InvalidArgument, match=r"groups: has 2 different groups, .* rows of at least 5 groups"):
        directions.logistic_probe(ROWS, LABELS, groups=np.arange(80) // 40)
    with pytest.raises(InvalidArgument, match=r"rows: has pairs with one difference only.* give more pairs"):
        directions.pca_of_differences({STAGE: ROWS[STAGE][:2]}, LABELS[:2])


def test_rows_are_also_logits_and_tensors_of_a_graph(local: LocalModel, client: Client) -> None:
    ours, theirs = (directions.read_rows(each, ["the cat"], ["logits", "embed"]) for each in (local, client))
    assert list(ours) == list(theirs) == ["embed", "logits"]
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    graph = directions.read_rows(LocalModel(local.checkpoint, grad=True), ["the cat"], "embed")
    assert np.array_equal(graph["embed"], ours["embed"])
