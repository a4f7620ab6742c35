"""Download a checkpoint from the hub into the local cache, with its progress on a terminal or in the log.

Only files that can be read are downloaded: JSON, safetensors and chat templates, or one GGUF model. `org/name:Q4_K_M`
means the only GGUF model of `org/name` with "Q4_K_M" in the name of its file.
"""

import io
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from model.checkpoints.gguf_files.parts import first_part
from model.checkpoints.safetensors_directory import INDEX, SINGLE
from model.errors import CheckpointError, join_names, printable_name
from model.files import read_json

logger = logging.getLogger(__name__)

GLOBS = ("*.json", "*.jinja")
SAFETENSORS = "*.safetensors"
IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")
LOG_SECONDS = 5.0
ANSWER_SECONDS = 5.0  # for the connection to one address of the hub, and for its answer
MAX_REASON = 200


class LoggedBar(tqdm_asyncio):  # type: ignore[type-arg]  # generic in its types only, not when it runs
    """A progress bar of the hub's library that is no bar, but a log line every five seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        self._next_log = time.monotonic() + LOG_SECONDS
        super().__init__(*args, **options | {"file": io.StringIO(), "disable": False, "mininterval": LOG_SECONDS})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.monotonic()
        if self.unit == "B" and self.total and now >= self._next_log:
            self._next_log = now + LOG_SECONDS
            logger.info("downloading: %.2f of %.2f GB", self.n / 1e9, self.total / 1e9)


def download(source: str, revision: str | None) -> Path:
    """The directory of a checkpoint of the hub, or its GGUF file.

    The hub is asked once. If it cannot be reached, files that were downloaded before are used, with a warning. Raises
    `CheckpointError` if there are none, or if the hub refuses.
    """
    from huggingface_hub import HfApi, snapshot_download

    hub_id, _, tag = source.partition(":")
    try:
        found = HfApi().model_info(hub_id, revision=revision, timeout=ANSWER_SECONDS)
        files = [file.rfilename for file in found.siblings or ()]
    except Exception as error:  # the library has had three HTTP clients, with exceptions of their own
        return downloaded_before(source, revision, error)
    gguf = gguf_files(source, files, tag)
    try:
        directory = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=[*GLOBS, *(gguf or [SAFETENSORS])],
            ignore_patterns=list(IGNORED),
            tqdm_class=None if sys.stderr is not None and sys.stderr.isatty() else LoggedBar,
        )
    except Exception as error:  # likewise
        reason = f"the download from the hub failed: {describe(error)}; the next start continues it"
        raise CheckpointError(f"{source}: {reason}") from error
    return Path(directory, min(gguf)) if gguf else Path(directory)


def downloaded_before(source: str, revision: str | None, error: Exception) -> Path:
    """The files of an earlier download, after the hub could not be asked for the reason `error`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    hub_id, _, tag = source.partition(":")
    refusal = describe_refusal(error, hub_id, revision)
    if refusal is not None:
        raise CheckpointError(f"{source}: {refusal}") from error
    problem = f"the hub {constants.ENDPOINT} cannot be reached ({describe(error)})"
    if isinstance(error, OfflineModeIsEnabled):
        problem = "HF_HUB_OFFLINE forbids to ask the hub"
    try:
        globs = [*GLOBS, SAFETENSORS]
        found = snapshot_download(hub_id, revision=revision, local_files_only=True, allow_patterns=globs)
        directory, names = Path(found), [path.name for path in Path(found).iterdir()]
        is_complete = has_weights(directory, names, tag)
    except Exception:  # there is no earlier download, or only a part of one
        is_complete = False
    if not is_complete:
        raise CheckpointError(
            f"{source}: no such directory, not downloaded before, and {problem}; give a directory, a *.gguf file, or a "
            "mirror of the hub in the environment variable HF_ENDPOINT"
        ) from error
    if not isinstance(error, OfflineModeIsEnabled):
        logger.warning("%s, so the files of an earlier download are used", problem)
    gguf = gguf_files(source, names, tag)
    return directory / min(gguf) if gguf else directory


def describe_refusal(error: Exception, hub_id: str, revision: str | None) -> str | None:
    """Say why the hub refuses a checkpoint. None if it does not refuse one, but could not be asked."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # a kind of `RepositoryNotFoundError`
        return f"the model is gated; accept its terms at {constants.ENDPOINT}/{hub_id}, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "no such directory, and the hub has no such model (a private one needs HF_TOKEN)"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub has no revision {revision} of this model"
    if isinstance(error, HFValidationError):
        return "no such directory, and not a hub id such as org/name"
    return None


def describe(error: Exception) -> str:
    """One line about an exception of the hub's library, or about the error of the system that caused it."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    error = cause if isinstance(cause, OSError) and str(cause) else error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:MAX_REASON]}{'...' if len(text) > MAX_REASON else ''}"


def has_weights(directory: Path, names: Sequence[str], tag: str) -> bool:
    """Whether a directory has the weights of a checkpoint: a GGUF model, or safetensors, all of the index if it exists.

    With a `tag`, only GGUF models count.
    """
    if tag:
        return any(name.endswith(".gguf") for name in names)
    index = directory / INDEX
    if index.exists() and SINGLE not in names:
        return set(read_json(index)["weight_map"].values()) <= set(names)
    return any(name.endswith((".safetensors", ".gguf")) for name in names)


def gguf_files(source: str, files: Sequence[str], tag: str) -> list[str]:
    """The GGUF files to download: those of one model, or none if there are safetensors and no model is named by `tag`.

    Raises `CheckpointError` that lists the models if there are several.
    """
    if not tag and any(file.endswith(".safetensors") for file in files):
        return []
    models: dict[str, list[str]] = {}
    for file in files:
        if file.endswith(".gguf") and "/" not in file and "mmproj" not in file and tag.lower() in file.lower():
            models.setdefault(first_part(Path(file)).name, []).append(file)
    if len(models) > 1:
        hub_id = source.partition(":")[0]
        raise CheckpointError(
            f"{source}: has several GGUF models ({join_names(sorted(models), limit=30)}); name one by a part of its "
            f"file name, as in {hub_id}:Q4_K_M"
        )
    if tag and not models:
        raise CheckpointError(f"{source}: has no GGUF file with {printable_name(tag)} in its name")
    return [file for parts in models.values() for file in parts]
