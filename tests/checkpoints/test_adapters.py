"""An adapter either loads as it was meant, or is refused with one line that names the problem."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.adapter_config import MAX_RANK, read_adapter_config
from model.checkpoints.adapters import load_adapter
from model.checkpoints.load import Checkpoint, load_checkpoint
from tests.checkpoints.adapter_files import write_adapter
from tests.checkpoints.files import time_limit

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def base(originals: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(str(originals["untied"]))


@pytest.fixture
def adapter(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A valid adapter, which the test may change."""
    return write_adapter(tmp_path / "adapter", originals["untied"])


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace tensors; None removes one."""
    path = directory / "adapter_model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors.update(changes)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def refusal(base: Checkpoint, directory: Path) -> str:
    """Load an adapter that must be refused quickly, with a short message of one line. Returns the message."""
    with time_limit(), pytest.raises(ValueError, match=r".") as error:
        load_adapter(base, directory)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 1500
    return message


def test_the_adapter_says_what_it_changes_and_how_much_memory_it_takes(base: Checkpoint, adapter: Path) -> None:
    loaded = load_adapter(base, adapter)
    assert (loaded.name, loaded.ranks) == ("adapter", [2])
    places = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert set(loaded.layers) == {f"blocks.{layer}.{place}" for layer in range(2) for place in places}
    # With ranks padded to 8 for q, k and v, and to 4 for the others: inputs and outputs of 16, and 24 in between.
    assert loaded.num_bytes == 2 * 4 * (8 * (16 + 32) + 4 * (16 + 16) + 4 * (16 + 48) + 4 * (24 + 16))
    assert load_adapter(base, adapter, "other").name == "other"


def test_matrices_in_other_dtypes_are_converted(base: Checkpoint, adapter: Path) -> None:
    stored = load_file(adapter / "adapter_model.safetensors")
    edit_tensors(adapter, {name: tensor.bfloat16() for name, tensor in stored.items()})
    layer = load_adapter(base, adapter).layers["blocks.0.attn.out"]
    assert layer(torch.ones(1, 1, 16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not implemented; only LORA is"),
        ({"peft_type": None}, "peft_type None is not implemented"),
        ({"use_dora": True}, "use_dora True is not implemented"),
        ({"bias": "all"}, "bias 'all' is not implemented"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not implemented"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not implemented"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not implemented"),
        ({"use_future_method": True}, "keys that are not known: use_future_method"),
        ({"r": 0}, f"r 0 must be a rank from 1 to {MAX_RANK}"),
        ({"r": MAX_RANK + 1}, "must be a rank"),
        ({"r": True}, "r True must be a rank"),
        ({"lora_alpha": "8"}, "lora_alpha '8' must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha an integer of 1329 bits must be a number"),
        ({"use_rslora": 1}, "use_rslora 1 must be true or false"),
        ({"target_modules": None}, "target_modules is missing or empty"),
        ({"target_modules": {}}, "target_modules {} is not a list"),
        ({"target_modules": ["q_proj", 3]}, "target_modules .* is not a list of at most"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform .* is neither a layer nor a list"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern .* is not an object"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.q_proj 1.5 must be a rank"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj None must be a number"),
        ({"rank_pattern": {"(a+)+$": 2}}, r"rank_pattern: '\(a\+\)\+\$' is not implemented: a pattern may have"),
        ({"rank_pattern": {"a*a*a*b": 2}}, "is not implemented: a pattern may have"),
        ({"rank_pattern": {"[": 2}}, "is not a regular expression"),
    ],
)
def test_a_config_that_is_not_implemented_is_named(
    base: Checkpoint, adapter: Path, changes: dict[str, Any], reason: str
) -> None:
    edit_config(adapter, **changes)
    assert re.search(reason, refusal(base, adapter))


def test_a_pattern_takes_little_time(base: Checkpoint, adapter: Path) -> None:
    edit_config(adapter, rank_pattern={f"[a-z._]*[a-z.]*{index}x": 1 for index in range(200)})
    with time_limit():
        read_adapter_config(adapter / "adapter_config.json").rank_of("model.layers.1.self_attn.q_proj" * 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({Q + "lora_B.weight": None}, "lacks .*layers.0.self_attn.q_proj.lora_B.weight$"),
        (
            {Q + "lora_A.weight": None, Q + "lora_B.weight": None},
            "lacks .*q_proj.lora_A.weight, .*q_proj.lora_B.weight$",
        ),
        ({Q + "lora_A.weight": torch.zeros(3, 16)}, r"has the shape \(3, 16\), .* ask for \(2, 16\)$"),
        ({Q + "lora_B.weight": torch.zeros(8, 2)}, r"has the shape \(8, 2\), .* ask for \(16, 2\)$"),
        ({Q + "lora_A.weight": torch.zeros(2, 16).long()}, "is I64, which is not implemented; known: float32"),
        ({Q + "lora_magnitude_vector": torch.zeros(2)}, "not implemented: .*q_proj.lora_magnitude_vector;"),
        ({"model.layers.2.self_attn.q_proj.lora_A.weight": torch.zeros(2)}, "not implemented: .*layers.2.self_attn"),
        ({"lm_head.weight": torch.zeros(2)}, "not implemented: base_model.model.lm_head.weight; .* not embeddings"),
        ({"lm_head.lora_A.weight": torch.zeros(2)}, "not implemented: base_model.model.lm_head.lora_A.weight;"),
        ({"model.embed_tokens.lora_embedding_A": torch.zeros(2)}, "not implemented: .*lora_embedding_A;"),
    ],
)
def test_missing_surplus_and_misshapen_tensors_are_named(
    base: Checkpoint, adapter: Path, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    edit_tensors(adapter, {PREFIX + name: tensor for name, tensor in changes.items()})
    assert re.search(reason, refusal(base, adapter))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(base: Checkpoint, adapter: Path, number: float) -> None:
    name = f"{PREFIX}{Q}lora_B.weight"
    matrix = load_file(adapter / "adapter_model.safetensors")[name]
    matrix[3, 1] = number
    edit_tensors(adapter, {name: matrix})
    assert re.search(
        r"has numbers that are not finite in torch.float32: .*q_proj.lora_B.weight", refusal(base, adapter)
    )


def test_names_without_the_prefix_of_peft_are_explained(base: Checkpoint, adapter: Path) -> None:
    stored = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}, adapter / "adapter_model.safetensors"
    )
    assert "their names lack base_model.model.; save the adapter with save_pretrained of PEFT" in refusal(base, adapter)


def test_an_adapter_without_tensors_is_refused(base: Checkpoint, adapter: Path) -> None:
    save_file({}, adapter / "adapter_model.safetensors")
    assert " lacks " in refusal(base, adapter)
    edit_config(adapter, target_modules=".*_proj")
    assert refusal(base, adapter) == "adapter_model.safetensors has no tensors"


def test_tensors_that_the_config_does_not_name_are_refused(base: Checkpoint, adapter: Path) -> None:
    edit_config(adapter, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])
    assert "has tensors that adapter_config.json does not name: " in refusal(base, adapter)
    edit_config(adapter, target_modules="all-linear", layers_to_transform=[0])
    assert "layers.1.self_attn.q_proj.lora_A.weight" in refusal(base, adapter)


def test_an_adapter_for_another_network_is_refused(base: Checkpoint, originals: dict[str, Path], adapter: Path) -> None:
    gpt2 = load_checkpoint(str(originals["gpt2"]))
    assert "not implemented: base_model.model.model.layers.0." in refusal(gpt2, adapter)


def test_pickles_are_refused(base: Checkpoint, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin: is a pickle" in refusal(base, adapter)


def test_missing_files_are_named(base: Checkpoint, adapter: Path) -> None:
    assert "no such directory" in refusal(base, adapter / "missing")
    (adapter / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(base, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json: file is missing" in refusal(base, adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_special_files_and_broken_files_are_refused(base: Checkpoint, adapter: Path, name: str) -> None:
    path = adapter / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert name in refusal(base, adapter)
    path.write_bytes(b"\xff" * 64)
    assert name in refusal(base, adapter)
    path.unlink()
    os.mkfifo(path)
    assert "is a named pipe, not a regular file" in refusal(base, adapter)
