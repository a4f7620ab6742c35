"""A comparison names the first stage that differs and the mistake behind it, and no difference where there is none."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.analysis.compare import Comparison, Options, compare, compare_with, compute_reference
from model.analysis.compare.estimates import joined_heads
from model.analysis.compare.sources import StageTensors, match_stages
from model.checkpoints.load import load_checkpoint
from model.network.transformer import Transformer
from tests.analysis.planted_faults import (
    Fault,
    InMemory,
    as_hidden_states,
    chunked,
    exchange_gate,
    in_transformer_lens_names,
    interleave_rows,
    join_without_exchange,
    layer_of,
    permute_columns,
    permute_rows,
    plant,
    read_kv_heads_in_turn,
    reconfigure,
    record,
    rotate_neighbours,
    see_the_future,
    shift_positions,
    transpose,
    use_ops,
    zero_bias,
)
from tests.published_models import smollm2
from tests.tiny import CONFIGS, build, random_ids

IDS = random_ids(67, 14)[0].tolist()


def against(
    network: Transformer, export: dict[str, torch.Tensor], ids: Sequence[int] = IDS, options: Options | None = None
) -> Comparison:
    given = match_stages(StageTensors("b", export, ids), network.config, ids)
    return compare(InMemory(network), given, ids, options)


def set_rule(norm: object, **fields: object) -> None:
    norm.rule = norm.rule._replace(**fields)  # type: ignore[attr-defined]


def untied_from_embedding(network: Transformer) -> None:
    network.head.weight = torch.nn.Parameter(network.embed.weight.data.clone())


GPT2 = [
    Fault("no bias of q", lambda n: zero_bias(layer_of(n, 1).attn.qkv, 0, 24), "blocks.1.attn.q", "missing_bias"),
    Fault("no bias of out", lambda n: zero_bias(layer_of(n, 2).attn.out), "blocks.2.attn_out", "missing_bias"),
    Fault("no bias of up", lambda n: zero_bias(layer_of(n, 0).mlp.up), "blocks.0.mlp.pre", "missing_bias"),
    Fault("no bias of down", lambda n: zero_bias(layer_of(n, 1).mlp.down), "blocks.1.mlp_out", "missing_bias"),
    Fault("no bias of a norm", lambda n: layer_of(n, 1).ln1.bias.data.zero_(), "blocks.1.ln1.out", "missing_bias"),
    Fault("positions from 1", lambda n: shift_positions(n, 1), "pos_embed", "shifted_positions"),
    Fault("positions from 2", lambda n: shift_positions(n, 2), "pos_embed", "shifted_positions"),
    Fault("exact GELU", lambda n: reconfigure(n, activation="gelu"), "blocks.0.mlp.post", "activation"),
    Fault("epsilon", lambda n: reconfigure(n, norm_eps=1e-5), "blocks.0.ln1.scale", "norm_eps"),
    Fault("unusual epsilon", lambda n: reconfigure(n, norm_eps=3.7e-3), "blocks.0.ln1.scale", "norm_eps"),
    Fault("transposed", lambda n: transpose(layer_of(n, 2).attn.out), "blocks.2.attn_out", "transposed_weight"),
    Fault("v transposed", lambda n: transpose(layer_of(n, 1).attn.qkv, 48), "blocks.1.attn.v", "transposed_weight"),
]
GEMMA = [
    Fault("no embedding scale", lambda n: reconfigure(n, embedding_scale=1.0), "embed", "missing_scale"),
    Fault("no offset", lambda n: reconfigure(n, norm_offset=False), "blocks.0.ln1.out", "norm_offset"),
    Fault("usual scale", lambda n: reconfigure(n, attention_scale=8**-0.5), "blocks.0.attn.scores", "attention_scale"),
    Fault("no softcap", lambda n: reconfigure(n, logits_softcap=None), "logits", "missing_softcap"),
    Fault("no window", lambda n: drop_window(n), "blocks.0.attn.attn_scores", "window"),
]
QWEN3 = [
    Fault("tied head", untied_from_embedding, "logits", "tied_head"),
    Fault("theta", lambda n: reconfigure(n, rope_theta=10_000.0), "blocks.0.attn.rot_q", "rotary_theta"),
    Fault("interleaved", lambda n: use_ops(n, rotate=rotate_neighbours), "blocks.0.attn.rot_q", "rotary_pairing"),
    Fault("heads in turn", read_kv_heads_in_turn, "blocks.0.attn.scores", "permuted_heads"),
]
TINY = [
    *(("gpt2", fault) for fault in GPT2),
    *(("gemma2", fault) for fault in GEMMA),
    *(("qwen3", fault) for fault in QWEN3),
]


def drop_window(network: Transformer) -> None:
    network.config = dataclasses.replace(network.config, window=None, windowed_layers=None)


@pytest.mark.parametrize(("name", "fault"), TINY, ids=lambda each: each if isinstance(each, str) else each.name)
def test_the_stage_and_the_mistake_of_a_planted_fault_are_found(name: str, fault: Fault) -> None:
    network = build(CONFIGS[name])
    found = against(network, record(plant(network, fault), IDS))
    assert found.first is not None
    assert found.first.name == fault.stage
    assert [hint.code for hint in found.hints][:1] == [fault.code]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_differs_from_itself_in_another_order_of_summation(name: str) -> None:
    network = build(CONFIGS[name])
    found = against(network, record(chunked(network), IDS))
    assert found.first is None, found.first
    assert found.logits is not None
    assert found.logits.top1_agreement == 1
    assert found.logits.kl < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounding_to_another_dtype_is_no_difference(dtype: torch.dtype) -> None:
    network = build(CONFIGS["llama"])
    export = {name: tensor.float() for name, tensor in record(chunked(network).to(dtype), IDS).items()}
    found = against(network, export)
    assert found.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert found.first is None, found.first


def test_errors_are_divided_into_inherited_and_added_ones() -> None:
    network = build(CONFIGS["llama"])
    fault = Fault("", lambda n: layer_of(n, 1).attn.out.weight.data.mul_(1.01), "blocks.1.attn_out", "missing_scale")
    found = against(network, record(plant(network, fault), IDS))
    stages = {stage.name: stage for stage in found.stages}
    first = stages["blocks.1.attn_out"]
    assert found.differing == ["blocks.1.attn_out"]
    assert found.last_equal == "blocks.1.attn.z"
    assert first.added == pytest.approx(0.01, rel=1e-3)
    assert first.inherited < 1e-5
    assert first.difference.scale == pytest.approx(1.01, rel=1e-4)
    later = stages["blocks.2.resid_post"]
    assert later.added < 1e-6
    assert later.inherited == pytest.approx(later.difference.error, rel=1e-3)
    assert later.difference.error > 1e-3
    assert found.hints[0].code == "missing_scale"
    assert "1.01" in found.hints[0].message


def test_a_number_that_is_not_finite_is_a_difference() -> None:
    network = build(CONFIGS["llama"])
    export = record(network, IDS)
    broken = export["blocks.1.mlp.pre"].clone()
    broken[0, 3, 5] = torch.nan
    found = against(network, export | {"blocks.1.mlp.pre": broken})
    assert found.first is not None
    assert found.first.name == "blocks.1.mlp.pre"
    assert found.first.difference.mismatches == 1


def test_masked_scores_may_be_large_negative_numbers() -> None:
    network = build(CONFIGS["gpt2"])
    export = record(network, IDS)
    masked = {name: tensor.nan_to_num(neginf=-1e5) for name, tensor in export.items() if name.endswith("attn_scores")}
    assert against(network, export | masked).first is None


def test_a_position_with_large_activations_hides_no_error_of_another_one() -> None:
    """Relative to the whole stage, the error below is smaller than rounding."""
    network = build(CONFIGS["llama"])
    network.embed.weight.data[IDS[0]] *= 1e6
    assert IDS[0] not in IDS[1:]
    export = record(network, IDS)
    assert against(network, export).first is None
    changed = export["blocks.0.resid_mid"].clone()
    changed[0, 5] *= 1.001
    found = against(network, export | {"blocks.0.resid_mid": changed})
    assert found.first is not None
    assert found.first.name == "blocks.0.resid_mid"
    assert found.first.added < found.first.added_noise


def test_errors_of_each_position_and_head_are_given_on_request() -> None:
    network = build(CONFIGS["llama"])
    export = record(network, IDS)
    changed = export["blocks.0.attn.z"].clone()
    changed[0, 4, 2] *= 2
    found = against(network, export | {"blocks.0.attn.z": changed}, options=Options(per_position=True, per_head=True))
    z = next(stage for stage in found.stages if stage.name == "blocks.0.attn.z")
    assert z.per_head is not None
    assert z.per_position is not None
    assert [error > 1e-3 for error in z.per_head] == [head == 2 for head in range(6)]
    assert [error > 1e-3 for error in z.per_position] == [position == 4 for position in range(len(IDS))]


HIDDEN = [
    Fault("eps", lambda n: set_rule(layer_of(n, 1).ln2, eps=1e-5), "blocks.2.resid_pre", "norm_eps"),
    Fault("offset", lambda n: set_rule(layer_of(n, 0).ln1, offset=True), "blocks.1.resid_pre", "norm_offset"),
    Fault("last offset", lambda n: set_rule(n.ln_final, offset=True), "ln_final.out", "norm_offset"),
    Fault("theta", lambda n: reconfigure(n, rope_theta=10_000.0), "blocks.1.resid_pre", "rotary_theta"),
    Fault("gate", lambda n: exchange_gate(layer_of(n, 2).mlp.up), "ln_final.out", "exchanged_gate"),
    Fault("scale", lambda n: reconfigure(n, attention_scale=1.0), "blocks.1.resid_pre", "missing_scale"),
    Fault("tied head", untied_from_embedding, "logits", "tied_head"),
]


@pytest.mark.parametrize("fault", HIDDEN, ids=lambda fault: fault.name)
def test_hidden_states_alone_are_enough_for_many_mistakes(fault: Fault) -> None:
    network = build(CONFIGS["llama with llama3 scaling"])
    export = as_hidden_states(record(plant(network, fault), IDS), network.config)
    found = against(network, export)
    assert found.first is not None
    assert found.first.name == fault.stage
    assert [hint.code for hint in found.hints][:1] == [fault.code]


# SmolLM2


@cache
def smollm2_network() -> tuple[Transformer, list[int]]:
    checkpoint = load_checkpoint(str(smollm2()), dtype="float32")
    assert checkpoint.tokenizer is not None
    return checkpoint.model, checkpoint.tokenizer.encode("When Mary and John went to the store, John gave a drink to")


ORDER = [3, 1, 2, 0, 4, 8, 6, 7, 5]
SMOLLM2 = [
    Fault(
        "q heads", lambda n: permute_rows(layer_of(n, 3).attn.qkv, 0, ORDER, 64), "blocks.3.attn.q", "permuted_heads"
    ),
    Fault(
        "v heads",
        lambda n: permute_rows(layer_of(n, 7).attn.qkv, 768, [1, 2, 0], 64),
        "blocks.7.attn.v",
        "permuted_heads",
    ),
    Fault(
        "heads of out",
        lambda n: permute_columns(layer_of(n, 11).attn.out, ORDER, 64),
        "blocks.11.attn_out",
        "permuted_heads",
    ),
    Fault(
        "joined heads",
        lambda n: join_without_exchange(layer_of(n, 2).attn.out, 9, 64),
        "blocks.2.attn_out",
        "permuted_heads",
    ),
    Fault("heads in turn", read_kv_heads_in_turn, "blocks.0.attn.attn_scores", "permuted_heads"),
    Fault("interleaved", lambda n: use_ops(n, rotate=rotate_neighbours), "blocks.0.attn.rot_q", "rotary_pairing"),
    Fault(
        "interleaved rows",
        lambda n: interleave_rows(layer_of(n, 0).attn.qkv, 9, 64),
        "blocks.0.attn.q",
        "rotary_pairing",
    ),
    Fault("no scale", lambda n: reconfigure(n, attention_scale=1.0), "blocks.0.attn.attn_scores", "missing_scale"),
    Fault("embedding scale", lambda n: reconfigure(n, embedding_scale=24.0), "embed", "surplus_scale"),
    Fault("out transposed", lambda n: transpose(layer_of(n, 17).attn.out), "blocks.17.attn_out", "transposed_weight"),
    Fault(
        "q transposed", lambda n: transpose(layer_of(n, 25).attn.qkv, 0, 576), "blocks.25.attn.q", "transposed_weight"
    ),
    Fault("epsilon", lambda n: reconfigure(n, norm_eps=1e-6), "blocks.0.ln1.scale", "norm_eps"),
    Fault("epsilon of a norm", lambda n: set_rule(layer_of(n, 0).ln2, eps=3e-5), "blocks.0.ln2.scale", "norm_eps"),
    Fault("offset", lambda n: set_rule(layer_of(n, 12).ln1, offset=True), "blocks.12.attn.q", "norm_offset"),
    Fault("last offset", lambda n: set_rule(n.ln_final, offset=True), "logits", "norm_offset"),
    Fault("theta", lambda n: reconfigure(n, rope_theta=10_000.0), "blocks.0.attn.rot_q", "rotary_theta"),
    Fault("unusual theta", lambda n: reconfigure(n, rope_theta=314_159.0), "blocks.0.attn.rot_q", "rotary_theta"),
    Fault("positions from 1", lambda n: shift_positions(n, 1), "blocks.0.attn.rot_q", "shifted_positions"),
    Fault("gate", lambda n: exchange_gate(layer_of(n, 9).mlp.up), "blocks.9.mlp.pre", "exchanged_gate"),
    Fault("mask", see_the_future, "blocks.0.attn.attn_scores", "missing_mask"),
]


@pytest.mark.slow
def test_planted_faults_in_exports_of_smollm2_are_named_and_explained() -> None:
    """The exports have the stages and names of TransformerLens. At least 18 of 20 must be right."""
    network, ids = smollm2_network()
    exported = in_transformer_lens_names(record(network, ids), network.config)
    names = match_stages(StageTensors("", exported, ids), network.config, ids).stages
    reference = compute_reference(InMemory(network), ids, names, torch.float32)
    wrong = []
    for fault in SMOLLM2:
        export = in_transformer_lens_names(record(plant(network, fault), ids), network.config)
        given = match_stages(StageTensors(fault.name, export, ids), network.config, ids)
        found = compare_with(reference, given, Options())
        result = (found.first and found.first.name, [hint.code for hint in found.hints][:1])
        if result != (fault.stage, [fault.code]):
            wrong.append((fault.name, result))
    assert len(SMOLLM2) == 20
    assert len(wrong) <= 2, wrong


def sdpa_export(
    network: Transformer, ids: Sequence[int], attention: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The hidden states and logits of transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=dtype, attn_implementation=attention)
    with torch.inference_mode():
        output = reference(torch.tensor([list(ids)]), output_hidden_states=True)
    states = {f"hidden_states.{layer}": state for layer, state in enumerate(output.hidden_states)}
    return states | {"logits": output.logits}


Export = Callable[[Transformer, Sequence[int]], dict[str, torch.Tensor]]
FAITHFUL: dict[str, Export] = {
    "float32": lambda n, ids: record(n, ids),
    "float32, names of TransformerLens": lambda n, ids: in_transformer_lens_names(record(n, ids), n.config),
    "float32, hidden states": lambda n, ids: as_hidden_states(record(n, ids), n.config),
    "chunked sums": lambda n, ids: record(chunked(n), ids),
    "float64": lambda n, ids: record(InMemory(n).network(torch.float64), ids),
    "bfloat16": lambda n, ids: record(InMemory(n).network(torch.bfloat16), ids),
    "bfloat16, saved as float32": lambda n, ids: {
        name: tensor.float() for name, tensor in record(InMemory(n).network(torch.bfloat16), ids).items()
    },
    "transformers, eager": lambda n, ids: sdpa_export(n, ids, "eager", torch.float32),
    "transformers, sdpa": lambda n, ids: sdpa_export(n, ids, "sdpa", torch.float32),
    "transformers, bfloat16": lambda n, ids: sdpa_export(n, ids, "sdpa", torch.bfloat16),
}


@pytest.mark.slow
def test_faithful_exports_of_smollm2_do_not_differ() -> None:
    network, ids = smollm2_network()
    model = InMemory(network)
    for name, export in FAITHFUL.items():
        given = match_stages(StageTensors(name, export(network, ids), ids), network.config, ids)
        found = compare(model, given, ids)
        assert found.first is None, (name, found.first)
    assert len(FAITHFUL) == 10


def test_the_order_of_joined_heads_is_found_from_a_part_of_a_wide_output() -> None:
    num_heads, num_tokens, width = 4, 8, 64
    weight = torch.randn(width, width, dtype=torch.float64)
    z = torch.randn(1, num_tokens, num_heads, width // num_heads)
    order = [2, 0, 3, 1]
    out = z[:, :, order].flatten(2).double() @ weight.T
    network: Any = SimpleNamespace(
        config=SimpleNamespace(norm_placement="pre", residual_scale=1.0, d_model=width),
        get_submodule=lambda name: SimpleNamespace(weight=weight, bias=None),
    )
    stage: Any = SimpleNamespace(name="blocks.0.attn_out")
    ((hint, joined),) = joined_heads(network, stage, {"blocks.0.attn.z": z, stage.name: out})
    assert "in the order 2, 0, 3, 1" in hint.message
    assert torch.allclose(joined, out)
