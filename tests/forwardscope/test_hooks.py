"""Hooks of a model of `load`: functions that read and change stages, equal to hooks in `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forwardscope import Client, HookContext, InvalidArgument
from forwardscope.local import LocalModel, load
from model.errors import InvalidField
from tests.parity.reference import config_of
from tests.tiny import ROUNDING, write_reference

PROMPT = "the cat sat on"
STAGE = "blocks.1.attn.hook_z"


def double_head(z: Tensor, context: HookContext) -> None:
    z[:, :, 2] *= 2


def test_text_and_logits_are_those_of_a_hook_in_transformers(tmp_path: Path) -> None:
    reference = write_reference(config_of("llama", {}), tmp_path)
    model, ids = load(str(tmp_path), dtype="float32"), [3, 1, 4, 1, 5, 9, 2, 6]
    width = reference.config.hidden_size // reference.config.num_attention_heads

    def double(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        z = inputs[0].clone()
        z[..., 2 * width : 3 * width] *= 2
        return (z,)

    reference.model.layers[1].self_attn.o_proj.register_forward_pre_hook(double)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
        text = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    hooks = {STAGE: double_head}
    assert torch.allclose(model.run(ids, "logits", hooks=hooks).logits, expected, atol=ROUNDING[torch.float32])
    assert torch.allclose(model.logits(ids, "all", hooks=hooks).logits, expected, atol=ROUNDING[torch.float32])
    found = model.generate(ids, max_tokens=12, temperature=0, ignore_eos=True, hooks=hooks)
    assert list(found.tokens) == text.tolist()
    assert found.tokens != model.generate(ids, max_tokens=12, temperature=0, ignore_eos=True).tokens


def test_a_hooked_stream_leaves_the_streams_beside_it_as_they_are(local: LocalModel) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "seed": 5, "logprobs": 2, "trace": {"stages": ["*.resid_post"]}}
    alone = [list(local.stream(PROMPT, **fields)), list(local.stream(PROMPT, hooks={STAGE: double_head}, **fields))]
    streams = [local.stream(PROMPT, **fields), local.stream(PROMPT, hooks={STAGE: double_head}, **fields)]
    together: list[list[Any]] = [[], []]
    for _ in range(13):
        for index, stream in enumerate(streams):
            together[index].append(next(stream))
    for ours, theirs in zip(alone, together, strict=True):
        assert [(event.text, event.token) for event in ours] == [(event.text, event.token) for event in theirs]
        for own, other in zip(ours[:-1], theirs[:-1], strict=True):
            assert own.trace is not None
            assert all(torch.equal(own.trace[name], other.trace[name]) for name in own.trace)
    assert [event.token for event in alone[0]] != [event.token for event in alone[1]]


def test_a_hook_sees_every_computed_position_once_and_the_maps_of_patterns(local: LocalModel) -> None:
    seen: list[tuple[str, list[int], tuple[int, ...]]] = []

    def note(tensor: Tensor, context: HookContext) -> None:
        seen.append((context.name, list(context.positions), tuple(tensor.shape)))

    local.generate(PROMPT, max_tokens=3, hooks={"embed": note})
    assert seen == [("embed", [0, 1, 2, 3], (1, 4, 256)), ("embed", [4], (1, 1, 256)), ("embed", [5], (1, 1, 256))]
    plain = local.patterns(PROMPT).values
    flat = local.patterns(PROMPT, hooks={"blocks.0.attn.pattern": lambda pattern, context: torch.ones_like(pattern)})
    assert (flat.values[0] == 1).all()
    assert not torch.equal(flat.values[1], plain[1])


CALLS: list[Callable[[LocalModel, Any], Any]] = [
    lambda model, hooks: model.run(PROMPT, hooks=hooks),
    lambda model, hooks: model.logits(PROMPT, hooks=hooks),
    lambda model, hooks: model.generate(PROMPT, hooks=hooks),
    lambda model, hooks: list(model.stream(PROMPT, hooks=hooks)),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_of_a_hook_reaches_its_own_caller_only(local: LocalModel, call: Callable[..., Any]) -> None:
    def fail(tensor: Tensor, context: HookContext) -> None:
        raise ZeroDivisionError(context.name)

    beside = local.stream(PROMPT, max_tokens=6, temperature=0)
    first = next(beside)
    with pytest.raises(ZeroDivisionError, match=r"blocks\.0\.attn\.z"):
        call(local, {"blocks.*.attn.z": fail})
    with pytest.raises(InvalidField, match=r"^hooks: 'blocks.0.attn.w' matches no stage"):
        call(local, {"blocks.0.attn.w": fail})
    texts = [first.text, *(event.text for event in beside)]
    assert "".join(texts) == local.generate(PROMPT, max_tokens=6, temperature=0).text


def test_a_hook_whose_logits_are_not_finite_is_named(local: LocalModel, caplog: pytest.LogCaptureFixture) -> None:
    hooks = {"embed": lambda embed, context: embed * torch.nan}
    with pytest.raises(InvalidField, match="hooks: the hooked pass gives logits that are not finite"):
        local.generate(PROMPT, max_tokens=2, hooks=hooks)
    with pytest.raises(InvalidField, match="hooks: the hooked pass gives logits that are not finite"):
        list(local.stream(PROMPT, max_tokens=2, hooks=hooks))
    assert not caplog.records


def test_a_client_refuses_functions(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"^hooks: are functions, which only a model of `load` can call"):
        client.generate(PROMPT, hooks={STAGE: double_head})
