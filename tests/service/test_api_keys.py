"""Keys in a file are those that the file has now."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.http.api_keys import ApiKeys
from service.settings import Settings
from tests.service.running import Start


def test_requests_with_a_key_of_the_file_or_the_setting_pass(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the laboratory\nfirst\n\n  second  \r\n")
    service = start(model="none", api_key="own", api_key_file=path)

    def status(key: str) -> int:
        return service.client.get("/nope", headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(key) for key in ("own", "first", "second")] == [404, 404, 404]
    assert [status(key) for key in ("third", "first second", "# of the laboratory")] == [401] * 3
    path.write_text("second\nthird\n")
    assert [status(key) for key in ("own", "second", "third")] == [404, 404, 404]
    assert status("first") == 401
    assert service.client.get("/health").status_code == 200


def test_a_file_that_cannot_be_used_any_more_leaves_the_keys_of_before(
    tmp_path: Path, errors_logged: list[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("first")
    keys = ApiKeys(Settings(api_key_file=path))
    for content in (None, "", "\x00secret"):
        path.unlink() if content is None else path.write_text(content)
        assert [keys.accept([b"first"]), keys.accept([b"first"]), keys.accept([b"secret"])] == [True, True, False]
        (message,) = errors_logged
        errors_logged.clear()
        assert message.startswith(f"the API keys of before remain valid: {path}")
        assert "secret" not in message
    path.write_text("next")
    assert [keys.accept([b"first"]), keys.accept([b"x", b"next"])] == [False, True]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory; give a text file with one API key a line"),
        (b"\n# none\n", "has no API key; write one key a line"),
        (b"good\nsec\x07ret", "line 2: has a control character"),
        (b"\xff\xfe", "cannot be read: it is not UTF-8"),
    ],
)
def test_a_file_without_usable_keys_ends_the_start(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValidationError) as caught:
        Settings(api_key_file=path)
    (error,) = caught.value.errors()
    assert error["loc"] == ("api_key_file",)
    assert reason in error["msg"]
    assert "sec" not in error["msg"]
