"""Passes of `load` whose stages can be differentiated."""

import pytest
import torch

from forwardscope import HookContext
from forwardscope.local import LocalModel
from model.errors import InvalidField

PROMPT = "the cat sat on"


def test_the_gradient_of_a_logit_is_that_of_attribute(local: LocalModel) -> None:
    names = ["blocks.1.attn.pattern", "blocks.1.attn.z", "blocks.3.resid_mid"]
    graph, token = local.differentiable(PROMPT, names), local.to_tokens(" the")[0]
    assert list(graph) == [*names, "logits"]
    found = torch.autograd.grad(graph["logits"][0, -1, token], [graph[name] for name in names])
    expected = local.attribute("gradient", PROMPT, token=token, stages=names)
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3)
        assert gradient.abs().max() > 0


def test_the_gradient_of_any_stage_agrees_with_the_difference_that_a_hook_makes(local: LocalModel) -> None:
    early, late = "blocks.1.resid_post", "blocks.4.mlp_out"
    direction = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def value(step: float) -> float:
        def move(x: torch.Tensor, context: HookContext) -> None:
            x[0, 2] += step * direction

        return local.differentiable(PROMPT, late, hooks={early: move})[late][0, -1].sum().item()

    graph = local.differentiable(PROMPT, [early, late])
    gradient = torch.autograd.grad(graph[late][0, -1].sum(), graph[early])[0][0, 2] @ direction
    step = 1e-2
    assert float(gradient) == pytest.approx((value(step) - value(-step)) / (2 * step), rel=0.02)


def test_a_wrong_argument_of_a_differentiable_pass_is_named(local: LocalModel) -> None:
    with pytest.raises(InvalidField, match=r"^stages: 'blocks\.0\.attn\.w' matches no stage"):
        local.differentiable(PROMPT, "blocks.0.attn.w")
    with pytest.raises(InvalidField, match=r"^adapter: 'x' is not loaded"):
        local.differentiable(PROMPT, adapter="x")
    with pytest.raises(InvalidField, match=r"^prompt: this model's maximum context length is 512"):
        local.differentiable([5] * 513)


def test_the_output_of_each_head_is_its_mean_of_values_times_its_output_weights(local: LocalModel) -> None:
    """TransformerLens calls it `hook_result`; docs/python.md shows it."""
    trace = local.run(PROMPT, "blocks.2.attn*")
    result = torch.einsum(
        "thd,hdm->thm", trace["blocks.2.attn.z"][0].float(), local.weights["blocks.2.attn.W_O"].float()
    )
    assert torch.allclose(result.sum(1), trace["blocks.2.attn_out"][0].float(), atol=0.02)
