"""The choice of formats for layers within a budget of accuracy, and the report that is kept."""

import errno
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from model.analysis import auto_quantization, format_choice
from model.analysis.auto_quantization import choose, resolve, table
from model.analysis.format_choice import (
    LayerLosses,
    LossMeter,
    bits_per_weight,
    choose_formats,
    sum_of_losses,
    within_budget,
)
from model.analysis.generated_texts import generate_texts
from model.analysis.quantization.calibration import CALIBRATED, calibrate
from model.checkpoints.load import load_checkpoint
from model.choices import parse_increase
from model.errors import CheckpointError
from model.network.transformer import Transformer
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.quantization import INT8, QuantizedLinear
from model.ops.weight_formats import PackedGroups
from tests.ops.cpu.common import by_kernels
from tests.parity.reference import BASES, config_of
from tests.tiny import CONFIGS, build, random_ids, write_reference

INT6, INT5, INT4 = CALIBRATED
SHAPE = (10, 320)


def layer_losses(name: str, int8: float, int6: float, int5: float, int4: float) -> LayerLosses:
    return LayerLosses(name, SHAPE, {"q8_0": int8, "int6": int6, "int5": int5, "int4": int4})


LAYERS = [
    layer_losses("robust", 0.001, 0.2, 0.1, 0.002),
    layer_losses("sensitive", 0.001, 0.2, 0.05, 0.5),
    layer_losses("odd", 0.4, 0.4, 0.4, 0.4),
]


def test_layers_that_lose_least_get_the_fewest_bits() -> None:
    assert within_budget(LAYERS, 0.0009) == {}
    assert within_budget(LAYERS, 0.01) == {"robust": INT4, "sensitive": INT8}
    assert within_budget(LAYERS, 0.1) == {"robust": INT4, "sensitive": INT5}
    assert within_budget(LAYERS, 0.46) == {"robust": INT4, "sensitive": INT5, "odd": INT4}
    assert within_budget(LAYERS, 1.0) == {"robust": INT4, "sensitive": INT4, "odd": INT4}


def test_a_format_whose_loss_is_not_a_number_is_never_chosen() -> None:
    lossless = layer_losses("lossless", 0.0, 0.0, 0.0, 0.0)
    broken = layer_losses("broken", 0.001, math.inf, math.inf, math.inf)
    assert within_budget([broken, lossless], 100.0) == {"lossless": INT4, "broken": INT8}


@pytest.mark.parametrize("budget", [0.0, 0.001, 0.0015, 0.002, 0.003, 0.4, 0.403, 0.9, 5.0])
def test_the_sum_of_the_losses_stays_within_the_budget(budget: float) -> None:
    assert sum_of_losses(LAYERS, within_budget(LAYERS, budget)) <= budget + 1e-12


def test_bits_per_weight_include_the_scales() -> None:
    assert bits_per_weight(LAYERS, {}) == 16
    assert bits_per_weight(LAYERS, {"robust": INT4, "sensitive": INT8}) == pytest.approx((4.6 + 8.5 + 16) / 3)


def meter(network: str = "llama") -> tuple[Transformer, LossMeter]:
    model = by_kernels(build(CONFIGS[network]))
    ids = random_ids(model.config.vocab_size, 36).view(3, 12)
    return model, LossMeter(model, ids[1:], calibrate(model, ids[:1], lambda name: CALIBRATED))


def test_measuring_a_layer_leaves_the_network_as_it_is() -> None:
    model, losses = meter()
    ids = random_ids(model.config.vocab_size, 9)
    before = model(ids)
    assert losses.loss({}) == 0
    assert losses.loss({"blocks.0.attn.qkv": INT4}) > losses.loss({"blocks.0.attn.qkv": INT8}) > 0
    assert torch.equal(model(ids), before)


def test_a_layer_that_predicts_nan_has_an_infinite_loss_and_an_unquantized_network_that_does_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, losses = meter()

    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_full((*x.shape[:-1], model.config.vocab_size), torch.nan)

    monkeypatch.setattr(losses, "quantized", lambda name, format: Broken())
    assert losses.loss({"head": INT4}) == math.inf
    assert model.ln_final is not None
    model.ln_final.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        LossMeter(model, random_ids(model.config.vocab_size, 24).view(2, 12), {})


def test_routers_of_experts_keep_their_weights() -> None:
    _, losses = meter("mixtral")
    assert losses.layers
    assert not [name for name in losses.layers if name.endswith(".router")]


def test_the_measured_loss_of_a_choice_is_within_its_budget() -> None:
    _, losses = meter()
    sizes = []
    for max_loss in (1e-9, 1e-5, 1e-3, 10.0):
        choice = choose_formats(losses, max_loss)
        assert choice.loss <= max_loss
        assert choice.loss == losses.loss(choice.by_layer())
        sizes.append(choice.bits_per_weight)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert set(choice.formats.values()) == {INT4.name}


