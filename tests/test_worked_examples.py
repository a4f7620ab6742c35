"""The worked examples: their numbers, their special features, and the mistakes that the comparison finds."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.tracing.predictions import compute_loss
from model.tracing.tap import Recorder
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, compare, worked_example
from model.worked_examples.comparison import Slip, StageComparison
from model.worked_examples.published import half_unit
from tests.conftest import shared
from tests.editor import Editor

NAMES = list(WORKED_EXAMPLES)
ARTICLES = {
    "ai-rocks": "articles/000_9af16ffac53cecd2.txt",
    "a-tokens-journey": "articles/003_8bf4da201af3daff.txt",
    "i-like-transformers": "articles/004_2867e64eb7bdf967.txt",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: these networks are too small for two, and on a busy machine two take ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def record(example: WorkedExample, ids: list[int], targets: list[int | None] | None = None) -> dict[str, Tensor]:
    recorder = Recorder(example.stages)
    logits = example(torch.tensor([ids]), tap=recorder)
    compute_loss(logits, targets or [None] * len(ids), recorder)
    return recorder.kept


def compared(name: str, stage: str) -> StageComparison:
    return next(entry for entry in compare(worked_example(name)).stages if entry.stage == stage)


def slips_at(name: str, stage: str) -> dict[tuple[int, ...], Slip]:
    return {slip.index: slip for slip in compare(worked_example(name)).slips if slip.stage == stage}


def altered(name: str, stage: str, index: tuple[int, ...], printed: str) -> WorkedExample:
    """The same example, but with another number printed at one place."""
    original = WORKED_EXAMPLES[name].printed[stage]
    places = np.full(worked_example(name).published[stage].values.shape, -1)
    strings = original.text.split()
    places[original.at] = np.arange(len(strings)).reshape(places[original.at].shape)
    strings[places[index]] = printed
    numbers = {**WORKED_EXAMPLES[name].printed, stage: replace(original, text=" ".join(strings))}
    example: WorkedExample = type("Altered", (WORKED_EXAMPLES[name],), {"printed": numbers})()
    return example


# The printed numbers.


def test_the_rounding_is_half_a_unit_of_the_last_printed_digit() -> None:
    assert [half_unit(printed) for printed in ("1.560", "-0.03", "2")] == pytest.approx([0.0005, 0.005, 0.5])


def test_every_number_printed_by_i_like_transformers_agrees_and_none_is_a_slip() -> None:
    comparison = compare(worked_example("i-like-transformers"))
    assert [stage.stage for stage in comparison.stages] == ["blocks.0.ln2.out", "logits", "probabilities", "loss"]
    assert all(stage.agrees and stage.max_difference <= 5e-5 for stage in comparison.stages)
    assert {result.name: result.computed for result in comparison.results} == {
        "loss": "1.8299",
        "total_loss": "7.3195",
        "perplexity": "6.23",
    }
    assert all(result.agrees for result in comparison.results)
    assert comparison.slips == []


def test_a_tokens_journey_predicts_cat_with_the_printed_loss() -> None:
    results = {result.name: result for result in compare(worked_example("a-tokens-journey")).results}
    assert results["prediction"].computed == "cat"
    assert results["loss"].computed == "1.89"
    assert results["prediction"].agrees
    assert results["loss"].agrees


def test_a_tokens_journey_has_exactly_one_slip() -> None:
    (slip,) = compare(worked_example("a-tokens-journey")).slips
    assert (slip.stage, slip.index, slip.printed) == ("blocks.0.attn_out", (0, 3, 1), "0.19")
    assert slip.from_printed == pytest.approx(0.12 * 0.1 + 0.19 * 0.7 + 0.24 * 0.2 + 0.24 * 0.1)
    assert compared("a-tokens-journey", "blocks.0.attn.z").max_difference < 0.04


def test_a_computed_number_half_way_between_two_roundings_agrees_with_the_printed_one() -> None:
    for stage in ("q", "k", "v"):  # each has sums such as 0.15, printed as 0.2
        entry = compared("a-tokens-journey", f"blocks.0.attn.{stage}")
        assert entry.max_difference == pytest.approx(0.05)
        assert entry.agrees


def test_the_completed_weights_of_ai_rocks_reproduce_the_printed_stages() -> None:
    for stage in ("blocks.0.ln1.out", "blocks.0.attn_out", "blocks.0.mlp_out"):
        assert compared("ai-rocks", stage).agrees, stage
        assert compared("ai-rocks", stage).from_previous is None, stage
    example = worked_example("ai-rocks")
    assert all(weight.abs().max() < 1 for weight in example.parameters() if weight.dim() > 1)


# The slips.


def test_two_rows_of_the_printed_v_of_ai_rocks_do_not_follow_from_its_weights() -> None:
    found = {index: round(slip.from_printed, 4) for index, slip in slips_at("ai-rocks", "blocks.0.attn.v").items()}
    assert found == {(0, 1, 0, 0): 0.0277, (0, 1, 0, 1): -0.0350, (0, 2, 0, 0): 0.0629, (0, 2, 0, 1): -0.0228}
    assert not compared("ai-rocks", "blocks.0.attn.v").agrees


def test_the_two_printed_versions_of_y1_of_ai_rocks_contradict_each_other() -> None:
    found = slips_at("ai-rocks", "blocks.0.resid_pre")
    assert found[0, 1, 0].printed == "-1.199"
    assert found[0, 1, 0].from_printed == -1.291
    assert {index[1] for index in found} == {1, 2}


def test_the_second_norm_of_ai_rocks_is_recomputed_with_the_root_of_the_printed_variance() -> None:
    found = slips_at("ai-rocks", "blocks.0.ln2.normalized")
    assert found[0, 0, 0].from_printed == pytest.approx((1.410 - 0.0005) / math.sqrt(0.9905))
    assert found[0, 0, 0].printed == "1.414"


def test_two_rows_of_the_printed_y2_of_ai_rocks_contradict_the_printed_normalized_rows() -> None:
    found = slips_at("ai-rocks", "blocks.0.ln2.out")
    assert {index[1] for index in found} == {1, 2}
    assert found[0, 1, 1].from_printed == pytest.approx(1.517)


def test_the_sums_of_ai_rocks_follow_from_the_printed_terms() -> None:
    for stage in ("attn.q", "attn.k", "resid_mid", "ln2.scale", "resid_post"):
        assert slips_at("ai-rocks", f"blocks.0.{stage}") == {}, stage
    assert slips_at("ai-rocks", "logits") == {}
    assert slips_at("ai-rocks", "probabilities") == {}


def test_the_probability_in_the_result_of_ai_rocks_differs_from_that_in_its_printed_stage() -> None:
    results = {result.name: result for result in compare(worked_example("ai-rocks")).results}
    assert results["prediction"].computed == "<EOS>"
    assert results["prediction"].agrees
    assert not results["prediction_probability"].agrees
    assert worked_example("ai-rocks").published["probabilities"].string_at((0, 2, 2)) == "0.3734"


@pytest.mark.parametrize("name", NAMES)
def test_a_large_change_of_a_printed_number_makes_a_slip_at_that_place(name: str) -> None:
    original = compare(worked_example(name))
    known = {(slip.stage, slip.index) for slip in original.slips}
    for entry in original.stages:
        if entry.from_previous is None:
            continue
        indices = [tuple(index) for index in (~entry.published.numbers().isnan()).nonzero().tolist()]
        index = next(index for index in indices if (entry.stage, index) not in known)
        printed = entry.published.string_at(index)
        changed = altered(name, entry.stage, index, f"{float(printed) + 3:.{len(printed.partition('.')[2])}f}")
        assert (entry.stage, index) in {(slip.stage, slip.index) for slip in compare(changed).slips}
    restored = altered(name, entry.stage, index, printed)
    assert compare(restored).slips == original.slips


def test_a_printed_sum_may_differ_by_its_own_rounding_and_that_of_its_terms() -> None:
    # resid_mid = resid_pre + attn_out, all with two decimals: 0.005 for the sum, and 0.005 for each term
    within = altered("a-tokens-journey", "blocks.0.resid_mid", (0, 3, 0), "-0.05")
    beyond = altered("a-tokens-journey", "blocks.0.resid_mid", (0, 3, 0), "-0.04")
    assert not any(slip.stage == "blocks.0.resid_mid" for slip in compare(within).slips)
    (slip,) = (slip for slip in compare(beyond).slips if slip.stage == "blocks.0.resid_mid")
    assert slip.from_printed == pytest.approx(-0.06)
    assert slip.allowed == pytest.approx(0.015)


def test_printed_weights_are_exact() -> None:
    example = altered("a-tokens-journey", "blocks.0.resid_pre", (0, 0, 0), "0.4")
    (slip,) = (slip for slip in compare(example).slips if slip.stage == "blocks.0.resid_pre")
    assert slip.from_printed == pytest.approx(0.2 + 0.1)
    assert slip.allowed == pytest.approx(0.05)


def test_compare_works_in_inference_mode() -> None:
    with torch.inference_mode():
        (slip,) = compare(worked_example.__wrapped__("a-tokens-journey")).slips
    assert slip.allowed == pytest.approx(0.0105)


# The networks.


@pytest.mark.parametrize("name", NAMES)
def test_recorded_stages_have_the_names_order_and_shapes_of_the_table(name: str) -> None:
    example = worked_example(name)
    for num_positions in range(1, example.max_positions + 1):
        ids = [(3 * position + 1) % len(example.vocabulary) for position in range(num_positions)]
        kept = record(example, ids)
        sizes = example.sizes(num_positions)
        expected = [(stage.name, stage.shape(sizes)) for stage in example.stages]
        assert [(stage, tuple(tensor.shape)) for stage, tensor in kept.items()] == expected
        assert all(tensor.dtype == torch.float64 for tensor in kept.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_without_a_tap_gives_the_same_logits(name: str) -> None:
    example = worked_example(name)
    plain = example(torch.tensor([example.prompt_ids]))
    # Fused attention sums in another order, in float64.
    torch.testing.assert_close(plain, record(example, example.prompt_ids)["logits"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_z_is_the_mean_of_the_visible_values_weighted_by_the_pattern(name: str) -> None:
    example = worked_example(name)
    kept = record(example, example.prompt_ids)
    pattern = kept["blocks.0.attn.pattern"]
    mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, kept["blocks.0.attn.v"])
    torch.testing.assert_close(mixed, kept["blocks.0.attn.z"])
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))
    is_causal = name != "a-tokens-journey"
    assert bool((pattern.triu(1) == 0).all()) is is_causal


def test_editing_the_first_norm_of_a_tokens_journey_does_not_change_the_logits() -> None:
    example = worked_example("a-tokens-journey")
    ids = torch.tensor([example.prompt_ids])
    edited = example(ids, tap=Editor({"blocks.0.ln1.out": torch.zeros_like}))
    torch.testing.assert_close(edited, record(example, example.prompt_ids)["logits"], rtol=0, atol=1e-13)


def test_the_residuals_of_ai_rocks_add_the_normalized_inputs() -> None:
    kept = {
        name.removeprefix("blocks.0."): tensor for name, tensor in record(worked_example("ai-rocks"), [2, 0]).items()
    }
    torch.testing.assert_close(kept["resid_mid"], kept["ln1.out"] + kept["attn_out"])
    torch.testing.assert_close(kept["resid_post"], kept["ln2.out"] + kept["mlp_out"])
    torch.testing.assert_close(kept["logits"], kept["resid_post"] @ worked_example("ai-rocks").W_U)


def test_the_only_residual_of_i_like_transformers_adds_the_outputs_of_both_sublayers() -> None:
    kept = record(worked_example("i-like-transformers"), [3, 4])
    total = kept["blocks.0.attn_out"] + kept["blocks.0.mlp_out"]
    torch.testing.assert_close(kept["blocks.0.resid_post"], total)
    normalized = (total - total.mean(-1, keepdim=True)) / (total.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(kept["blocks.0.ln2.out"], normalized)


@pytest.mark.parametrize("name", NAMES)
def test_words_are_encoded_to_the_ids_of_the_prompt_and_an_unknown_word_is_named(name: str) -> None:
    example = worked_example(name)
    words = [example.vocabulary[i] for i in example.prompt_ids]
    assert example.encode("  ".join(words)) == example.prompt_ids
    with pytest.raises(ValueError, match=r"the word 'Cat'.*" + example.vocabulary[-1]):
        example.encode(f"{words[0]} Cat")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_positions", [0, 6])
def test_a_prompt_with_too_few_or_too_many_positions_is_refused(name: str, num_positions: int) -> None:
    with pytest.raises(ValueError, match=f"{num_positions} positions; {name} takes 1 to"):
        worked_example(name)(torch.zeros(1, num_positions, dtype=torch.int64))


@pytest.mark.parametrize("name", NAMES)
def test_an_id_outside_the_vocabulary_is_refused(name: str) -> None:
    for token_id in (-1, len(worked_example(name).vocabulary)):
        with pytest.raises(ValueError, match="has the token ids 0 to"):
            worked_example(name)(torch.tensor([[token_id]]))


def test_the_error_for_an_unknown_example_lists_the_known_names() -> None:
    with pytest.raises(ValueError, match="ai-rocks, a-tokens-journey, i-like-transformers"):
        worked_example("gpt-5")


# Against the articles.


def facts(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(shared(f"worked_examples/{name}.json").read_text())
    return loaded


# Our names of weights -> those of the articles.
ARTICLE_NAMES = {
    "W_E": ("E", "E_token", "tok_emb"),
    "W_pos": ("E_pos", "pos_emb"),
    **{f"W_{part}": (f"W_{part}", f"W_{part.lower()}") for part in "QKVO"},
    "W_in": ("W_1", "W1"),
    "b_in": ("b1",),
    "W_out": ("W_2", "W2"),
    "b_out": ("b2",),
    "W_U": ("W_lm",),
}


@pytest.mark.parametrize("name", NAMES)
def test_given_weights_are_those_of_the_article(name: str) -> None:
    example = worked_example(name)
    for key, values in facts(name)["given"].items():
        given = torch.tensor(values, dtype=torch.float64)
        if key in ("gamma", "beta"):
            for norm in ("ln1", "ln2"):
                parameter = example.get_parameter(f"{norm}.{'weight' if key == 'gamma' else 'bias'}")
                assert torch.equal(parameter, given)
            continue
        own = next(own for own, names in ARTICLE_NAMES.items() if key.removesuffix(".head1") in names)
        weight = getattr(example, own)
        if name == "i-like-transformers" and own in ("W_O", "W_in", "W_out", "W_U"):  # it has W x, we have x W
            weight = weight.mT
        if key.endswith(".head1"):
            weight = weight[0]
        assert torch.equal(weight.reshape(given.shape), given), key


@pytest.mark.parametrize("name", NAMES)
def test_prompt_words_and_targets_are_those_of_the_article(name: str) -> None:
    example, article = worked_example(name), facts(name)
    assert list(example.vocabulary) == article["vocabulary"]
    assert example.prompt_ids == article["tokens"]
    if "targets" in article:
        targets = (article["targets"] + [None])[: len(example.prompt_ids)]
    else:
        targets = [None, None, None, article["target_of_last_position"]]
    assert example.targets == targets


# For each entry of the development data: the stage of its numbers, and their index in the stage.
ENTRIES: dict[str, dict[str, tuple[str, Any]]] = {
    "ai-rocks": {
        "y1 (as used for q, k, v)": ("blocks.0.ln1.out", 0),
        "q.head1": ("blocks.0.attn.q", (0, slice(None), 0)),
        "k.head1": ("blocks.0.attn.k", (0, slice(None), 0)),
        "v.head1": ("blocks.0.attn.v", (0, slice(None), 0)),
        "o": ("blocks.0.attn_out", 0),
        "y1 (as used in the residual)": ("blocks.0.resid_pre", 0),
        "r": ("blocks.0.resid_mid", 0),
        "y2": ("blocks.0.ln2.out", 0),
        "u": ("blocks.0.mlp_out", 0),
        "r2": ("blocks.0.resid_post", 0),
        "logits": ("logits", 0),
        "probabilities": ("probabilities", 0),
    },
    "a-tokens-journey": {
        "x": ("blocks.0.resid_pre", 0),
        "ln1.last": ("blocks.0.ln1.out", (0, 3)),
        "q": ("blocks.0.attn.q", (0, slice(None), 0)),
        "k": ("blocks.0.attn.k", (0, slice(None), 0)),
        "v": ("blocks.0.attn.v", (0, slice(None), 0)),
        "scores": ("blocks.0.attn.scores", (0, 0)),
        "pattern.first": ("blocks.0.attn.pattern", (0, 0, 0)),
        "c": ("blocks.0.attn.z", (0, slice(None), 0)),
        "attn_out.last": ("blocks.0.attn_out", (0, 3)),
        "h1.last": ("blocks.0.resid_mid", (0, 3)),
        "ln2.last": ("blocks.0.ln2.out", (0, 3)),
        "mlp_pre.last": ("blocks.0.mlp.pre", (0, 3)),
        "mlp_post.last": ("blocks.0.mlp.post", (0, 3)),
        "mlp_out.last": ("blocks.0.mlp_out", (0, 3)),
        "h2.last": ("blocks.0.resid_post", (0, 3)),
        "logits.last": ("logits", (0, 3)),
        "probabilities.last": ("probabilities", (0, 3)),
    },
    "i-like-transformers": {
        "hidden.first": ("blocks.0.ln2.out", (0, 0)),
        "logits": ("logits", 0),
        "probabilities": ("probabilities", 0),
        "loss.per_token": ("loss", (0, slice(0, 4))),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_equal_those_of_the_development_data(name: str) -> None:
    example, printed = worked_example(name), facts(name)["printed"]
    if name == "ai-rocks":
        # The data has -1.412 here. The article prints -1.414, twice, and its r2 follows from -1.414.
        printed["y2"][1][0] = -1.414
    results = {key: printed.pop(key) for key in ("loss", "perplexity", "prediction") if key in printed}
    assert printed.keys() == ENTRIES[name].keys()
    for key, (stage, part) in ENTRIES[name].items():
        numbers = example.published[stage].numbers()[part]
        # The data has four decimals where the article prints a number a second time with six.
        torch.testing.assert_close(numbers, torch.tensor(printed[key], dtype=torch.float64), rtol=0, atol=5.1e-5)
    for key, value in results.items():
        assert example.published_results[key] == str(value)


@pytest.mark.parametrize("name", NAMES)
def test_every_published_string_occurs_in_the_article(name: str) -> None:
    text = shared(ARTICLES[name]).read_text().replace("\N{MINUS SIGN}", "-")
    example = worked_example(name)
    strings = [string for published in example.published.values() for string in published.values.flat if string]
    assert all(string in text for string in strings)
    assert all(result in text for result in example.published_results.values())


def test_the_matrices_of_ai_rocks_occur_in_the_article_in_this_order() -> None:
    text = shared(ARTICLES["ai-rocks"]).read_text().replace("\N{MINUS SIGN}", "-")
    published = worked_example("ai-rocks").published
    for row in range(3):
        normalized = [published["blocks.0.ln2.normalized"].string_at((0, row, column)) for column in range(4)]
        assert f"[{','.join(normalized)}]" in text
    for stage in published.keys() - {"blocks.0.ln2.scale", "blocks.0.ln2.normalized"}:
        printed = (~published[stage].numbers().isnan()).nonzero().tolist()
        by_columns = sorted((tuple(index) for index in printed), key=lambda index: (index[-1], index[1]))
        assert "".join(published[stage].string_at(index) for index in by_columns) in text, stage
