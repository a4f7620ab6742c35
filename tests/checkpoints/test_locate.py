"""A checkpoint is found by directory, file or hub id, and a mistyped one is an error that names similar ones."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from model.checkpoints.download import LoggedBar, gguf_files
from model.checkpoints.load import load_checkpoint
from model.checkpoints.locate import locate
from model.errors import CheckpointError
from tests.tiny import random_ids


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
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=rf"^{typed}: no such directory; did you mean {meant}\?$"):
        locate(typed)


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
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"hub failed: no network; did you mean runs/latest\?$"):
        locate("runs/lastest")


def test_a_revision_is_passed_to_the_hub_and_refused_for_a_local_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, revision: [f"{revision}.safetensors"])
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options, name=name) or str(tmp_path)
    )
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

        def list_repo_files(*_: Any, **__: Any) -> list[str]:
            if request.param == "offline":
                raise OfflineModeIsEnabled
            return list(self.FILES)

        for file in self.FILES:
            (tmp_path / file).write_bytes(b"")
        monkeypatch.setattr("huggingface_hub.list_repo_files", list_repo_files)
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
