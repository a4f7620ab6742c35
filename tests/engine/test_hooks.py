"""Hooks in the engine: with the cache, chunked prompts and neighbours they do what they do in the whole network."""

import pytest
import torch
from torch import Tensor

from model.errors import InvalidField
from model.network.transformer import Transformer
from model.tracing.hooks import HookContext, Hooks
from model.tracing.stages import stages_of
from tests.editor import Editor
from tests.engine.driving import (
    Drive,
    alone,
    ask,
    assert_each_equals_alone,
    assert_equal,
    new_engine,
    prompt,
    run,
)
from tests.engine.test_isolation import assert_ended_with, fail_among_neighbours, neighbours
from tests.tiny import exact


def hooks_of(model: Transformer, **hooks: object) -> Hooks:
    names = {name.replace("__", "."): hook for name, hook in hooks.items()}
    return Hooks(names, stages_of(model.config))  # type: ignore[arg-type]  # one test passes no function


@pytest.mark.parametrize("writes", [True, False], ids=["in place", "returned"])
def test_a_hooked_request_gets_what_the_changed_network_gives_it_alone(writes: bool) -> None:
    model, seen = exact("llama"), list[HookContext]()

    def negate(tensor: Tensor, context: HookContext) -> Tensor | None:
        seen.append(context)
        return None if tensor.neg_() is tensor and writes else tensor

    stage = "blocks.1.attn.k"
    hooked = ask(
        "hooked", prompt(15), max_tokens=7, temperature=1.2, n=2, tap=hooks_of(model, blocks__1__attn__hook_k=negate)
    )
    results = run(new_engine(model, max_step_tokens=10), hooked, *neighbours())
    for choice in range(2):
        assert_equal(results["hooked", choice], alone(model, hooked, choice, tap=Editor({stage: torch.neg})))
        own = [position for context in seen if context.choice == choice for position in context.positions]
        assert own == list(range(15 + 6)), "each position is computed once"
    assert_each_equals_alone(model, results, *neighbours())


def test_a_hook_that_fails_ends_its_own_request() -> None:
    model = exact("llama")

    def fail(tensor: Tensor, context: HookContext) -> Tensor:
        return tensor if context.positions[0] < 9 else tensor[..., 1:]

    hooks = hooks_of(model, blocks__0__mlp_out=fail)
    result = fail_among_neighbours(model, ask("faulty", prompt(9), tap=hooks), max_step_tokens=64)
    assert_ended_with(result, InvalidField, "blocks.0.mlp_out: a hook returns None or a torch.float64 tensor")
    assert len(result.ids) == 1
    assert isinstance(hooks.error, ValueError)


def test_hooks_of_one_stage_run_in_order_and_a_hook_that_changes_nothing_changes_no_bit() -> None:
    model, calls = exact("llama"), list[str]()

    def note(name: str) -> object:
        return lambda tensor, context: calls.append(name)

    hooks = hooks_of(model, **{"blocks__*__attn__pattern": note("all"), "blocks__0__attn__pattern": note("first")})
    drive = Drive(new_engine(model))
    drive.add(ask("hooked", prompt(9), max_tokens=1, tap=hooks))
    assert_equal(drive.finish()["hooked", 0], alone(model, ask("plain", prompt(9), max_tokens=1)))
    assert calls[:3] == ["all", "first", "all"]


def test_a_wrong_hook_is_refused() -> None:
    model = exact("llama")
    with pytest.raises(InvalidField, match=r"^hooks: 'blocks.0.attn.w' matches no stage; .*attn\.v"):
        hooks_of(model, blocks__0__attn__w=torch.neg)
    with pytest.raises(InvalidField, match=r"^hooks: loss cannot be hooked"):
        hooks_of(model, loss=torch.neg)
    with pytest.raises(InvalidField, match=r"^hooks: the value of 'embed' is not a function"):
        hooks_of(model, embed=3)
