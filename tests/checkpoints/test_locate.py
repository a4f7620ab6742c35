"""A checkpoint is found by directory, file or hub id, and a mistyped one is an error that names similar ones."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from model.checkpoints.download import LoggedBar, gguf_files
from model.checkpoints.load import load_checkpoint
from model.checkpoints.locate import BUNDLED, WORKED_EXAMPLES, locate
from model.errors import CheckpointError
from tests.checkpoints.files import hub_files
from tests.tiny import random_ids


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_one_safetensors_file_is_loaded_with_the_config_beside_it(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("tied")
    path = shutil.copy(directory / "model.safetensors", directory / "epoch-3.safetensors")
    checkpoint = load_checkpoint(str(path))
    ids = random_ids(71, 9)
    assert torch.equal(checkpoint.model(ids), load_checkpoint(str(directory)).model(ids))
    assert checkpoint.name == "epoch-3"
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: file is missing"):
        load_checkpoint(str(path))


def test_a_gguf_file_is_found_beside_a_config_without_safetensors(
    tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    """Many repositories of GGUF files have the config.json of the original model."""
    directory = copy_of("tied")
    (directory / "model.gguf").touch()
    assert locate(str(directory)).weights == directory
    (directory / "model.safetensors").unlink()
    assert locate(str(directory)).weights == directory / "model.gguf"


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_no_checkpoint_and_its_use_is_named(tmp_path: Path, has_config: bool) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", *(["config.json"] if has_config else [])):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"is a LoRA adapter, not .*, with --adapter NAME={tmp_path}$"):
        locate(str(tmp_path))


def test_an_adapter_beside_a_checkpoint_is_named_in_a_warning(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("tied")
    assert locate(str(directory)).weights == directory
    assert not caplog.messages
    (directory / "adapter_config.json").touch()
    assert locate(str(directory)).weights == directory
    assert f"--adapter NAME={directory} offers it" in caplog.text


def test_a_gguf_file_with_another_name_is_refused_with_the_name_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "sha256-0123").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match=r"sha256-0123: is a GGUF file; give a link to it .* ends in \.gguf$"):
        locate(str(tmp_path / "sha256-0123"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_refused_with_the_reason_and_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"{name}: is a pickle\. .* can run code.*save_pretrained"):
        locate(str(tmp_path / name))


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"config\.json: not a checkpoint; use a directory"):
        locate(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("typed", "meant"), [("bundeld", "bundled"), ("Bundled", "bundled"), ("nonne", "none")])
def test_a_mistyped_reserved_name_is_not_looked_for_on_the_hub(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=rf"^{typed}: no such directory; did you mean {meant}\?$"):
        locate(typed)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "a worked example, not a checkpoint; every server computes it") for name in WORKED_EXAMPLES),
        ("none", "stands for no checkpoint, which only a server takes; give a directory"),
        ("", "the name of the checkpoint is empty"),
        ("localhost:9999", "if you mean a server, its URL is http://localhost:9999"),
        ("https://huggingface.co/org/name/tree/main", "a URL is not loaded; give the hub id org/name"),
        ("hf.co/org/name", "a URL is not loaded; give the hub id org/name"),
        ("http://localhost:8000", "a URL is not loaded; give a directory"),
    ],
)
def test_a_name_that_cannot_be_a_hub_id_is_not_looked_for_on_the_hub(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError) as raised:
        locate(name)
    assert str(raised.value).startswith(f"{name}: ")
    assert reason in str(raised.value)
    assert "did you mean" not in str(raised.value)


def test_the_bundled_checkpoint_has_a_name_everywhere() -> None:
    assert locate("bundled").directory == BUNDLED
    assert locate("bundled").name == "bundled"
    with pytest.raises(CheckpointError, match="has no revisions"):
        locate("bundled", "main")


def test_the_name_of_a_directory_in_the_cache_of_the_hub_is_the_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--some-name" / "snapshots" / ("0123456789" * 4)
    for directory, name in ((snapshot, "org/some-name"), (snapshot.parent, "snapshots")):
        directory.mkdir(parents=True, exist_ok=True)
        assert locate(str(directory)).name == name


def test_a_path_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"^a{300}: cannot be read: File name too long$"):
        locate("a" * 300)
    monkeypatch.setattr(Path, "iterdir", failing(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: cannot be read: Permission denied$"):
        locate(str(tmp_path))


def test_a_mistyped_path_is_an_error_that_names_similar_paths(tmp_path: Path) -> None:
    for name in ("llama-3.2-1b", "gpt2"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"no such file or directory; did you mean {tmp_path}/llama-3\.2-1b\?"):
        locate(str(tmp_path / "lama-3.2-1b"))
    with pytest.raises(CheckpointError, match="no such file or directory; use a directory"):
        locate(str(tmp_path / "mistral"))
    with pytest.raises(CheckpointError, match="no such file or directory; use a directory"):
        locate(str(tmp_path / "absent" / "gpt2"))


def test_a_failed_download_names_a_similar_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", failing(OSError("no\nnetwork")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"reached \(OSError: no network\); give .*; did you mean runs/latest\?$"):
        locate("runs/lastest")


def test_a_revision_is_passed_to_the_hub_and_refused_for_a_local_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, revision, timeout: hub_files(f"{revision}.gguf"))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options, name=name) or str(tmp_path)
    )
    (tmp_path / "v2.gguf").touch()
    assert locate("org/name", "v2").directory == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/name", "v2")
    with pytest.raises(CheckpointError, match=r"revision 'v2' needs a hub id, but .* is a local path"):
        locate(str(tmp_path), "v2")


class TestGGUFModelsOnTheHub:
    FILES = ("README.md", "config.json", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")

    @pytest.fixture(params=["online", "offline"])
    def hub(self, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """A model with these files on the hub, or in the cache if there is no network."""
        asked: dict[str, Any] = {}

        def model_info(*_: Any, **__: Any) -> Any:
            if request.param == "offline":
                raise OfflineModeIsEnabled
            return hub_files(*self.FILES)

        for file in self.FILES:
            (tmp_path / file).write_bytes(b"")
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download", lambda _, **options: asked.update(options) or str(tmp_path)
        )
        return asked

    def test_several_models_are_an_error_that_lists_them(self, hub: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match=r"m-Q4_K_M\.gguf.*m-Q8_0-00001-of.*as in org/name:Q4_K_M"):
            locate("org/name")

    @pytest.mark.parametrize(("tag", "file"), [("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", "m-Q8_0-00001-of-00002.gguf")])
    def test_a_part_of_the_file_name_selects_one(self, hub: dict[str, Any], tag: str, file: str) -> None:
        assert locate(f"org/name:{tag}").weights.name == file

    def test_a_part_that_no_file_name_has_is_refused(self, hub: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match="has no GGUF file with Q3_K in its name"):
            locate("org/name:Q3_K")


@pytest.mark.parametrize("tag", ["", ":Q4"])
def test_only_the_chosen_weights_are_downloaded(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("config.json", "model.safetensors", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    for file in files:
        (tmp_path / file).write_bytes(b"")
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: hub_files(*files))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda _, **options: asked.update(options) or str(tmp_path)
    )
    locate(f"org/name{tag}")
    chosen = set(filter_repo_objects(files, allow_patterns=asked["allow_patterns"]))
    assert chosen == {"config.json", "m-Q4_K_M.gguf" if tag else "model.safetensors"}


def test_a_hub_model_with_safetensors_is_not_downloaded_as_gguf() -> None:
    assert gguf_files("org/name", ["model.safetensors", "a.gguf", "b.gguf"], "") == []
    assert gguf_files("org/name", ["model.safetensors", "a.gguf", "b.gguf", "mmproj-b.gguf"], "b") == ["b.gguf"]
    assert gguf_files("org/name", ["config.json", "a.gguf", "imatrix/b.gguf"], "") == ["a.gguf"]


def test_a_download_without_a_terminal_is_logged_every_few_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.checkpoints.download.LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO), LoggedBar(total=4e9, unit="B", name="hub") as bar:
        bar.update(1e9)
        bar.refresh()
    assert "downloading: 1.00 of 4.00 GB" in caplog.text
