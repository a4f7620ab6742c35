"""Attention alone: all implementations agree with the formula, and edited stages change the result as expected."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.network.attention import DenseContext, probed_attention, trace_attention
from model.ops.torch_attention import CausalMask, ScoreRule, apply_pattern, folded_attention, fused_attention
from model.ops.torch_ops import TORCH, NetworkOps
from model.tracing.stages import PATTERN, Stage
from model.tracing.tap import Chain, Probe, Recorder
from tests.editor import Editor
from tests.tiny import CONFIGS, ROUNDING

SCALE = 0.4
STAGES = ("scores", "attn_scores", "pattern")
every_grouping = pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (6, 1)])


def random_qkv(
    num_heads: int, num_kv_heads: int, num_new: int, num_keys: int, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, num_new, num_heads, 8), (3, num_keys, num_kv_heads, 8), (3, num_keys, num_kv_heads, 8)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q k^T * scale) v, computed for one sequence, head and query at a time."""
    z = torch.empty_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        seen_keys = (
            torch.ones(k.shape[1], dtype=torch.bool)
            if visible is None
            else visible.expand(3, 1, *q.shape[1:2], -1)[b, 0, t]
        )
        pattern = (k[b, seen_keys, h // group] @ q[b, t, h] * SCALE).softmax(0)
        z[b, t, h] = pattern @ v[b, seen_keys, h // group]
    return z


def assert_equal_but_for_rounding(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def some_visible(num_new: int, num_keys: int, *, is_batched: bool) -> Tensor:
    """A random mask in which every query sees at least one key."""
    shape = (3, 1, num_new, num_keys) if is_batched else (num_new, num_keys)
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[..., 0] = True
    return visible


@every_grouping
@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("mask", ["none", "shared", "per sequence"])
def test_folded_attention_equals_the_formula(num_heads: int, num_kv_heads: int, num_new: int, mask: str) -> None:
    q, k, v = random_qkv(num_heads, num_kv_heads, num_new, 7)
    visible = None if mask == "none" else some_visible(num_new, 7, is_batched=mask == "per sequence")
    assert_equal_but_for_rounding(folded_attention(q, k, v, visible, ScoreRule(SCALE)), formula(q, k, v, visible))


@every_grouping
def test_folded_attention_in_bfloat16_equals_the_formula_to_its_rounding(num_heads: int, num_kv_heads: int) -> None:
    q, k, v = random_qkv(num_heads, num_kv_heads, 1, 7, dtype=torch.bfloat16)
    found = folded_attention(q, k, v, None, ScoreRule(SCALE))
    assert found.shape == q.shape
    expected = formula(q.double(), k.double(), v.double(), None)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


@every_grouping
def test_the_memory_layout_of_a_kernels_result_does_not_matter(
    num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA kernels store their result as (B, T, H, D)."""
    kernel = F.scaled_dot_product_attention

    def transposed(*arguments: Any, **options: Any) -> Tensor:
        return kernel(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = random_qkv(num_heads, num_kv_heads, 5, 7)
    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    assert_equal_but_for_rounding(folded_attention(q, k, v, None, ScoreRule(SCALE)), formula(q, k, v, None))


def visible_by_definition(start: int, num_new: int, window: int | None) -> Tensor:
    return torch.tensor(
        [
            [key <= query and (window is None or query - key < window) for key in range(start + num_new)]
            for query in range(start, start + num_new)
        ]
    )


@given(start=st.integers(0, 6), num_new=st.integers(1, 6), window=st.none() | st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_a_query_sees_its_own_key_and_earlier_keys_inside_the_window(
    start: int, num_new: int, window: int | None
) -> None:
    mask = CausalMask(start, num_new, window, torch.device("cpu"))
    visible = visible_by_definition(start, num_new, window)
    assert torch.equal(mask.visible, visible)
    assert not mask.hides_nothing or visible.all()
    assert not mask.is_plain_causal or torch.equal(visible, torch.ones(num_new, num_new).tril().bool())


@every_grouping
@pytest.mark.parametrize(
    ("start", "num_new", "window"),
    [(0, 6, None), (0, 6, 3), (4, 3, None), (4, 3, 2), (6, 1, None), (6, 1, 4), (0, 1, 1)],
)
def test_fused_and_traced_attention_equal_the_formula(
    num_heads: int, num_kv_heads: int, start: int, num_new: int, window: int | None
) -> None:
    q, k, v = random_qkv(num_heads, num_kv_heads, num_new, start + num_new)
    mask = CausalMask(start, num_new, window, q.device)
    expected = formula(q, k, v, visible_by_definition(start, num_new, window))
    assert_equal_but_for_rounding(fused_attention(q, k, v, mask, ScoreRule(SCALE)), expected)
    recorder = Recorder([Stage(name, PATTERN) for name in STAGES])
    z = torch.zeros_like(q)
    assert trace_attention(q, k, v, z, mask, Probe(recorder), rule=ScoreRule(SCALE), ops=TORCH.ops) is z
    assert list(recorder.kept) == list(STAGES)
    assert_equal_but_for_rounding(apply_pattern(recorder.kept["pattern"], v), expected)


def test_without_a_mask_every_query_sees_every_key() -> None:
    q, k, v = random_qkv(6, 2, 3, 7)
    expected = formula(q, k, v, None)
    assert_equal_but_for_rounding(probed_attention(q, k, v, None, Probe(None), rule=ScoreRule(SCALE)), expected)
    recorder = Recorder([Stage("pattern", PATTERN)])
    assert torch.equal(
        probed_attention(q, k, v, None, Probe(recorder), rule=ScoreRule(SCALE)),
        probed_attention(q, k, v, None, Probe(None), rule=ScoreRule(SCALE)),
    )
    assert_equal_but_for_rounding(apply_pattern(recorder.kept["pattern"], v), expected)


def halve_the_first_key(tensor: Tensor) -> Tensor:
    return torch.cat((tensor[..., :1] / 2, tensor[..., 1:]), dim=-1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("window", [None, 3])
def test_an_edit_of_scores_or_pattern_changes_the_weights_of_the_values(stage: str, window: int | None) -> None:
    q, k, v = random_qkv(6, 2, 5, 5)
    mask = CausalMask(0, 5, window, q.device)
    found = probed_attention(q, k, v, mask, Probe(Editor({stage: halve_the_first_key})), rule=ScoreRule(SCALE))
    edit: dict[str, Callable[[Tensor], Tensor]] = {stage: halve_the_first_key}
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(3, 2)) * SCALE
    scores = edit.get("scores", torch.clone)(scores).masked_fill(~visible_by_definition(0, 5, window), -math.inf)
    pattern = edit.get("pattern", torch.clone)(edit.get("attn_scores", torch.clone)(scores).softmax(-1))
    expected = torch.einsum("bhts,bshd->bthd", pattern, v.repeat_interleave(3, 2))
    assert_equal_but_for_rounding(found, expected)
    plain = probed_attention(q, k, v, mask, Probe(None), rule=ScoreRule(SCALE))
    assert (found - plain).abs().max() > 1e-3
    assert_equal_but_for_rounding(
        probed_attention(q, k, v, mask, Probe(Editor({stage: torch.clone})), rule=ScoreRule(SCALE)), plain
    )


class OtherRounding(NetworkOps):
    """PyTorch's operations, of which those that only changed queries need give slightly other numbers."""

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        return 1.001 * super().softmax(scores, dtype)

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        return 1.001 * super().apply_pattern(pattern, v)


@pytest.mark.parametrize("stage", STAGES)
def test_queries_and_heads_whose_pattern_is_not_changed_keep_their_bits(stage: str) -> None:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, 4, 3, 1] += 0.1
        return tensor

    q, k, v = random_qkv(6, 2, 5, 5)
    mask, recorder = CausalMask(0, 5, None, q.device), Recorder([Stage("pattern", PATTERN)])
    tap, rule = Chain(Editor({stage: change}), recorder), ScoreRule(SCALE)
    found = probed_attention(q, k, v, mask, Probe(tap), rule=rule, ops=OtherRounding())
    is_changed = torch.zeros(3, 5, 6, dtype=torch.bool)
    is_changed[:, 3, 4] = True
    plain = probed_attention(q, k, v, mask, Probe(None), rule=rule)
    assert torch.equal((found != plain).any(-1), is_changed)
    pattern = TORCH.ops.attention_scores(q, k, mask, rule)[2]
    assert torch.equal((recorder.kept["pattern"] != pattern).any(-1).mT, is_changed)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_without_a_cache_positions_start_at_zero_and_too_many_are_refused(name: str) -> None:
    config = CONFIGS[name]
    assert DenseContext(config, None, 4, torch.device("cpu")).positions.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="49 positions, the context holds 48"):
        DenseContext(config, None, 49, torch.device("cpu"))
