"""The manifest of a harvest: its settings, its files with their checksums, and the place in the corpus to go on from.

Each file is complete before the manifest names it, and the manifest is replaced at once. So a process that is killed
loses only the file that it had not finished.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from model.analysis.harvest.contexts import Place
from model.analysis.harvest.documents import digest_of
from model.errors import InvalidField, short_repr
from model.files import read_json

logger = logging.getLogger(__name__)

NAME = "manifest.json"
UNFINISHED = "unfinished"  # a file that a killed process had not finished
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredFile:
    """A finished file of a harvest. `next` is the place in the corpus of the first token that is in no file."""

    name: str
    num_tokens: int
    num_bytes: int
    sha256: str
    next: Place


@dataclass
class Manifest:
    """The state of the harvest in a directory."""

    directory: Path
    settings: Mapping[str, Any]
    files: list[StoredFile] = field(default_factory=list)
    is_complete: bool = False

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read a manifest. Raises `InvalidField` if there is none, and `CheckpointError` if it cannot be read."""
        if not (directory / NAME).exists():
            raise InvalidField("directory", f"{directory} has no {NAME}; it is no harvest")
        content = read_json(directory / NAME, max_bytes=MAX_BYTES)
        files = [StoredFile(**each | {"next": Place(**each["next"])}) for each in content["files"]]
        return cls(directory, content["settings"], files, content["is_complete"])

    @classmethod
    def open(cls, directory: Path, settings: Mapping[str, Any]) -> "Manifest":
        """Begin a harvest in a new or empty directory, or go on with the one that was begun there.

        Raises `InvalidField` if the directory has other files, or a harvest with other settings.
        """
        settings = json.loads(json.dumps(settings))
        if not (directory / NAME).exists():
            directory.mkdir(parents=True, exist_ok=True)
            if any(each.name != UNFINISHED for each in directory.iterdir()):
                raise InvalidField("out", f"{directory} has other files; choose an empty or a new directory")
            return cls(directory, settings)
        found = cls.read(directory)
        for key in settings.keys() | found.settings.keys():
            old, new = found.settings.get(key), settings.get(key)
            if old != new:
                values = f"{short_repr(old)} there and {short_repr(new)} here"
                raise InvalidField("out", f"{directory} has another harvest: {key} is {values}; choose another one")
        found._drop_damaged()
        return found

    def _drop_damaged(self) -> None:
        for index, each in enumerate(self.files):
            path = self.directory / each.name
            if not path.exists() or path.stat().st_size != each.num_bytes or digest_of(path) != each.sha256:
                logger.warning("%s is missing or damaged: harvesting goes on from there", path)
                del self.files[index:]
                self.is_complete = False
                return

    @property
    def next(self) -> Place:
        """The place in the corpus to go on from."""
        return self.files[-1].next if self.files else Place()

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.files)

    def add(self, tensors: Mapping[str, Tensor], num_tokens: int, next: Place) -> None:
        """Write a file with the next tokens."""
        self.files.append(self._write(f"{len(self.files):05}.safetensors", tensors, num_tokens, next))
        self._save()

    def replace(self, tensors: Mapping[str, Tensor], num_tokens: int, next: Place) -> None:
        """Write a file with all tokens so far, which replaces the one before it."""
        old = self.files
        number = int(Path(old[0].name).stem) + 1 if old else 0
        self.files = [self._write(f"{number:05}.safetensors", tensors, num_tokens, next)]
        self._save()
        for each in old:
            (self.directory / each.name).unlink(missing_ok=True)

    def finish(self) -> None:
        self.is_complete = True
        self._save()

    def _write(self, name: str, tensors: Mapping[str, Tensor], num_tokens: int, next: Place) -> StoredFile:
        path, unfinished = self.directory / name, self.directory / UNFINISHED
        save_file(dict(tensors), unfinished)
        checksum = digest_of(unfinished)
        unfinished.replace(path)
        return StoredFile(name, num_tokens, path.stat().st_size, checksum, next)

    def _save(self) -> None:
        content = {
            "settings": self.settings,
            "num_tokens": self.num_tokens,
            "is_complete": self.is_complete,
            "files": [asdict(each) for each in self.files],
        }
        unfinished = self.directory / f"{NAME}.unfinished"
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.directory / NAME)
