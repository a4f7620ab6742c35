"""Download a checkpoint from the hub into the local cache, with its progress on a terminal or in the log.

Only files that can be read are downloaded: JSON, safetensors and chat templates.
"""

import io
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from model.errors import CheckpointError

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


def download(hub_id: str, revision: str | None) -> Path:
    """The directory of a checkpoint of the hub. Raises `CheckpointError` if it cannot be downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    place = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(GLOBS),
                ignore_patterns=list(IGNORED),
                tqdm_class=None if sys.stderr.isatty() else LoggedBar,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{place}: not a directory, and the download from the hub failed: {reason}") from error
