"""What the tests share: where the data beside a development checkout lies."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """A path below the development data; the calling test skips where there is none."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs the development data shared/{relative}, which a plain checkout does not have")
    return path
