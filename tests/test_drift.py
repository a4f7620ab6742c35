"""What the drift report measures, and that it finds where an error comes from."""

import subprocess
import sys

import pytest
import torch

from model.drift import stage_errors, write_texts
from model.quantization import quantize_linears
from model.transformer import Transformer
from tests.tiny import CONFIGS

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def network(dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(CONFIGS["llama"])
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return model.to(dtype).requires_grad_(False)


def test_a_network_does_not_drift_from_itself() -> None:
    errors = stage_errors(network(), network(), IDS)
    assert errors[0].name == "embed"
    assert errors[-1].name == "loss"
    assert all(error.error == 0 and not error.is_growth for error in errors)


def test_the_first_stage_that_is_off_is_named() -> None:
    broken = network()
    broken.blocks[1].attn.out.weight.data *= 1.01
    errors = {error.name: error for error in stage_errors(network(), broken, IDS)}
    assert [name for name, error in errors.items() if error.is_growth] == ["blocks.1.attn_out"]
    assert errors["blocks.1.attn_out"].error == pytest.approx(0.01, rel=1e-3)
    assert errors["blocks.1.attn.z"].error == 0
    assert errors["logits"].error > 0


def test_a_nan_is_growth() -> None:
    broken = network()
    broken.blocks[0].mlp.down.weight.data[:] = torch.nan
    grown = [error for error in stage_errors(network(), broken, IDS) if error.is_growth]
    assert [error.name for error in grown] == ["blocks.0.mlp_out"]


def test_the_rounding_of_the_dtype_is_no_growth_but_that_of_the_weights_is() -> None:
    rounded, quantized = network(torch.bfloat16), network()
    reference = rounded.float()
    assert not any(error.is_growth for error in stage_errors(reference, reference, IDS))
    quantize_linears(quantized, "int8")
    grown = [error for error in stage_errors(network(), quantized, IDS) if error.is_growth]
    assert [error.name for error in grown] == ["blocks.0.attn.q"]


def test_its_own_texts_are_the_same_each_time_and_fill_the_context() -> None:
    from model.checkpoint import load_checkpoint
    from service.app import BUNDLED

    checkpoint = load_checkpoint(str(BUNDLED), dtype="float32")
    texts = write_texts(checkpoint, 2)
    assert texts == write_texts(checkpoint, 2)
    assert [len(text) for text in texts] == [checkpoint.model.config.max_positions] * 2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "model.drift", *arguments], capture_output=True, text=True)


def test_the_command_prints_stages_perplexity_and_speed() -> None:
    made = run("--quantize", "int8")
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert sum("<- grows here" in line for line in lines) == 1
    assert lines[1].split() == ["embed", "0.00e+00"]
    assert [line.split(" ")[0] for line in lines[-3:]] == ["perplexity", "one", "one"]


def test_what_cannot_be_read_ends_in_one_line() -> None:
    made = run("no-such-text.txt")
    assert made.returncode == 1
    assert made.stderr.count("\n") == 1
    assert "no-such-text.txt" in made.stderr
