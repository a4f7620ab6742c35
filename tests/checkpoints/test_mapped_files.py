"""Tensors are mapped, not copied: what a loaded network shares with its file, and what it does not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.load import load_checkpoint
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.errors import CheckpointError
from model.ops import stored_weights
from model.ops.stored_weights import StackedRows
from tests.checkpoints.files import edit_tensors
from tests.tiny import random_ids

CPU = torch.device("cpu")


def test_every_tensor_of_a_file_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),  # the data of the next tensors begins at odd offsets
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(300, 70),
        "half": torch.randn(5, 3).half(),
        "brain": torch.randn(5, 3).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        found = files.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)


def test_a_change_of_a_read_tensor_does_not_reach_the_file(copy_of: Callable[[str], Path]) -> None:
    files = SafetensorsFiles(copy_of("tied"))
    before = files.read("model.norm.weight").clone()
    files.read("model.norm.weight").zero_()
    assert torch.equal(files.read("model.norm.weight"), before)


def test_a_file_that_has_become_shorter_is_an_error_that_names_it(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("tied")
    files = SafetensorsFiles(directory)
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.norm\.weight cannot be read"):
        files.read("model.norm.weight")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_small_checkpoint_may_be_overwritten_while_its_network_is_in_use(
    copy_of: Callable[[str], Path], kernels: str
) -> None:
    directory = copy_of("untied")
    model = load_checkpoint(str(directory), kernels=kernels).model  # type: ignore[arg-type]
    ids = random_ids(71, 9)
    before = model(ids)
    content = (directory / "model.safetensors").read_bytes()
    with (directory / "model.safetensors").open("r+b") as file:  # in place: the file keeps its inode
        file.write(b"\0" * len(content))
    assert torch.equal(model(ids), before)


def test_only_a_large_tensor_that_needs_no_conversion_stays_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.randn(8, 4)
    monkeypatch.setattr(stored_weights, "MAPPED_BYTES", stored.nbytes)
    assert StackedRows((stored,), torch.float32, CPU).tensor() is stored
    assert StackedRows((stored[:7],), torch.float32, CPU).tensor().data_ptr() != stored.data_ptr()
    for parts, dtype in (((stored,), torch.bfloat16), ((stored, stored), torch.float32)):
        whole = StackedRows(parts, dtype, CPU).tensor()
        assert whole.data_ptr() != stored.data_ptr()
        assert torch.equal(whole, torch.cat(parts).to(dtype))


def test_a_network_whose_embedding_stays_in_the_file_computes_the_same(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(originals["tied"], tmp_path / "tied"))
    edit_tensors(
        directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    ids = random_ids(71, 9)
    expected = load_checkpoint(str(originals["tied"])).model(ids)
    monkeypatch.setattr(stored_weights, "MAPPED_BYTES", 1)
    assert torch.equal(load_checkpoint(str(directory)).model(ids), expected)