def test_a_choice_that_loses_slightly_too_much_is_replaced_by_one_with_more_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, losses = meter()
    monkeypatch.setattr(format_choice, "measure_layers", lambda meter: LAYERS)
    monkeypatch.setattr(losses, "loss", lambda formats: 1.0001 * sum_of_losses(LAYERS, formats))
    choice = choose_formats(losses, 0.052)
    assert choice.by_layer() == {"robust": INT4, "sensitive": INT8}


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    write_reference(config_of("llama", BASES["llama"]), directory)
    return str(directory)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(auto_quantization, "prepare_cache", lambda: tmp_path)
    monkeypatch.setattr(auto_quantization, "NUM_TEXTS", 2)
    monkeypatch.setattr(auto_quantization, "NUM_TOKENS", 12)
    return tmp_path


def test_a_choice_is_measured_once_and_its_report_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: str
) -> None:
    first = choose(tiny_checkpoint, 0.01)
    (path,) = cache.glob("quantization-*.json")
    assert json.loads(path.read_text())["formats"] == first.formats
    with monkeypatch.context() as patch:
        patch.setattr(auto_quantization, "choose_formats", None)  # measuring again would fail
        assert choose(tiny_checkpoint, 0.01) == first
        with pytest.raises(TypeError):
            choose(tiny_checkpoint, 0.02)
    for damaged in ("{}", "7", '{"layers": []}', json.dumps(json.loads(path.read_text()) | {"loss": "much"})):
        path.write_text(damaged)
        assert choose(tiny_checkpoint, 0.01) == first, damaged
    assert all(layer.name in table(first) for layer in first.layers)


def test_a_changed_config_is_measured_again(cache: Path, tiny_checkpoint: str, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("changed")
    for file in Path(tiny_checkpoint).iterdir():
        shutil.copy2(file, directory)
    choose(str(directory), 0.01)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    choose(str(directory), 0.01)
    assert len(list(cache.glob("quantization-*.json"))) == 2


def test_a_report_that_cannot_be_written_is_a_warning(
    cache: Path, tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    assert choose(tiny_checkpoint, 0.01).layers
    assert "the next start measures the layers again" in caplog.text
    assert not list(cache.glob("quantization-*"))


def test_without_a_cache_folder_the_log_says_that_every_start_measures(
    cache: Path, tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(auto_quantization, "prepare_cache", lambda: None)
    assert choose(tiny_checkpoint, 0.01).layers
    assert "every start repeats this" in caplog.text
    assert "kept" not in caplog.text


def test_a_checkpoint_whose_logits_are_not_numbers_cannot_be_measured(tiny_checkpoint: str) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    assert checkpoint.model.ln_final is not None
    checkpoint.model.ln_final.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="cannot generate texts"):
        generate_texts(checkpoint, 2, 12)


def test_a_budget_is_checked_and_refused_without_auto() -> None:
    for wrong in (0, -1, 5):
        with pytest.raises(ValueError, match=r"write for example 0\.5%"):
            resolve("unused", "auto", wrong, "auto")
    with pytest.raises(ValueError, match="quantize_loss: is only for quantize=auto, but quantize is int8"):
        resolve("unused", "int8", 0.01, "auto")
    assert resolve("unused", "int8", None, "auto") == "int8"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_network_is_loaded_in_the_chosen_formats(cache: Path, kernels: str, tiny_checkpoint: str) -> None:
    formats = resolve(tiny_checkpoint, "auto", 0.01, kernels)  # type: ignore[arg-type]
    checkpoint = load_checkpoint(tiny_checkpoint, quantize=formats, kernels=kernels)  # type: ignore[arg-type]
    assert not isinstance(formats, str)
    assert formats
    quantized = {
        name: layer.parts[0].format if isinstance(layer, GroupedLinear) else layer.weight_groups.format
        for name, layer in checkpoint.model.named_modules()
        if isinstance(layer, GroupedLinear | QuantizedLinear)
    }
    assert quantized == {
        name: chosen.format if isinstance(chosen, PackedGroups) else chosen for name, chosen in formats.items()
    }


def test_increases_are_read_as_percentages_or_shares() -> None:
    assert parse_increase("0.5%") == parse_increase("0.005") == parse_increase(0.005) == 0.005
    for wrong in ("", "half", "0", "-1%", "nan", "101%", "1.5"):
        with pytest.raises(ValueError, match=r"write for example 0\.5%"):
            parse_increase(wrong)
    assert math.isclose(parse_increase("100%"), 1)
