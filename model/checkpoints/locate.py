"""Find the files of a checkpoint: a directory, one safetensors or GGUF file, or a hub id that is downloaded first."""

import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from model.checkpoints.gguf_files.header import MAGIC
from model.checkpoints.gguf_files.parts import SUFFIX as GGUF_SUFFIX
from model.checkpoints.gguf_files.parts import find_gguf
from model.checkpoints.safetensors_directory import PICKLE_HINT, PICKLE_SUFFIXES, SUFFIX
from model.errors import CheckpointError, join_names, printable_name
from model.files import is_present
from model.server_address import server_url

logger = logging.getLogger(__name__)

BUNDLED = Path(__file__).parents[1] / "bundled"
"""The directory of the checkpoint that is part of the package."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WORKED_EXAMPLES = ("ai-rocks", "a-tokens-journey", "i-like-transformers")  # served names that are no checkpoints
RESERVED = ("bundled", "none", *WORKED_EXAMPLES)
SNAPSHOT = re.compile(r"models--(.+)/snapshots/[0-9a-f]{40}")
HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*")


@dataclass(frozen=True)
class Location:
    """The location of a checkpoint. `weights` is a file of `directory`, or the directory itself."""

    directory: Path
    weights: Path
    is_local: bool

    @property
    def name(self) -> str:
        """The name of a local checkpoint: that of the file if the weights are one file, else of the directory.

        For a directory in the cache of the hub, whose own name is that of a commit, it is the hub id.
        """
        if self.weights != self.directory:
            return self.weights.stem
        directory = self.directory.resolve()
        snapshot = SNAPSHOT.fullmatch("/".join(directory.parts[-3:]))
        return snapshot[1].replace("--", "/") if snapshot else directory.name


def locate(source: str, revision: str | None = None) -> Location:
    """Find a checkpoint. A hub id is downloaded into the local cache, at `revision`: a branch, a tag or a commit.

    "bundled" is the checkpoint that is part of the package. Raises `CheckpointError` if there is no checkpoint, with
    the names that are similar to a mistyped one.
    """
    if source == "bundled" and revision is None:
        return Location(BUNDLED, BUNDLED, is_local=True)
    path = Path(source).expanduser()
    try:
        if source.strip() and path.exists():
            if revision is not None:
                raise CheckpointError(f"revision {revision!r} needs a hub id, but {source} is a local path")
            if path.is_dir():
                return Location(path, _weights_of(path), is_local=True)
            return Location(path.parent, _weights_file(path), is_local=True)
    except OSError as error:  # such as a directory that may not be read
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from error
    no_hub_id = _no_hub_id(source)
    if no_hub_id is not None:
        raise CheckpointError(f"{source}: {no_hub_id}")
    if (
        source.startswith(("/", ".", "~"))
        or source.count("/") > 1
        or path.suffix in (*PICKLE_SUFFIXES, SUFFIX, GGUF_SUFFIX)
    ):
        raise CheckpointError(
            f"{source}: no such file or directory{_similar_names(path)}; use a directory with a config.json, "
            "a *.safetensors or *.gguf file, or a hub id such as org/name"
        )
    from model.checkpoints.download import download  # the library of the hub is slow to import

    try:
        found = download(source, revision)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_similar_names(path)}") from error
    directory = found if found.is_dir() else found.parent
    return Location(directory, found if found != directory else _weights_of(directory), is_local=False)


def _no_hub_id(source: str) -> str | None:
    """Say why a name that is no file is not looked up at the hub either; None if it may be a hub id."""
    if source == "none":
        return "stands for no checkpoint, which only a server takes; give a directory, a *.gguf file or a hub id"
    if source == "bundled":
        return "has no revisions; leave the revision out"
    if source in WORKED_EXAMPLES:
        return (
            "a worked example, not a checkpoint; every server computes it for requests to /forward that name it in "
            "`model`, also with --model none"
        )
    if not source.strip():
        return "the name of the checkpoint is empty; give a directory, a *.gguf file or a hub id"
    hub_url, address = HUB_URL.fullmatch(source), server_url(source)
    if hub_url is not None:
        return f"a URL is not loaded; give the hub id {hub_url[1]}"
    if "://" in source:
        return "a URL is not loaded; give a directory, a *.gguf file or a hub id"
    if address is not None:
        return f"no such directory; if you mean a server, its URL is {address}, for chat, compare and Client"
    similar = difflib.get_close_matches(source.lower(), RESERVED, n=1, cutoff=0.7)
    return f"no such directory; did you mean {similar[0]}?" if similar else None


def _weights_of(directory: Path) -> Path:
    """The directory if it has a config.json and safetensors; otherwise its GGUF file, if there is one.

    Raises `CheckpointError` for the directory of a LoRA adapter. One beside a checkpoint is named in a warning.
    """
    is_adapter = is_present(directory / ADAPTER_CONFIG)
    has_weights = any(path.name != ADAPTER_WEIGHTS for path in directory.glob(f"*{SUFFIX}"))
    if not (has_weights and is_present(directory / "config.json")):
        weights = find_gguf(directory)
        if weights is None and is_adapter and not has_weights:
            raise CheckpointError(
                f"{directory}: is a LoRA adapter, not a checkpoint; load its base model, with "
                f"--adapter NAME={directory}"
            )
        return weights or directory
    if is_adapter:
        logger.warning(
            "%s: the network is loaded without the adapter of %s; --adapter NAME=%s offers it to requests",
            directory,
            ADAPTER_CONFIG,
            directory,
        )
    return directory


def _weights_file(path: Path) -> Path:
    """The file itself if it can be read. Raises `CheckpointError` that says what it is, and what to do."""
    if path.suffix in (SUFFIX, GGUF_SUFFIX):
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: {PICKLE_HINT}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                raise CheckpointError(f"{path}: is a GGUF file; give a link to it whose name ends in {GGUF_SUFFIX}")
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
