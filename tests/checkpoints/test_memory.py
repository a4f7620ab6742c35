"""The memory that a checkpoint needs is compared with what there is before any of it is allocated."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from forwardscope import load
from model import control_groups, memory
from model.checkpoints.families import translate
from model.checkpoints.load import load_checkpoint, read_contents
from model.checkpoints.locate import BUNDLED, locate
from model.checkpoints.memory import Need, check_weights, require_memory, weight_bytes
from model.checkpoints.network_weights import NetworkWeights
from model.choices import Quantization
from model.errors import CheckpointError
from model.memory import Memory, memory_of
from service.loading import cache_bytes_for, load_drafting, load_model
from service.settings import Settings
from tests.conftest import shared
from tests.ops.cpu.common import cpu_backend
from tests.published_models import smollm2_gguf

GB = 10**9
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a machine with 1,000 kB, of which 600 kB are free and this process uses 100 kB."""
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    (tmp_path / "status").write_text("Name:\tpython\nRssAnon:\t 100 kB\nThreads:\t1\n")
    for module, name, file in (
        (memory, "MEMINFO", "meminfo"),
        (memory, "STATUS", "status"),
        (control_groups, "OWN_GROUPS", "cgroup"),
        (control_groups, "GROUPS", "groups"),
    ):
        monkeypatch.setattr(module, name, tmp_path / file)
    return tmp_path


def add_limit(files: Path, own: str, file: str, limit: str) -> None:
    (files / "cgroup").write_text(own)
    (files / "groups" / file).parent.mkdir(parents=True)
    (files / "groups" / file).write_text(f"{limit}\n")


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/\n", "memory.max"),
        ("0::/a/b\n", "a/b/memory.max"),
        ("0::/a/b\n", "a/memory.max"),
        ("0::/docker/x\n", "memory.max"),  # in a container
        ("9:cpu:/\n4:memory:/a\n0::/\n", "memory/a/memory.limit_in_bytes"),
        ("4:memory:/docker/x\n", "memory/memory.limit_in_bytes"),
    ],
)
def test_a_control_group_limits_the_memory(files: Path, own: str, file: str) -> None:
    add_limit(files, own, file, "512000")
    found = memory_of(CPU)
    assert found == Memory("the control group (container) of this process", 512000, 102400, 512000 - 102400)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_control_group_without_a_limit_leaves_the_machine(files: Path, limit: str) -> None:
    add_limit(files, "0::/\n", "memory.max", limit)
    assert memory_of(CPU) == Memory("this machine", 1024000, 102400, 614400)


def test_other_systems_have_no_limit_that_is_known(files: Path) -> None:
    (files / "meminfo").unlink()
    assert memory_of(CPU) is None
    require_memory([Need("the weights", 1 << 60)], CPU)


CONFIGS = {  # bfloat16 and int8 in GB, as docs/checkpoints.md has them
    "qwen2--Qwen2.5-1.5B-tf5.17-fs68870418900": (3.6, 2.1),
    "llama--SmolLM2-1.7B-Instruct-fs61558565367": (3.6, 2.0),
    "mistral--sophgo_LLM-TPU-Mistral-7B-Instruct-v0.2": (14.5, 7.8),
    "qwen3--Qwen--Qwen3-8B": (16.4, 9.3),
    "qwen3_moe--Qwen--Qwen3-30B-A3B": (61.1, 32.7),
    "mixtral--mistralai--Mixtral-8x7B-v0.1": (93.4, 49.7),
    "llama--meta-llama--Meta-Llama-3.1-70B": (141.1, 75.9),
}


class NoFile(NetworkWeights):
    """The weights of a config alone, whose file keeps no formats."""

    def __init__(self) -> None:
        pass

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        return None


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_of_published_models_need_what_the_documentation_says(name: str) -> None:
    _, config = translate(json.loads(shared(f"configs/{name}.json").read_text()))
    formats: tuple[Quantization, ...] = ("none", "int8")
    found = [weight_bytes(NoFile(), config, torch.bfloat16, format, packs=True) / GB for format in formats]
    assert [round(each, 1) for each in found] == list(CONFIGS[name])


@pytest.mark.parametrize(("quantize", "expected"), [("stored", 1.0), ("int8", 8.5 / 16), ("int4", 5 / 16)])
def test_the_bundled_network_needs_its_parameters_and_a_packed_head(quantize: Quantization, expected: float) -> None:
    contents = read_contents(locate("bundled"))
    weights = NetworkWeights(contents.tensors, contents.family, contents.model_config)
    num_table = contents.model_config.vocab_size * contents.model_config.d_model
    num_rest = load_checkpoint(str(BUNDLED)).parameters.total - num_table
    head = 8.5 / 16 if quantize == "int4" else expected
    found = weight_bytes(weights, contents.model_config, torch.bfloat16, quantize, packs=True)
    assert found == pytest.approx(2 * (num_table * (1 + head) + num_rest * expected), rel=0.002)
    unpacked = weight_bytes(weights, contents.model_config, torch.bfloat16, "none", packs=False)
    assert unpacked == 2 * (num_table + num_rest)


