"""Estimates of the time that edits and traces add to a step, and its limit while other sequences run."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.engine.extra_costs import EDITED_STAGE, REPLAYED_EDIT, extra_cost_of
from model.engine.request import Request
from model.engine.sequence import ExtraCost
from model.text.transcript import GenerationParams
from model.tracing.edits import Edit
from tests.engine.driving import ask, new_engine, prompt
from tests.engine.test_adapters import served
from tests.engine.test_edits import edited
from tests.engine.test_recorded_traces import traced
from tests.tiny import CONFIGS, build

CONFIG = CONFIGS["llama"]
MODEL = build(CONFIG)
SCALE = Edit(stage="blocks.0.resid_post", op="scale", factor=2.0)


def costs(request: Request) -> Callable[[int, int], ExtraCost]:
    found = extra_cost_of(request, CONFIG, traces=True)
    assert found is not None
    return found


def test_a_request_without_edits_and_traces_costs_nothing() -> None:
    assert extra_cost_of(ask("plain", prompt(5)), CONFIG, traces=True) is None


def test_an_edit_costs_its_stages_and_less_in_a_replayed_step() -> None:
    stages = (SCALE.stage, "blocks.*.resid_post")
    one, all_blocks = (edited(MODEL, ask("a", prompt(5)), replace(SCALE, stage=stage)) for stage in stages)
    usual, most = costs(one)(7, 1)
    assert (usual, most) == pytest.approx((REPLAYED_EDIT, EDITED_STAGE), rel=0.05)
    assert costs(all_blocks)(7, 1) == pytest.approx((CONFIG.num_layers * usual, CONFIG.num_layers * most))
    usual, most = costs(one)(0, 5)
    assert usual == most == pytest.approx(EDITED_STAGE, rel=0.05)


def test_an_edit_costs_nothing_where_it_changes_nothing() -> None:
    request = edited(MODEL, ask("a", prompt(9), max_tokens=8), replace(SCALE, positions=[2, 3, (6, 8)]))
    found = costs(request)
    assert [found(start, number).most > 0 for start, number in ((0, 2), (0, 3), (4, 2), (5, 1), (5, 3), (9, 1))] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]


def test_several_edits_cost_the_sum_also_at_the_same_and_at_other_positions() -> None:
    edits = [SCALE, SCALE, replace(SCALE, positions=[2, 7]), replace(SCALE, stage="blocks.*.resid_post")]
    found = costs(edited(MODEL, ask("a", prompt(9), max_tokens=8), *edits))
    singles = [costs(edited(MODEL, ask("a", prompt(9), max_tokens=8), edit)) for edit in edits]
    for start, number in ((0, 2), (2, 1), (0, 9), (9, 1), (2, 1)):
        sums = [sum(values) for values in zip(*(single(start, number) for single in singles), strict=True)]
        assert found(start, number) == pytest.approx(sums)


@pytest.mark.parametrize(
    "edit",
    [
        Edit(stage="blocks.0.attn.pattern", op="scale", factor=0.5),
        Edit(stage="blocks.0.resid_post", op="noise", std=0.1),
        Edit(stage="blocks.0.attn.scores", op="noise", std=0.1),
    ],
)
def test_keys_and_noise_cost_more_and_are_never_replayed(edit: Edit) -> None:
    found = costs(edited(MODEL, ask("a", prompt(9), max_tokens=200), edit))
    usual, most = found(9, 1)
    assert usual == most > 10 * EDITED_STAGE
    if "attn" in edit.stage:
        assert found(199, 1).most > most


def test_a_trace_costs_its_stages_its_lens_and_its_logits() -> None:
    summaries = costs(traced(MODEL, ask("a", prompt(5)), "summaries of all stages"))
    usual, most = summaries(5, 1)
    assert 0 < usual < most
    assert summaries(0, 5).most > most
    values = costs(traced(MODEL, ask("a", prompt(5)), "values of all stages"))
    assert values(5, 1).usual > usual
    request = traced(MODEL, ask("a", prompt(5)), "summaries of all stages")
    assert extra_cost_of(request, CONFIG, traces=False) is None


def test_log_probabilities_of_the_prompt_cost_its_logits() -> None:
    params = GenerationParams(max_tokens=3, prompt_logprobs=1)
    found = costs(Request(id="a", prompt_ids=prompt(5), params=params))
    assert found(0, 4).most == pytest.approx(4 * found(0, 1).most)
    assert found(5, 1).most == 0


@pytest.mark.parametrize("beside_plain", [True, False])
def test_noise_in_many_choices_is_computed_for_a_few_of_them_in_each_step(beside_plain: bool) -> None:
    model = served("llama")
    engine = new_engine(model, max_sequences=32)
    edits = [Edit(stage="blocks.*.resid_p*", op="noise", std=0.1, seed=seed) for seed in range(10)]
    engine.add(edited(model, ask("noise", prompt(4), max_tokens=4, n=20), *edits))
    if beside_plain:
        engine.add(ask("plain", prompt(4, seed=1), max_tokens=40))
    numbers = list[int]()
    while engine.has_work:
        outputs = engine.step().outputs
        engine.check_integrity()
        numbers.append(sum(output.request_id == "noise" for output in outputs))
        assert not beside_plain or len(numbers) > 40 or any(output.request_id == "plain" for output in outputs)
    assert sum(numbers) == 20 * 4
    assert max(numbers[:40]) <= (3 if beside_plain else 20)
