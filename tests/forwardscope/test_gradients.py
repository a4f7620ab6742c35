"""Passes of `load(..., grad=True)`, whose stages can be differentiated."""

import pytest
import torch

from forwardscope import HookContext, load
from forwardscope.local import LocalModel

PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return load("bundled", grad=True)


def test_the_gradient_of_a_logit_is_that_of_attribute(model: LocalModel) -> None:
    names = ["blocks.1.attn.pattern", "blocks.1.attn.z", "blocks.3.resid_mid"]
    trace, token = model.run(PROMPT, names), model.to_tokens(" the")[0]
    found = torch.autograd.grad(trace.logits[-1, token], [trace[name] for name in names])
    expected = model.attribute("gradient", PROMPT, token=token, stages=names)
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3)
        assert gradient.abs().max() > 0


def test_the_gradient_of_any_stage_agrees_with_the_difference_that_a_hook_makes(model: LocalModel) -> None:
    early, late = "blocks.1.resid_post", "blocks.4.mlp_out"
    direction = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def value(step: float) -> float:
        def move(x: torch.Tensor, context: HookContext) -> None:
            x[0, 2] += step * direction

        return model.run(PROMPT, late, hooks={early: move})[late][0, -1].sum().item()

    trace = model.run(PROMPT, [early, late])
    gradient = torch.autograd.grad(trace[late][0, -1].sum(), trace[early])[0][0, 2] @ direction
    step = 1e-2
    assert float(gradient) == pytest.approx((value(step) - value(-step)) / (2 * step), rel=0.02)


def test_the_gradient_of_the_loss_reaches_every_stage_and_passes_through_edits(model: LocalModel) -> None:
    trace = model.run(PROMPT)
    before = [name for name in trace if name not in ("probabilities", "loss")]
    found = torch.autograd.grad(trace["loss"][0, :-1].sum(), [trace[name] for name in before], allow_unused=True)
    assert all(gradient is not None for gradient in found)
    assert torch.equal(trace.loss.per_token[:-1], trace["loss"][0, :-1])
    early, late = "blocks.1.resid_pre", "blocks.2.resid_pre"
    edits = [{"stage": "blocks.1.resid_post", "op": "zero"}]
    edited = model.run(PROMPT, [early, late], edits=edits, baseline=True)
    (gradient,) = torch.autograd.grad(edited.logits[-1].max(), edited[early], allow_unused=True)
    assert gradient is None or not gradient.any(), "nothing passes through a stage that is 0"


def test_a_graph_has_the_numbers_of_a_plain_trace(model: LocalModel) -> None:
    plain = load("bundled", dtype="float32").run(PROMPT)
    trace = model.run(PROMPT, positions=[1, 3])
    for name in ("embed", "blocks.2.attn.scores", "blocks.5.resid_post", "logits"):
        positions = [1, 3]
        expected = plain[name][:, :, positions] if name.endswith("scores") else plain[name][:, positions]
        torch.testing.assert_close(trace[name].detach(), expected, atol=1e-4, rtol=1e-4)
    assert not plain["embed"].requires_grad
    assert trace.predictions[0].top[0].id == plain.predictions[1].top[0].id


def test_what_has_no_graph_is_refused(model: LocalModel) -> None:
    with pytest.raises(ValueError, match=r"^model: has no graph"):
        model.run([3, 1, 2], model="ai-rocks")
    with pytest.raises(ValueError, match=r"^dtype: has no graph"):
        model.run([3, 1, 2], dtype="float16")


def test_other_methods_of_a_model_with_gradients_are_those_of_one_without(model: LocalModel) -> None:
    found, expected = (each.generate(PROMPT, max_tokens=4, temperature=0) for each in (model, load("bundled")))
    assert found.tokens == expected.tokens


def test_the_output_of_each_head_is_its_mean_of_values_times_its_output_weights(local: LocalModel) -> None:
    """TransformerLens calls it `hook_result`; docs/python.md shows it."""
    trace = local.run(PROMPT, "blocks.2.attn*")
    result = torch.einsum(
        "thd,hdm->thm", trace["blocks.2.attn.z"][0].float(), local.weights["blocks.2.attn.W_O"].float()
    )
    assert torch.allclose(result.sum(1), trace["blocks.2.attn_out"][0].float(), atol=0.02)