@pytest.mark.slow
def test_a_gguf_file_keeps_its_formats() -> None:
    contents = read_contents(locate(str(smollm2_gguf())))
    weights = NetworkWeights(contents.tensors, contents.family, contents.model_config)
    stored, whole = (
        weight_bytes(weights, contents.model_config, torch.bfloat16, "stored", packs=packs) for packs in (True, False)
    )
    assert whole == 2 * 134515008
    table = 2 * 49152 * 576  # in bfloat16, and once more as the head, in the format of the file
    assert table < stored < 0.6 * whole


def limit_memory(monkeypatch: pytest.MonkeyPatch, *, total: int, available: int | None = None, used: int = 0) -> None:
    free = total - used if available is None else available
    monkeypatch.setattr("model.checkpoints.memory.memory_of", lambda _: Memory("this machine", total, used, free))


def test_too_little_memory_is_one_line_with_the_numbers_and_the_settings_that_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_memory(monkeypatch, total=20_000_000, used=1_000_000)
    with pytest.raises(CheckpointError) as raised:
        load_model(Settings(model="bundled", cache_bytes=10_000_000))
    assert str(raised.value) == (
        "not enough memory: 12 MB for the weights and 10 MB for the key-value cache are needed, but this machine has "
        "20 MB, of which this process already uses 1 MB; smaller with --quantize int8 (8 MB), --quantize int4 (6 MB) "
        "or a lower --cache-bytes"
    )
    with pytest.raises(CheckpointError) as raised:
        load_model(Settings(model="bundled", cache_bytes=2 << 30))
    assert str(raised.value).endswith("; smaller with a lower --cache-bytes")
    limit_memory(monkeypatch, total=10_000_000)
    with pytest.raises(CheckpointError, match=r"12 MB for the weights are needed, .* with quantize='int8' \(8 MB\)"):
        load("bundled")


@pytest.mark.parametrize(
    ("settings", "total", "available", "warning"),
    [
        ({}, 100_000_000, None, None),
        ({}, 30_000_000, None, "may be needed, but this machine has 30 MB; smaller with --quantize int8"),
        ({}, 30_000_000, None, "25 MB for the copy for gradients"),
        ({}, 30_000_000, None, "or --gradients off"),
        ({"gradients": "off"}, 30_000_000, None, None),
        ({"gradients": "off"}, 30_000_000, 10_000_000, "but this machine has 30 MB, and only 10 MB are free"),
    ],
)
def test_memory_that_may_run_out_is_one_warning(
    settings: dict[str, Any],
    total: int,
    available: int | None,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit_memory(monkeypatch, total=total, available=available)
    load_model(Settings(model="bundled", cache_bytes=10_000_000, **settings))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_a_draft_network_needs_memory_beside_the_cache_and_the_copy_for_gradients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The served network is loaded already then, and is a part of the used memory."""
    cpu_backend(torch.float32)  # skips on machines without our kernels, where nothing is drafted
    settings = Settings(model="bundled", draft="bundled", cache_bytes=10_000_000)
    checkpoint = load_model(settings)
    assert checkpoint is not None
    limit_memory(monkeypatch, total=40_000_000, used=12_000_000)
    load_drafting(checkpoint, settings)
    assert "10 MB for the key-value cache and 25 MB for the copy for gradients may be needed" in caplog.text
    limit_memory(monkeypatch, total=25_000_000, used=12_000_000)
    with pytest.raises(CheckpointError, match="MB for the network that drafts and 10 MB for the key-value cache are"):
        load_drafting(checkpoint, settings)
    default = settings.model_copy(update={"cache_bytes": None, "max_num_seqs": 1})
    limit_memory(monkeypatch, total=40_000_000, used=12_000_000)
    sizes: list[int] = []
    monkeypatch.setattr("service.drafts.require_memory", lambda needs, device: sizes.append(needs[1].num_bytes))
    load_drafting(checkpoint, default)
    model = checkpoint.model
    assert sizes == [2 * cache_bytes_for(model.config, model.embed.weight.dtype, default)]


def test_without_other_needs_the_weights_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr("model.checkpoints.memory.require_memory", lambda needs, device: checked.append(needs))
    load_checkpoint("bundled", check_memory=check_weights)
    assert [need.name for (need,) in checked] == ["the weights"]
