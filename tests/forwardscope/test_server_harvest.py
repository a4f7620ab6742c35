"""A harvest of a running server has the files of one in this process."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from forwardscope import AsyncClient, Client
from forwardscope.local import LocalModel
from forwardscope.local_harvest import Harvest
from model.errors import InvalidField
from service.commands import harvest as command
from tests.forwardscope.conftest import url_of
from tests.service.running import Running, wait_until

TEXTS = ["Once upon a time there was a cat named Tom.", "The sea — ☃ — was cold.\r\n" * 9, ""]
STAGES = ["blocks.*.resid_post", "blocks.1.mlp.post"]


@pytest.mark.parametrize(
    "options",
    [
        {"context": 40},
        {"context": 40, "packed": False, "store": "float32"},
        {"context": 40, "statistics": ["mean", "top"], "top_k": 3},
    ],
    ids=["packed", "by document", "statistics"],
)
def test_its_manifest_and_so_all_its_numbers_are_those_of_load(
    client: Client, local: LocalModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    corpus: list[Any] = [*TEXTS, [5, 6, 7]]
    found = client.harvest(corpus, STAGES, tmp_path / "server", **options)
    local.harvest(corpus, STAGES, tmp_path / "local", **options)
    assert isinstance(found, Harvest)
    assert found.is_complete
    manifests = [(tmp_path / each / "manifest.json").read_text() for each in ("server", "local")]
    assert manifests[0] == manifests[1], "it has the checksums of the files"


def test_the_asynchronous_client_harvests_too_and_a_cancelled_harvest_ends(
    service: Running, local: LocalModel, tmp_path: Path
) -> None:
    async def harvest(seconds: float, corpus: list[str], out: Path) -> Harvest:
        async with AsyncClient(url_of(service)) as client, asyncio.timeout(seconds):
            return await client.harvest(corpus, "embed", out, context=16)

    found = asyncio.run(harvest(60, TEXTS, tmp_path / "server"))
    assert found["embed"].equal(local.harvest(TEXTS, "embed", tmp_path / "local", context=16)["embed"])
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError):
        asyncio.run(harvest(0.5, ["a cat " * 200_000], tmp_path / "cancelled"))
    wait_until(lambda: not any("AnyIO" in each.name for each in set(threading.enumerate()) - before), "the thread ends")


def test_a_harvest_that_was_interrupted_goes_on(
    client: Client, local: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"context": 16, "file_bytes": 30_000}
    send, left = Client._send, [6]

    def send_some(client: Client, call: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return send(client, call)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "_send", send_some)
        with pytest.raises(KeyboardInterrupt):
            client.harvest(TEXTS, "embed", tmp_path / "server", **options)
    assert not Harvest(tmp_path / "server").is_complete
    client.harvest(TEXTS, "embed", tmp_path / "server", **options)
    local.harvest(TEXTS, "embed", tmp_path / "local", **options)
    manifests = [(tmp_path / each / "manifest.json").read_text() for each in ("server", "local")]
    assert manifests[0] == manifests[1]


def test_wrong_arguments_are_named(client: Client, tmp_path: Path) -> None:
    for fields, match in (
        ({"stages": "blocks.9.*"}, "^stages: 'blocks.9.*' matches no stage"),
        ({"stages": "logits"}, "^stages: logits is not harvested"),
        ({"context": 100_000}, "^context: 100000 must be from 1 to 512"),
        ({"corpus": []}, "^corpus: is empty"),
        ({"window": 3}, "^window: is not an option of `harvest`"),
    ):
        arguments: dict[str, Any] = {"corpus": TEXTS, "stages": "embed"} | fields
        with pytest.raises(ValueError, match=match):
            client.harvest(out=tmp_path / "out", **arguments)


def test_the_command_takes_the_url_of_a_server(
    client: Client,
    local: LocalModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An option that is repeated adds to the first, and no line of the log is about one request."""
    (tmp_path / "text.txt").write_text(TEXTS[0])
    line = [client.url, str(tmp_path / "text.txt"), "--stages", "embed", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["harvest", *line, "--stages", "*.0.attn_out"])
    caplog.set_level("INFO")
    command.main()
    assert "HTTP Request" not in caplog.text
    stages = ["embed", "blocks.0.attn_out"]
    expected = local.harvest(tmp_path / "text.txt", stages, tmp_path / "local")
    found = Harvest(tmp_path / "out")
    assert all(found[name].equal(expected[name]) for name in stages)
    monkeypatch.setattr(sys, "argv", ["harvest", *line, "--quantize", "int8"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--quantize: is decided by the server; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("special", [True, False])
def test_tokenize_returns_the_characters_of_each_token(service: Running, local: LocalModel, special: bool) -> None:
    body = {"text": TEXTS[1], "add_special_tokens": special}
    answer = service.answer("/tokenize", **body, return_offsets=True)
    tokenizer = local.checkpoint.tokenizer
    assert tokenizer is not None
    ids, spans = tokenizer.encode_with_spans(TEXTS[1], add_special_tokens=special)
    assert [token["id"] for token in answer["tokens"]] == ids
    assert answer["offsets"] == [None if span is None else list(span) for span in spans]
    assert "offsets" not in service.answer("/tokenize", **body)
    for wrong in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        refused = service.post("/tokenize", wrong | {"return_offsets": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "return_offsets")


def test_a_corpus_needs_a_tokenizer_or_ids(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, send = client.model(), Client._send
    vars(found.capabilities)["tokenizer"] = False
    monkeypatch.setattr(
        Client, "_send", lambda client, call: found if call.request.path == "/model" else send(client, call)
    )
    with pytest.raises(InvalidField, match="no tokenizer"):
        client.harvest(TEXTS, "embed", tmp_path / "texts")
    assert client.harvest([[1, 2, 3]], "embed", tmp_path / "ids").num_tokens > 2
