"""Edit the files of small checkpoints, and check that a checkpoint is refused."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from model.checkpoints.load import load_checkpoint

Tensors = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 71,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}


def hub_files(*names: str) -> Any:
    """The answer of the hub for a repository with these files."""
    return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def make_room(directory: Path, name: str) -> None:
    """Remove a file that the test writes anew. An index is read only if there is no model.safetensors."""
    (directory / name).unlink(missing_ok=True)
    if name == "model.safetensors.index.json":
        (directory / "model.safetensors").rename(directory / "weights.safetensors")


def write_tokenizer(directory: Path, num_entries: int) -> None:
    """Write a `tokenizer.json` whose vocabulary is `num_entries` words."""
    vocabulary = {f"word{index}": index for index in range(num_entries)}
    Backend(WordLevel(vocabulary, unk_token="word0")).save(str(directory / "tokenizer.json"))


class TooSlow(BaseException):
    """Not an `Exception`, so that the code under test does not catch it."""


@contextmanager
def time_limit(seconds: float = 3) -> Iterator[None]:
    """Raise `TooSlow` if the body takes longer. A refusal takes much less time, but the machine may be busy."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refusal_message(directory: Path) -> str:
    """Load a checkpoint that must be refused quickly, with a short message of one line. Returns the message."""
    with time_limit(), pytest.raises(ValueError, match=r".") as error:
        load_checkpoint(str(directory))
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 1500
    return message
