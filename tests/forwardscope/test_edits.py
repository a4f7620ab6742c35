"""Edits in a model of `load`: the same numbers as those of a server, and errors that name the field."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from forwardscope import Client
from forwardscope.local import LocalModel
from model.errors import InvalidField

PROMPT, OTHER = "the cat sat on", "the dog ran to"
RESIDUAL = "blocks.0.resid_post"
PROBE = {"stage": "blocks.0.resid_mid", "vector": np.ones(256), "above": -1e6, "positions": [2]}
EDITS: list[list[dict[str, Any]]] = [
    [{"stage": RESIDUAL, "op": "add", "vector": None, "scale": 2, "positions": [(1, 2), -1]}],
    [{"stage": "blocks.*.attn.z", "op": "zero", "heads": [1]}],
    [{"stage": RESIDUAL, "op": "patch", "source": {"prompt": OTHER}, "positions": "last"}],
    [
        {"stage": "blocks.1.mlp.post", "op": "set", "value": 3, "neurons": range(2, 5), "positions": [(1, None)]},
        {"stage": RESIDUAL, "op": "mean", "source": {"prompts": [OTHER, [5, 6]]}, "neurons": [7]},
        {"stage": RESIDUAL, "op": "patch", "subspace": np.eye(256)[2:4] + 0.1, "source": {"prompt": OTHER}},
    ],
    [
        {"stage": RESIDUAL, "op": "zero", "when": {"tokens": np.array([284]), "positions": [(1, None)]}},
        {"stage": "blocks.[12].attn_out", "op": "scale", "factor": 3, "when": PROBE},
    ],
    [{"stage": "blocks.1.mlp_out", "op": "noise", "std": 0.1, "seed": 2}, {"stage": "embed", "op": "mean"}],
]


@pytest.mark.parametrize("edits", EDITS, ids=lambda edits: " ".join(edit["op"] for edit in edits))
def test_an_edited_pass_has_the_numbers_of_a_client_to_the_last_bit(
    local: LocalModel, client: Client, edits: list[dict[str, Any]]
) -> None:
    width = local.checkpoint.model.config.d_model
    edits = [each | {"vector": torch.full((width,), 0.5)} if "vector" in each else each for each in edits]
    ours = local.run(PROMPT, edits=edits, baseline=True)
    theirs = client.run(PROMPT, edits=edits, baseline=True)
    assert ours.edits == theirs.edits
    assert ours.baseline is not None
    assert theirs.baseline is not None
    for own, other in ((ours, theirs), (ours.baseline, theirs.baseline)):
        for name in own:
            assert np.array_equal(own[name].float().numpy(), other[name], equal_nan=True), name
    assert ours.changes == theirs.changes
    assert ours.changes["logits"].norm > 0
    plain = local.run(PROMPT)
    assert all(torch.equal(ours.baseline[name].nan_to_num(), plain[name].nan_to_num()) for name in plain)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5])], ids=repr)
def test_a_number_may_be_one_of_numpy_or_pytorch(local: LocalModel, client: Client, number: Any) -> None:
    """In all fields with numbers, for `run`, which reads edits itself, as for other methods and clients."""
    ones, probe = torch.ones(256), {"stage": "embed", "vector": np.ones(256), "above": number}
    edits: list[dict[str, Any]] = [
        {"stage": RESIDUAL, "op": "add", "vector": ones, "scale": number, "when": probe | {"above": -100 * number}},
        {"stage": RESIDUAL, "op": "set", "value": number, "neurons": [3]},
        {"stage": RESIDUAL, "op": "scale", "factor": number, "neurons": [4]},
        {"stage": RESIDUAL, "op": "project", "vector": ones, "coeff": number},
        {"stage": RESIDUAL, "op": "cap", "min": -number, "max": number, "neurons": [5]},
        {"stage": RESIDUAL, "op": "noise", "std": number, "seed": np.int64(3)},
    ]
    numbers = {"scale", "value", "factor", "coeff", "min", "max", "std", "seed"}
    plain = [{name: value.item() if name in numbers else value for name, value in edit.items()} for edit in edits]
    plain[0]["when"] = probe | {"above": -50.0}
    expected = local.run(PROMPT, RESIDUAL, edits=plain)[RESIDUAL].float().numpy()
    assert np.array_equal(local.run(PROMPT, RESIDUAL, edits=edits)[RESIDUAL].float().numpy(), expected)
    assert np.array_equal(client.run(PROMPT, RESIDUAL, edits=edits)[RESIDUAL], expected)


def test_an_edited_generation_is_that_of_a_client(local: LocalModel, client: Client) -> None:
    width = local.checkpoint.model.config.d_model
    edits = [{"stage": RESIDUAL, "op": "add", "vector": np.full(width, 0.5), "positions": "generated"}]
    fields: dict[str, Any] = {"max_tokens": 6, "seed": 1, "n": 2, "ignore_eos": True}
    ours = local.generate(PROMPT, edits=edits, baseline=True, **fields)
    theirs = client.generate(PROMPT, edits=edits, baseline=True, **fields)
    assert ours.edits == theirs.edits
    assert [each.tokens for each in ours.choices] == [each.tokens for each in theirs.choices]
    assert [each.tokens for each in ours.baseline] == [each.tokens for each in theirs.baseline]
    assert ours.changes == theirs.changes
    assert ours.changes[0][RESIDUAL].norm > 0
    echoed = local.generate(PROMPT, edits=edits, baseline=True, echo=True, **fields)
    assert echoed.changes == ours.changes
    assert local.generate(PROMPT, **fields).edits == ()


def test_a_vector_may_have_a_tensor_for_each_stage(local: LocalModel) -> None:
    width = local.checkpoint.model.config.d_model
    vector = {"blocks.1.hook_resid_post": torch.ones(width), RESIDUAL: torch.zeros(width)}
    trace = local.run(PROMPT, "*.resid_post", edits=[{"stage": "*.resid_post", "op": "set", "vector": vector}])
    assert trace.edits[0].stages == (RESIDUAL, "blocks.1.resid_post")
    assert (trace[RESIDUAL] == 0).all()
    assert (trace["blocks.1.resid_post"] == 1).all()


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"op": "zero"}, "edits.0.stage"),
        ({"stage": RESIDUAL}, "edits.0.op"),
        ({"stage": RESIDUAL, "op": "nope"}, "edits.0.op"),
        ({"stage": "nope", "op": "zero"}, "edits.0.stage"),
        ({"stage": RESIDUAL, "op": "zero", "vectr": 1}, "edits.0.vectr"),
        ({"stage": RESIDUAL, "op": "zero", "factor": 1}, "edits.0.factor"),
        ({"stage": RESIDUAL, "op": "zero", "positions": [999]}, "edits.0.positions"),
        ({"stage": RESIDUAL, "op": "add", "vector": "happy"}, "edits.0.vector"),
        ({"stage": RESIDUAL, "op": "add", "vector": [1.0]}, "edits.0.vector"),
        ({"stage": RESIDUAL, "op": "add", "vector": [1.0, [2.0]]}, "edits.0.vector"),
        ({"stage": RESIDUAL, "op": "patch", "source": {"promt": "a"}}, "edits.0.source"),
        ({"stage": RESIDUAL, "op": "patch", "source": "a"}, "edits.0.source"),
        ({"stage": "loss", "op": "zero"}, "edits.0.stage"),
        ({"stage": RESIDUAL, "op": "zero", "when": [5]}, "edits.0.when"),
        ({"stage": RESIDUAL, "op": "zero", "when": {"tokens": []}}, "edits.0.when.tokens"),
        ({"stage": RESIDUAL, "op": "zero", "when": {"abov": 1}}, "edits.0.when.abov"),
    ],
    ids=str,
)
def test_a_wrong_edit_is_an_error_that_names_its_field(local: LocalModel, edit: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(field)}: "):
        local.run(PROMPT, edits=[edit])
    with pytest.raises(ValueError, match=r"^edits\.0"):
        local.generate(PROMPT, edits=[edit])


def test_a_baseline_needs_edits(local: LocalModel) -> None:
    for call in (local.run, local.generate):
        with pytest.raises(InvalidField, match="there are no edits"):
            call(PROMPT, baseline=True)
