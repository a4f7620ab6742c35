"""A file that only seems to be there is named: a pointer of Git LFS, or a link whose target is gone.

Such a file must not count as missing: without a generation_config.json, for example, answers would not end.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoints.load import load_checkpoint
from model.errors import CheckpointError

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
FILES = (
    "config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture
def directory(copy_of: Callable[[str], Path]) -> Path:
    directory = copy_of("tied")
    shutil.copy(Path("model/bundled/tokenizer.json"), directory)
    load_checkpoint(str(directory))
    return directory


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("../../blobs/0123456789abcdef")
    with pytest.raises(CheckpointError, match=rf"{name}: is a link to a file that does not exist; download it again"):
        load_checkpoint(str(directory))


@pytest.mark.parametrize("name", [*FILES, "model.gguf"])
def test_a_pointer_of_git_lfs_is_named_with_the_command_that_gets_the_file(directory: Path, name: str) -> None:
    path = directory / name
    path.write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: is only a pointer of Git LFS.*run `git lfs pull`"):
        load_checkpoint(str(path if name == "model.gguf" else directory))
