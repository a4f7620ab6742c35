"""Download a checkpoint from the hub into the local cache, with its progress on a terminal or in the log.

Only files that can be read are downloaded: JSON, safetensors and chat templates, or one GGUF model. `org/name:Q4_K_M`
means the only GGUF model of `org/name` with "Q4_K_M" in the name of its file.
"""

import io
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from model.checkpoints.gguf_files.parts import first_part
from model.errors import CheckpointError, join_names, printable_name

logger = logging.getLogger(__name__)

GLOBS = ("*.json", "*.safetensors", "*.jinja")
IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")
LOG_SECONDS = 5.0


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
    """The directory of a checkpoint of the hub, or its GGUF file. Raises `CheckpointError` if that fails."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    errors: tuple[type[Exception], ...] = (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError)
    with suppress(ImportError):  # older versions of the hub's library use another one, whose errors are OSErrors
        import httpx

        errors += (httpx.HTTPError,)
    hub_id, _, tag = source.partition(":")
    place = hub_id if revision is None else f"{hub_id} at revision {revision}"
    files: list[str] | None = None
    try:
        with suppress(OfflineModeIsEnabled):  # then only files that were downloaded before are used
            files = list_repo_files(hub_id, revision=revision)
        gguf = [] if files is None else gguf_files(source, files, tag)
        directory = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=[*GLOBS, *gguf],
                ignore_patterns=list(IGNORED),
                tqdm_class=None if sys.stderr.isatty() else LoggedBar,
            )
        )
    except errors as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{place}: not a directory, and the download from the hub failed: {reason}") from error
    if files is None:
        gguf = gguf_files(source, [path.name for path in directory.iterdir()], tag)
    return directory / min(gguf) if gguf else directory


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
