"""The fields of a request to `/v1/*` that were left out: named in a response header and in the log, and counted.

A field is named by its path, such as `messages.1.parsed`. Clients choose the names, so only plain characters of them
are shown. A strict client (`is_strict` in http/bodies.py) gets an error instead.
"""

import re
from collections.abc import Sequence

HEADER = b"x-ignored-fields"
MAX_TEXT = 1024  # characters of the header; some proxies accept 4 KiB of headers in all
OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.$-]")


def ignored_text(paths: Sequence[str]) -> str:
    """Join the paths with commas; of many, the last ones are only counted."""
    shown: list[str] = []
    length = 0
    for path in paths:
        plain = OTHER_CHARACTERS.sub("_", path[:100]) or "_"  # a header value cannot end with a comma and a space
        length += len(plain) + 2
        if length > MAX_TEXT:
            return f"{', '.join(shown)} and {len(paths) - len(shown)} more"
        shown.append(plain)
    return ", ".join(shown)
