"""Recognise the address of a server, where somebody gives one without `http://` or in place of a model."""

import re

ADDRESS = re.compile(r"(?P<host>[\w.-]*|\[[0-9a-f:]+\]):(?P<port>\d{2,5})(/.*)?", re.I)


def server_url(text: str) -> str | None:
    """The URL of an address such as `localhost:8000`; None if the text is no address."""
    if text == "localhost":
        return "http://localhost:8000"
    found = ADDRESS.fullmatch(text)
    return None if found is None else f"http://{found['host'] or 'localhost'}:{found['port']}"


def is_url(text: str) -> bool:
    """Whether a text is the URL of a server."""
    return text.startswith(("http://", "https://"))
