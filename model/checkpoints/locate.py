"""Find the files of a checkpoint: a directory, one safetensors or GGUF file, or a hub id that is downloaded first."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from model.checkpoints.gguf_files.parts import SUFFIX as GGUF_SUFFIX
from model.checkpoints.gguf_files.parts import find_gguf
from model.checkpoints.safetensors_directory import PICKLE_HINT, PICKLE_SUFFIXES, SUFFIX
from model.errors import CheckpointError, join_names, printable_name

RESERVED = ("bundled", "none")  # names that commands take in place of a checkpoint


@dataclass(frozen=True)
class Location:
    """Where a checkpoint lies. `weights` is a file of `directory`, or the directory itself."""

    directory: Path
    weights: Path
    is_local: bool

    @property
    def name(self) -> str:
        """The name of a local checkpoint: that of the file if the weights are one file, else of the directory."""
        return self.directory.resolve().name if self.weights == self.directory else self.weights.stem


def locate(source: str, revision: str | None = None) -> Location:
    """Find a checkpoint. A hub id is downloaded into the local cache, at `revision`: a branch, a tag or a commit.

    Raises `CheckpointError` if there is none, with the names that are similar to a mistyped one.
    """
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} needs a hub id, but {source} is a local path")
        if path.is_dir():
            return Location(path, _weights_of(path), is_local=True)
        return Location(path.parent, _weights_file(path), is_local=True)
    if (
        source.startswith(("/", ".", "~"))
        or source.count("/") > 1
        or path.suffix in (*PICKLE_SUFFIXES, SUFFIX, GGUF_SUFFIX)
    ):
        raise CheckpointError(
            f"{source}: no such file or directory{_similar_names(path)}; use a directory with a config.json, "
            "a *.safetensors or *.gguf file, or a hub id such as org/name"
        )
    similar = difflib.get_close_matches(source.lower(), RESERVED, n=1, cutoff=0.7)
    if similar:
        raise CheckpointError(f"{source}: no such directory; did you mean {similar[0]}?")
    from model.checkpoints.download import download  # the library of the hub is slow to import

    try:
        found = download(source, revision)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_similar_names(path)}") from error
    directory = found if found.is_dir() else found.parent
    return Location(directory, found if found != directory else _weights_of(directory), is_local=False)


def _weights_of(directory: Path) -> Path:
    """The GGUF file of a directory without a config.json, if there is one; otherwise the directory."""
    return directory if (directory / "config.json").exists() else find_gguf(directory) or directory


def _weights_file(path: Path) -> Path:
    """The file itself if it can be read. Raises `CheckpointError` that says what it is, and what to do."""
    if path.suffix in (SUFFIX, GGUF_SUFFIX):
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: {PICKLE_HINT}")
    raise CheckpointError(
        f"{path}: not a checkpoint; use a directory with a config.json, or a *.safetensors or *.gguf file"
    )


def _similar_names(path: Path) -> str:
    """The names beside a path that does not exist, if any are similar to its own: "; did you mean ...?"."""
    try:
        names = [sibling.name for sibling in path.parent.iterdir()]
    except OSError:
        return ""
    similar = [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]
    return f"; did you mean {join_names(map(printable_name, similar))}?" if similar else ""
