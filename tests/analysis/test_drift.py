"""The drift report measures errors right, and finds the stage where an error begins."""

import subprocess
import sys

import pytest
import torch

from model.analysis.drift import stage_errors
from model.analysis.generated_texts import generate_texts
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
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
    assert all(error.error == 0 and not error.is_first_growth for error in errors)


def test_the_first_stage_with_an_error_is_marked() -> None:
    broken = network()
    broken.get_parameter("blocks.1.attn.out.weight").data *= 1.01
    errors = {error.name: error for error in stage_errors(network(), broken, IDS)}
    assert [name for name, error in errors.items() if error.is_first_growth] == ["blocks.1.attn_out"]
    assert errors["blocks.1.attn_out"].error == pytest.approx(0.01, rel=1e-3)
    assert errors["blocks.1.attn.z"].error == 0
    assert errors["logits"].error > 0


def test_a_stage_with_nan_is_marked_as_growth() -> None:
    broken = network()
    broken.get_parameter("blocks.0.mlp.down.weight").data[:] = torch.nan
    grown = [error for error in stage_errors(network(), broken, IDS) if error.is_first_growth]
    assert [error.name for error in grown] == ["blocks.0.mlp_out"]


def test_quantized_weights_make_the_error_grow_and_equal_weights_do_not() -> None:
    rounded, plain = network(torch.bfloat16), network()
    quantized = prepare_model(plain.config, plain.state_dict(), quantize="int8", kernels="torch")
    reference = rounded.float()
    assert not any(error.is_first_growth for error in stage_errors(reference, reference, IDS))
    grown = [error for error in stage_errors(network(), quantized, IDS) if error.is_first_growth]
    assert [error.name for error in grown] == ["blocks.0.attn.q"]


@pytest.mark.slow
def test_generated_texts_are_the_same_each_time_and_fill_the_context() -> None:
    from model.checkpoints.load import BUNDLED, load_checkpoint

    checkpoint = load_checkpoint(str(BUNDLED), dtype="float32")
    texts = generate_texts(checkpoint, 2)
    assert texts == generate_texts(checkpoint, 2)
    assert [len(text) for text in texts] == [checkpoint.model.config.max_positions] * 2


def test_generated_texts_begin_with_tokens_of_the_whole_vocabulary() -> None:
    from model.checkpoints.load import BUNDLED, load_checkpoint

    checkpoint = load_checkpoint(str(BUNDLED), dtype="float32")
    first_tokens = sorted(text[0] for text in generate_texts(checkpoint, 20, 2))
    parts = [token * 5 // checkpoint.model.config.vocab_size for token in first_tokens]
    assert all(parts.count(part) >= 2 for part in range(5))


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "model.analysis.drift", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_prints_stages_perplexity_and_speed() -> None:
    result = run_command("--quantize", "int8")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("<- grows here" in line for line in lines) == 1
    assert lines[1].split() == ["embed", "0.00e+00"]
    assert [line.split(" ")[0] for line in lines[-3:]] == ["perplexity", "one", "one"]


@pytest.mark.slow
def test_a_text_that_cannot_be_read_ends_the_command_with_one_line_that_names_it() -> None:
    result = run_command("no-such-text.txt")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no-such-text.txt" in result.stderr
