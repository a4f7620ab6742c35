"""Weights from Python: those of a client and of a model in this process are equal, whole and in part."""

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from forwardscope import ApiError, AsyncClient, Client, InvalidArgument, UnknownWeight
from forwardscope.local import LocalModel
from forwardscope.local_weights import describe_weight
from model.errors import InvalidField
from tests.forwardscope.conftest import url_of
from tests.service.running import Running

W_Q = "blocks.0.attn.W_Q"


def test_every_weight_of_a_client_has_the_numbers_of_the_model_in_this_process(
    client: Client, local: LocalModel
) -> None:
    listed = client.weights()
    assert list(listed) == list(local.weights)
    assert len(local.weights) == len(listed)
    for name in (each for each in listed if not each.startswith("blocks.") or each.startswith("blocks.1.")):
        weight = local.weights[name]
        assert np.array_equal(np.array(client.weight(name).values), weight.float()), name
        assert tuple(weight.shape) == listed[name].shape
        assert listed[name] == describe_weight(local.weights.views[name])


@pytest.mark.parametrize(
    ("indices", "index"),
    [
        ({"head": 0}, np.s_[:1]),
        ({"head": [1, -1], "d_model": slice(4)}, np.s_[[1, -1], :4]),
        ({"d_model": range(3, 20, 5)}, np.s_[:, 3:20:5]),
        ({"d_model": np.array([5, 2]), "d_head": torch.tensor([7])}, np.s_[:, [5, 2], 7:8]),
        ({"d_model": slice(-3, None), "d_head": slice(None, None, 2)}, np.s_[:, -3:, ::2]),
        ({"d_head": "0:2,-1"}, np.s_[:, :, [0, 1, -1]]),
    ],
)
def test_a_part_is_chosen_by_the_names_of_its_dims(
    client: Client, local: LocalModel, indices: dict[str, Any], index: Any
) -> None:
    expected = local.weights[W_Q].float().numpy()[index]
    ours, theirs = local.weight(W_Q, **indices), client.weight(W_Q, **indices)
    assert np.array_equal(np.array(theirs.values), expected)
    assert ours.values is not None
    assert np.array_equal(ours.values.float(), expected)
    assert (ours.shape, ours.full_shape, ours.dims, ours.dtype) == (expected.shape, *vars_of(theirs))
    assert ours.summary == theirs.summary


def vars_of(weight: Any) -> tuple[Any, ...]:
    return weight.full_shape, weight.dims, weight.dtype


def test_a_summary_needs_no_numbers(client: Client, local: LocalModel) -> None:
    ours, theirs = (model.weight("embed.W_E", detail="summary") for model in (local, client))
    assert ours.values is None
    assert theirs.values is None
    assert ours.summary == theirs.summary
    assert theirs.summary is not None
    assert theirs.summary.l2 == pytest.approx(float(local.weights["embed.W_E"].double().norm()), rel=1e-5)


def test_a_worked_example_has_the_weights_of_its_article(client: Client) -> None:
    found = client.weight("unembed.W_U", model="a-tokens-journey")
    assert (found.shape, found.dtype) == ((4, 6), "float64")


def test_a_wrong_argument_is_named(client: Client, local: LocalModel) -> None:
    for model in (client, local):
        with pytest.raises(InvalidArgument, match=r"head: 0\.5 is not an integer"):
            model.weight(W_Q, head=0.5)  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(InvalidField, match="head: 8 is out of range; the indices are -8 to 7"):
        local.weight(W_Q, head=8)
    with pytest.raises(ApiError, match="head: 8 is out of range; the indices are -8 to 7"):
        client.weight(W_Q, head=8)
    with pytest.raises(InvalidField, match=r"heads: blocks\.0\.attn\.W_Q does not have this dim; it has head, d_model"):
        local.weight(W_Q, heads=0)
    with pytest.raises(ApiError, match="heads: this field is not known; did you mean 'head'"):
        client.weight(W_Q, heads=0)
    with pytest.raises(InvalidField, match="dtype: 'int3' is not"):
        local.weight(W_Q, dtype="int3")


def test_an_unknown_name_is_a_key_error_with_the_nearest_name(client: Client, local: LocalModel) -> None:
    assert "blocks.0.attn.W_q" not in local.weights
    assert local.weights.get("blocks.0.attn.W_q") is None
    for read in (local.weights.__getitem__, local.weight):
        with pytest.raises(UnknownWeight, match=r"blocks\.0\.attn\.W_Q"):
            read("blocks.0.attn.W_q")
    with pytest.raises(ApiError, match=r"blocks\.0\.attn\.W_Q"):
        client.weight("blocks.0.attn.W_q")


def test_a_changed_copy_changes_neither_the_model_nor_another_copy(local: LocalModel) -> None:
    weight = local.weights["embed.W_E"]
    before = weight.clone()
    weight.zero_()
    assert torch.equal(local.weights["embed.W_E"], before)


def test_the_circuits_of_a_head_are_products_of_its_matrices(local: LocalModel) -> None:
    weights = local.weights
    q, k, v, o = (weights[f"blocks.1.attn.W_{part}"].float() for part in "QKVO")
    group = len(q) // len(k)
    for head in (0, len(q) - 1):
        torch.testing.assert_close(weights.qk(1, head), q[head] @ k[head // group].T)
        torch.testing.assert_close(weights.ov(1, head), v[head // group] @ o[head])
    with pytest.raises(IndexError, match="head 8 is out of range; there are 8 heads"):
        weights.qk(0, 8)
    with pytest.raises(UnknownWeight, match="layer 99 does not exist"):
        weights.ov(99, 0)


def test_both_have_the_same_arguments() -> None:
    of_client = dict(inspect.signature(Client.weight).parameters)
    assert list(inspect.signature(LocalModel.weight).parameters) == [each for each in of_client if each != "model"]


def test_an_asynchronous_client_reads_weights(client: Client, service: Running) -> None:
    async def ask() -> Any:
        async with AsyncClient(url_of(service)) as other:
            return (await other.weight(W_Q, head=1)).values

    assert np.array_equal(asyncio.run(ask()), np.array(client.weight(W_Q, head=1).values))
