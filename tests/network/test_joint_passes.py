"""Prompts of one joint pass have the logits and the stages that each of them has in a pass of its own, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from model.network.joint_passes import AdaptedNetwork, PromptPass, compute_passes
from model.network.transformer import Transformer
from model.tracing.stages import stages_of
from model.tracing.tap import Chain, Recorder, Tap
from tests.editor import Editor
from tests.engine.test_adapters import random_adapters, served
from tests.tiny import CONFIGS, build, random_ids

LENGTHS = (5, 1, 13, 2)


def prompts() -> list[list[int]]:
    return [random_ids(67, length, seed=length)[0].tolist() for length in LENGTHS]


def recorded(model: Transformer, passes: Sequence[PromptPass]) -> tuple[list[Tensor | Exception], list[dict[str, Any]]]:
    """The results of passes, and the stages of each."""
    stages = stages_of(model.config, adapters=isinstance(passes[0].network, AdaptedNetwork))
    recorders = [Recorder(stages) for _ in passes]
    taps = [r if each.tap is None else Chain(each.tap, r) for each, r in zip(passes, recorders, strict=True)]
    own = [PromptPass(each.network, each.ids, tap=tap, rows=each.rows) for each, tap in zip(passes, taps, strict=True)]
    with torch.inference_mode():
        return compute_passes(own), [recorder.kept for recorder in recorders]


def require_equal(model: Transformer, passes: Sequence[PromptPass], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes without taps, and with all stages recorded, have equal results alone and together."""
    num_passes = 0
    forward = Transformer.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        return forward(*args, **kwargs)

    with torch.inference_mode():
        plain = [each.compute() for each in passes]
    alone = [recorded(model, [each]) for each in passes]
    monkeypatch.setattr(Transformer, "forward", counted)
    with torch.inference_mode():
        together = compute_passes(passes)
    logits, stages = recorded(model, passes)
    assert num_passes == 2
    for index, (own, kept) in enumerate(alone):
        for found in (together[index], own[0], logits[index]):
            assert isinstance(found, Tensor)
            assert torch.equal(found, plain[index])
        assert [*stages[index]] == [*kept[0]]
        for name, stage in kept[0].items():
            assert torch.equal(stages[index][name], stage), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_of_a_joint_pass_have_the_bits_of_single_passes(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(name, dtype)
    rows = (None, [0], [12, 3], [1])
    passes = [PromptPass(model, ids, rows=own) for ids, own in zip(prompts(), rows, strict=True)]
    require_equal(model, passes, monkeypatch)


def test_each_prompt_has_its_own_adapter_and_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("llama")
    adapters = random_adapters(model)
    taps: list[Tap | None] = [
        Editor({"blocks.1.attn.pattern": lambda x: x.flip(1), "ln_final.out": lambda x: 2 * x}),
        None,
        Editor({"blocks.0.resid_post": lambda x: x + 1}),
        Editor({"embed": torch.zeros_like}),
    ]
    passes = [
        PromptPass(AdaptedNetwork(model, adapter), ids, tap=tap)
        for adapter, ids, tap in zip((adapters["a"], None, adapters["b"], None), prompts(), taps, strict=True)
    ]
    require_equal(model, passes, monkeypatch)
    with torch.inference_mode():
        plain = [PromptPass(model, each.ids).compute() for each in passes]
        found = compute_passes(passes)
    changes = [isinstance(own, Tensor) and not torch.equal(own, old) for own, old in zip(found, plain, strict=True)]
    assert changes == [True, False, True, True]


def test_the_error_of_a_tap_belongs_to_its_prompt_alone() -> None:
    model = served("llama")

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("a broken tap")

    taps: list[Tap | None] = [None, Editor({"blocks.1.attn.scores": fail}), None, Editor({"logits": fail})]
    passes = [PromptPass(model, ids, tap=tap) for ids, tap in zip(prompts(), taps, strict=True)]
    with torch.inference_mode():
        found = compute_passes(passes)
        for index in (0, 2):
            own = found[index]
            assert isinstance(own, Tensor)
            assert torch.equal(own, passes[index].compute())
    assert [str(found[index]) for index in (1, 3)] == ["a broken tap"] * 2


def test_passes_that_do_not_fit_together_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory for all, a prompt that is too long, a network whose bits depend on the batch."""
    model = served("llama")
    passes = [PromptPass(model, ids) for ids in (*prompts(), [1] * (model.config.max_positions + 1))]
    with torch.inference_mode():
        *found, error = compute_passes(passes)
        for own, each in zip(found, passes, strict=False):
            assert isinstance(own, Tensor)
            assert torch.equal(own, each.compute())
        assert "the context holds" in str(error)

    torch_model = build(CONFIGS["llama"])
    assert PromptPass(torch_model, [1]).transformer is None
    assert PromptPass(model, [1]).transformer is model
