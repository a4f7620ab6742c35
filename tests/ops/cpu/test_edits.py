"""Our kernels for edits agree with PyTorch, and no bit of a row depends on the other rows of a call."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.ops.row_edits import EditRule, EditSeries, RowEdit, RowEdits, RuleKind, apply_rule, edit_rows
from model.ops.torch_attention import apply_pattern, softmax
from tests.ops.cpu.common import DTYPES, ROUNDING, cpu_backend

pytestmark = pytest.mark.usefixtures("instructions")

RULES: dict[str, tuple[EditRule, bool]] = {  # whether the rule takes vectors
    "set": (EditRule("set"), True),
    "set a value": (EditRule("set", 0.3), False),
    "add": (EditRule("add"), True),
    "add a value": (EditRule("add", -0.7), False),
    "scale": (EditRule("scale", 1.7), False),
    "cap": (EditRule("cap", -0.5, math.inf), False),
    "project": (EditRule("project", 0.25), True),
    "cap a component": (EditRule("cap_component", -math.inf, -0.4), True),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flat(size: int, dtype: torch.dtype) -> Tensor:
    return randn(1, 7, size, dtype=dtype)


def heads(size: int, dtype: torch.dtype) -> Tensor:
    """The heads of a query, as a view of rows that also have keys and values."""
    return randn(1, 7, 8, size, dtype=dtype)[:, :, :5]


def edits_of(rows: Tensor, *edits: RowEdit) -> RowEdits:
    return RowEdits(EditSeries(edits), rows)


def edit_of(name: str, x: Tensor, *, shared: bool, is_per_number: bool = False) -> RowEdits:
    """An edit of four rows, and of three heads if there are heads. `shared`: all rows take the same vector."""
    rule, takes_vectors = RULES[name]
    has_heads = x.dim() == 4
    vectors = None
    if takes_vectors:
        vectors = randn(1 if shared else 6, 3 if has_heads else 1, x.shape[-1], seed=1)
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    heads = torch.tensor([4, 0, 1]) if has_heads else None
    edit = RowEdit(rule=rule, vectors=vectors, heads=heads, is_per_number=is_per_number)
    indices = None if shared or not takes_vectors else torch.tensor([5, 0, 0, 2])
    return RowEdits(EditSeries([edit]), torch.tensor([6, 0, 3, 4]), indices)


@every_dtype
@pytest.mark.parametrize("shared", [True, False], ids=["one vector", "a vector for each row"])
@pytest.mark.parametrize("size", [1, 16, 45])
@pytest.mark.parametrize("layout", [flat, heads])
@pytest.mark.parametrize("name", RULES)
def test_edited_rows_agree_with_pytorch_and_others_keep_their_bits(
    name: str, layout: Callable[[int, torch.dtype], Tensor], size: int, shared: bool, dtype: torch.dtype
) -> None:
    x = layout(size, dtype)
    before = x.clone()
    edit = edit_of(name, x, shared=shared)
    found = cpu_backend(dtype).ops.edit_rows(x, [edit])
    expected = edit_rows(x, [edit])
    assert torch.equal(x, before)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=8 * ROUNDING[dtype], rtol=ROUNDING[dtype])
    is_edited = torch.zeros(x.shape, dtype=torch.bool)
    chosen = edit.series.edits[0].heads
    is_edited[:, edit.rows[:, None], slice(None) if chosen is None else chosen] = True
    assert torch.equal(found[~is_edited], x[~is_edited])
    assert not torch.equal(found, x)


@every_dtype
@pytest.mark.parametrize("name", ["set", "scale", "cap"])
def test_single_numbers_are_edited_as_pytorch_does_it(name: str, dtype: torch.dtype) -> None:
    x = flat(45, dtype)
    edit = edit_of(name, x.unsqueeze(-1), shared=False, is_per_number=True)
    found = cpu_backend(dtype).ops.edit_rows(x, [edit])
    assert torch.equal(found, edit_rows(x, [edit]))
    assert (found != x).sum() > 0
    assert torch.equal(found[..., 5:], x[..., 5:]), "only the numbers 4, 0 and 1 are changed"


@every_dtype
def test_a_batch_is_edited_row_by_row(dtype: torch.dtype) -> None:
    x = randn(3, 5, 24, dtype=dtype)
    edit = edits_of(torch.tensor([1, 4]), RowEdit(rule=EditRule("project"), vectors=randn(1, 1, 24, seed=1) / 5))
    ops = cpu_backend(dtype).ops
    found = ops.edit_rows(x, [edit])
    assert torch.equal(found, torch.cat([ops.edit_rows(row[None], [edit]) for row in x]))


@every_dtype
@pytest.mark.parametrize("name", RULES)
def test_no_bit_of_a_row_depends_on_the_other_rows(name: str, dtype: torch.dtype) -> None:
    """Four thousand rows are divided among many tasks."""
    ops = cpu_backend(dtype).ops
    x = randn(1, 4000, 45, dtype=dtype)
    rule, takes_vectors = RULES[name]
    edit = RowEdit(rule=rule, vectors=randn(1, 1, 45, seed=1) if takes_vectors else None)
    together = ops.edit_rows(x, [edits_of(torch.arange(4000), edit)])
    one = edits_of(torch.tensor([0]), edit)
    for row in (0, 1, 1999, 3999):
        assert torch.equal(together[:, row], ops.edit_rows(x[:, row : row + 1], [one])[:, 0])


@every_dtype
@pytest.mark.parametrize("together", [True, False], ids=["in one series", "in two"])
def test_several_edits_are_applied_in_order_and_each_is_rounded_once(dtype: torch.dtype, together: bool) -> None:
    x, rows = randn(1, 3, 20, dtype=dtype), torch.tensor([0, 2])
    edits = [RowEdit(rule=EditRule("add", 1e-3)), RowEdit(rule=EditRule("scale", 3.3))]
    edited = [edits_of(rows, *edits)] if together else [edits_of(rows, each) for each in edits]
    found = cpu_backend(dtype).ops.edit_rows(x, edited)
    expected = ((x.float() + torch.tensor(1e-3)).to(dtype).float() * torch.tensor(3.3)).to(dtype)
    assert torch.equal(found[:, rows], expected[:, rows])
    assert torch.equal(edit_rows(x, edited)[:, rows], expected[:, rows])


@every_dtype
def test_a_series_of_all_kinds_has_the_bits_of_its_edits_one_after_the_other(dtype: torch.dtype) -> None:
    """They differ in the heads, numbers and vectors that they take."""
    ops, x, rows = cpu_backend(dtype).ops, randn(1, 7, 45, dtype=dtype), torch.tensor([6, 0, 3])
    alone = [edit_of(name, x, shared=True).series.edits[0] for name in RULES]
    numbers = RowEdit(rule=EditRule("scale", 2.0), heads=torch.tensor([44, 3]), is_per_number=True)
    edits = [*alone, numbers, replace(numbers, rule=EditRule("set"), vectors=randn(1, 2, 1, seed=2)), *alone]
    expected = x
    for edit in edits:
        expected = ops.edit_rows(expected, [edits_of(rows, edit)])
    assert torch.equal(ops.edit_rows(x, [edits_of(rows, *edits)]), expected)


@pytest.mark.parametrize("kind", ["cap", "cap_component", "project"])
def test_nan_stays_nan(kind: RuleKind) -> None:
    x = torch.full((1, 2, 16), torch.nan)
    edit = RowEdit(rule=EditRule(kind, -1.0, 1.0), vectors=torch.ones(1, 1, 16) / 4)
    assert cpu_backend(torch.float32).ops.edit_rows(x, [edits_of(torch.tensor([1]), edit)]).isnan().all()


def test_a_stage_in_float64_is_edited_with_exact_vectors() -> None:
    vector = torch.tensor([[[1 / 3, 2 / 7]]], dtype=torch.float64)
    edit = RowEdit(rule=EditRule("set"), vectors=vector.float(), exact=vector)
    ops, x = cpu_backend(torch.float32).ops, torch.zeros(1, 2, 2, dtype=torch.float64)
    assert torch.equal(ops.edit_rows(x, [edits_of(torch.tensor([1]), edit)])[0, 1], vector[0, 0])


def test_every_kind_of_rule_has_its_own_arithmetic() -> None:
    x, v = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])
    results: dict[RuleKind, list[float]] = {
        "set": [0, 1],
        "add": [3, 5],
        "scale": [6, 8],
        "cap": [3, 3.5],
        "project": [3, 8],
        "cap_component": [3, 3.5],
    }
    for kind, expected in results.items():
        assert apply_rule(EditRule(kind, 2.0, 3.5), x, v).tolist() == expected


@every_dtype
def test_an_applied_pattern_agrees_with_pytorch_in_every_division_into_passes(dtype: torch.dtype) -> None:
    """A query of a short pass has fewer keys than in a long one, where later keys have the weight 0."""
    ops = cpu_backend(dtype).ops
    pattern = randn(2, 6, 9, 40).softmax(-1).tril(31).to(dtype)
    v = randn(2, 40, 2, 48, dtype=dtype)
    found = ops.apply_pattern(pattern, v)
    torch.testing.assert_close(found, apply_pattern(pattern, v), atol=4 * ROUNDING[dtype], rtol=4 * ROUNDING[dtype])
    for query in range(9):
        num_keys = 32 + query
        alone = ops.apply_pattern(pattern[:, :, query : query + 1, :num_keys], v[:, :num_keys])
        assert torch.equal(alone[:, 0], found[:, query])


def test_values_of_keys_with_the_weight_0_do_not_matter() -> None:
    """Keys that a query does not see may have any values, because a later position is edited, for example."""
    pattern, v = torch.tensor([0.5, 0.5, 0.0]).view(1, 1, 1, 3), torch.ones(1, 3, 1, 16)
    v[:, 2] = math.inf
    assert (cpu_backend(torch.float32).ops.apply_pattern(pattern, v) == 1).all()


@every_dtype
def test_a_softmax_of_scores_agrees_with_pytorch_in_every_division_into_passes(dtype: torch.dtype) -> None:
    ops = cpu_backend(dtype).ops
    scores = (4 * randn(2, 6, 9, 40)).to(dtype)
    hidden = torch.ones(9, 40, dtype=torch.bool).triu(32)
    scores = scores.masked_fill(hidden, -math.inf)
    found = ops.softmax(scores, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, softmax(scores, dtype), atol=ROUNDING[dtype], rtol=2 * ROUNDING[dtype])
    for query in range(9):
        num_keys = 32 + query
        assert torch.equal(ops.softmax(scores[:, :, query, :num_keys], dtype), found[:, :, query, :num_keys])
        assert not found[:, :, query, num_keys:].any()
