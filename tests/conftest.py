"""The path of the development data, which lies beside a development checkout."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """A path inside the development data. The calling test is skipped if the path does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs the development data shared/{relative}, which a plain checkout does not have")
    return path
