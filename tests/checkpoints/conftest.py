"""Fixtures: small valid checkpoints, and copies of them to edit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.files import SIZES
from tests.tiny import write_reference


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of one checkpoint of each kind, written by transformers. Tests must not change them."""
    transformers = pytest.importorskip("transformers")
    configs = {
        "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "untied": transformers.LlamaConfig(**SIZES),
        "gpt2": transformers.GPT2Config(
            vocab_size=71, n_embd=16, n_layer=2, n_head=2, n_positions=40, bos_token_id=1, eos_token_id=2
        ),
    }
    directories = {name: tmp_path_factory.mktemp(name) for name in configs}
    for name, config in configs.items():
        write_reference(config, directories[name])
    return directories


@pytest.fixture
def copy_of(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies a checkpoint to a directory that the test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return copy
