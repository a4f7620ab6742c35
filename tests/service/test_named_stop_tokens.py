"""A stop string that names a special token ends the text at its id: a special token has no text that could match."""

import json
from pathlib import Path
from typing import Any

import pytest

import forwardscope
from tests.service.checkpoints import EOS, NUM_TOKENS, write_checkpoint
from tests.service.running import Running, running

PROMPT = [1, 2]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service whose network has no end-of-sequence token of its own."""
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "endless", eos_token_id=None)
    with running(model=str(directory)) as found:
        yield found


def end_of(service: Running, path: str, **fields: Any) -> tuple[str, Any, int]:
    body = ROUTES[path] | {"max_tokens": 8, "temperature": 0, "logit_bias": {"0": 100}} | fields
    answer = service.answer(path, **body)
    choice = answer["choices"][0] if answer.get("choices") else answer
    usage = answer["usage"]
    return choice["finish_reason"], choice["stop_reason"], usage["completion_tokens"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stop", [EOS, ["zzz", f"{EOS}\n"]], ids=str)
def test_the_name_of_a_special_token_is_its_id(service: Running, path: str, stop: Any) -> None:
    assert end_of(service, path) == ("length", None, 8)
    assert end_of(service, path, stop=stop) == ("stop", 0, 1)


@pytest.mark.parametrize("path", ROUTES)
def test_another_name_is_only_a_text(service: Running, path: str) -> None:
    assert end_of(service, path, stop=["<eos", "the", "eos"]) == ("length", None, 8)


def test_a_model_in_this_process_stops_as_well(tmp_path: Path) -> None:
    model = forwardscope.load(str(write_checkpoint(tmp_path / "endless", eos_token_id=None)))
    found = model.generate(PROMPT, max_tokens=8, temperature=0, logit_bias={0: 100.0}, stop=EOS)
    assert (found.finish_reason, found.stop_reason) == ("stop", 0)


def test_tokens_that_the_network_lacks_have_no_effect(tmp_path: Path) -> None:
    """A tokenizer may have tokens that were not added to the network, and files may name such end tokens."""
    generation = {"eos_token_id": [-1, NUM_TOKENS, 10**9]}
    directory = write_checkpoint(
        tmp_path / "short", generation=generation, extra_token="<extra>", vocab_size=NUM_TOKENS, eos_token_id=None
    )
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["special"] = True
    path.write_text(json.dumps(content))
    fields = {"min_tokens": 2, "stop": ["<extra>"], "bad_words": ["<extra>"]}
    with running(model=str(directory)) as service:
        assert service.answer("/tokenize", text="<extra>")["tokens"][0]["id"] == NUM_TOKENS
        for added in ({}, *({name: value} for name, value in fields.items()), fields):
            assert end_of(service, "/generate", **added) == ("length", None, 8)
        assert service.get("/v1/models").status_code == 200
        assert service.get("/model").json()["eos_token_ids"] == []
