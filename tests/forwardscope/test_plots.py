"""Pictures show the numbers of results, with the tokens as labels."""

from typing import Any

import numpy as np
import pytest

from forwardscope import Client, InvalidArgument
from forwardscope.local import LocalModel
from forwardscope.plots import Picture, plain

PROMPT, CORRUPTED = "the cat cost $ 5", "the man cost $ 5"


def images(picture: Picture) -> list[Any]:
    """The maps of a picture, as arrays."""
    return [each.get_array() for axes in picture.axes for each in axes.get_images()]


def labels(picture: Picture, axis: str) -> list[str]:
    ticks = getattr(picture.axes[0], f"get_{axis}ticklabels")()
    return [each.get_text() for each in ticks]


def test_a_pattern_is_a_map_for_each_head_with_the_tokens_at_its_sides(local: LocalModel) -> None:
    trace = local.run(PROMPT, "*", heads=[2, 5], positions=[1, 3])
    picture = trace.plot("blocks.0.attn.hook_pattern")
    shown, pattern = images(picture), trace["blocks.0.attn.pattern"][0].float().numpy()
    assert len(shown) == 2
    assert all(np.array_equal(image, head) for image, head in zip(shown, pattern, strict=True))
    assert labels(picture, "x") == [(token.text or "").strip().replace("$", r"\$") or " " for token in trace.tokens]
    assert labels(picture, "y") == [labels(picture, "x")[each] for each in (1, 3)]
    assert picture._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("stage", ["blocks.0.resid_post", "blocks.0.attn.attn_scores", "blocks.0.attn.k", "loss"])
def test_every_kind_of_stage_has_a_picture(local: LocalModel, stage: str) -> None:
    trace = local.run(PROMPT, [stage, "loss"])
    picture = trace.plot(stage)
    finite = trace[stage].isfinite()
    if stage == "loss":
        assert len(picture.axes[0].patches) == len(trace.tokens)
    else:
        assert sum(np.isfinite(np.ma.filled(each, np.nan)).sum() for each in images(picture)) == int(finite.sum())


def test_the_maps_of_many_heads_are_one_picture(local: LocalModel) -> None:
    patterns = local.patterns(PROMPT, layers=[1, 4], heads=[0, 3])
    shown = images(patterns.plot())
    assert np.array_equal(np.stack(shown), patterns.values.reshape(4, *shown[0].shape))


def test_attributions_and_sweeps_have_pictures_of_their_numbers(client: Client) -> None:
    direct = client.attribute("direct", PROMPT, token=" the")
    (shares,) = images(direct.plot())
    assert shares.shape == (6, 9)
    assert shares[3, 2] == direct.answer["layers"][3].heads[2]
    gradients = client.attribute("integrated_gradients", PROMPT, token=" the", steps=2)
    bars = [each.get_height() for each in gradients.plot().axes[0].containers[0]]
    assert bars == list(gradients.answer["attributions"])
    sweep: dict[str, Any] = {"corrupted": CORRUPTED, "token": " the", "stages": "*.resid_pre"}
    patching = client.attribute("patching", PROMPT, **sweep)
    (cells,) = images(patching.plot())
    assert np.array_equal(cells, np.stack([patching[name] for name in patching]))
    assert labels(patching.plot(), "y") == list(patching)


def test_the_logit_lens_shows_the_most_likely_tokens(client: Client) -> None:
    lens = client.attribute("logit_lens", PROMPT)
    picture = lens.plot()
    top = lens.answer["layers"][-1].positions[-1][0]
    (shown,) = images(picture)
    assert shown[0, -1] == top.probability
    assert top.text.strip() in [each.get_text() for each in picture.axes[0].texts]
    found = client.generate(PROMPT, max_tokens=3, trace={"logit_lens": True}, ignore_eos=True)
    (steps,) = images(found.plot())
    assert steps.shape == (6, 3)
    with pytest.raises(InvalidArgument, match="trace: has no logit lens"):
        client.generate(PROMPT, max_tokens=1).plot()


def titles(picture: Picture) -> list[str]:
    return [axes.get_title() for axes in picture.axes[:2]]


@pytest.mark.parametrize("kind", ["local", "client"])
def test_pictures_of_a_part_name_its_heads_and_positions(request: pytest.FixtureRequest, kind: str) -> None:
    model, part = request.getfixturevalue(kind), {"heads": [5, 2], "positions": [-1, 1]}
    trace = model.run(PROMPT, ["*.0.attn.pattern", "*.0.attn.k"], **part)
    rows = [plain(trace.tokens[each].text) for each in (-1, 1)]
    gradients = model.attribute("gradient", PROMPT, token=" the", stages="*.0.attn.pattern", **part)
    for result in (trace, gradients):
        picture = result.plot("blocks.0.attn.pattern")
        assert (titles(picture), labels(picture, "y")) == (["head 5", "head 2"], rows)
    estimates = {"corrupted": CORRUPTED, "token": " the", "stages": "*.0.attn.z"} | part
    cells = model.attribute("attribution_patching", PROMPT, **estimates).plot()
    assert (labels(cells, "x"), labels(cells, "y")) == (["5", "2"], rows)
    assert titles(trace.plot("blocks.0.attn.k")) == ["kv_head ", "kv_head "], "those that the heads 5 and 2 read"
    assert titles(model.run(PROMPT, "*.0.attn.k").plot("blocks.0.attn.k")) == ["kv_head 0", "kv_head 1"]


@pytest.mark.parametrize("kind", ["local", "client"])
def test_pictures_of_steps_name_their_heads_and_positions(request: pytest.FixtureRequest, kind: str) -> None:
    model, trace = request.getfixturevalue(kind), {"stages": "*.0.attn.z", "heads": [5, 2]}
    steps = [*model.generate(PROMPT, max_tokens=2, trace=trace, ignore_eos=True).trace]
    events = model.stream(PROMPT, max_tokens=2, trace=trace, ignore_eos=True)
    for step in [*steps, *(event.trace for event in events if event.trace is not None)]:
        picture = step.plot("blocks.0.attn.z")
        assert (titles(picture), labels(picture, "y")) == (["head 5", "head 2"], [*map(str, step.positions)])


def test_a_tensor_of_a_graph_has_a_picture(local: LocalModel) -> None:
    graph = LocalModel(local.checkpoint, grad=True)
    trace = graph.run(PROMPT, "blocks.0.resid_post")
    (shown,) = images(trace.plot("blocks.0.resid_post"))
    assert np.array_equal(shown, trace["blocks.0.resid_post"][0].detach().numpy())
