"""POST /tokenize with messages: the tokens that POST /v1/chat/completions computes for the same conversation."""

import threading
from pathlib import Path
from typing import Any

import pytest

from forwardscope.results.server import Tokens
from service.answers import conversations
from tests.service.checkpoints import CONTEXT, write_checkpoint
from tests.service.running import Running, Start, validate

MESSAGES = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "sat <eos> on"}]


def test_the_tokens_are_those_of_the_rendered_template(tiny: Running) -> None:
    answer = tiny.answer("/tokenize", messages=MESSAGES)
    validate(Tokens, answer)
    tokenizer = tiny.checkpoint.tokenizer
    assert tokenizer is not None
    ids = [token["id"] for token in answer["tokens"]]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the cat\nsat <eos> on\n"
    assert tokenizer.encode("<eos>")[0] not in ids  # the text of a special token in a message is plain text
    assert [token["position"] for token in answer["tokens"]] == list(range(answer["count"]))
    assert answer["max_positions"] == CONTEXT


def test_a_chat_computes_as_many_tokens(tiny: Running) -> None:
    count = tiny.answer("/tokenize", messages=MESSAGES)["count"]
    chat = tiny.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == count


def test_the_beginning_of_an_answer_can_be_left_out(tmp_path: Path, start: Start) -> None:
    directory = write_checkpoint(tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}the{% endif %}"
    (directory / "chat_template.jinja").write_text(template)
    service = start(model=str(directory))
    whole = service.answer("/tokenize", messages=MESSAGES)["tokens"]
    assert "".join(token["text"] for token in whole).endswith("onthe")
    without = service.answer("/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert "".join(token["text"] for token in without).endswith("on")


def test_tools_and_variables_of_the_template_count_as_in_a_chat(tmp_path: Path, start: Start) -> None:
    directory = write_checkpoint(tmp_path / "tools")
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ mood }}{{ messages[0].content }}"
    (directory / "chat_template.jinja").write_text(template)
    service = start(model=str(directory))
    body = {
        "messages": [{"role": "user", "content": "sat"}],
        "tools": [{"type": "function", "function": {"name": "mat"}}],
        "chat_template_kwargs": {"mood": "log"},
    }
    tokens = service.answer("/tokenize", **body)["tokens"]
    assert "".join(token["text"] for token in tokens) == "matlogsat"
    chat = service.answer("/v1/chat/completions", **body, max_tokens=1, return_token_ids=True)
    assert chat["prompt_token_ids"] == [token["id"] for token in tokens]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"text": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, 422, "tools"),
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, 422, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ({"messages": MESSAGES, "text": "a"}, 422, "messages"),
        ({"messages": MESSAGES, "prompt": "a"}, 422, "messages"),
        ({"messages": MESSAGES, "add_special_tokens": True}, 422, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "a " * 100}]}, 400, "messages"),
    ],
)
def test_a_wrong_conversation_is_an_error(tiny: Running, body: dict[str, Any], status: int, param: str) -> None:
    response = tiny.post("/tokenize", body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_model_without_a_template_says_so(tmp_path: Path, start: Start) -> None:
    directory = write_checkpoint(tmp_path / "plain")
    (directory / "chat_template.jinja").unlink()
    response = start(model=str(directory)).post("/tokenize", {"messages": MESSAGES})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")


def called_with(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ([f"[{'1,' * 70_000}1]"] * 4, 413, "too_many_values"),
        (["[" * 957 + "]" * 957], 400, "nested_too_deeply"),
        (['{"a":' * 957 + "1" + "}" * 957], 400, "nested_too_deeply"),
        (['{"a": "', *[f"[{'1,' * 70_000}1]"] * 4], 413, "too_many_values"),
        (["{", "[" * 957], 400, "nested_too_deeply"),
    ],
    ids=["values", "lists", "objects", "values after a cut text", "lists after a cut text"],
)
def test_the_arguments_of_all_calls_are_counted_before_they_are_parsed(
    tiny: Running, path: str, arguments: list[str], status: int, code: str
) -> None:
    messages = [*MESSAGES, *map(called_with, arguments), MESSAGES[1]]
    response = tiny.post(path, {"messages": messages})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error


def test_broken_arguments_do_not_end_a_session_whose_template_needs_an_object(tmp_path: Path, start: Start) -> None:
    directory = write_checkpoint(tmp_path / "items", max_position_embeddings=256)
    (directory / "chat_template.jinja").write_text(
        "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    service = start(model=str(directory))
    for arguments, shown in (('{"a": 1}', "a=1"), ('{"a": 1', 'invalid_json={"a": 1')):
        tokens = service.answer("/tokenize", messages=[*MESSAGES, called_with(arguments)])["tokens"]
        assert "".join(token["text"] for token in tokens).endswith(shown)


def test_arguments_are_parsed_outside_of_the_event_loop(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read = conversations.read_arguments

    def noted(text: str) -> Any:
        threads.append(threading.current_thread().name)
        return read(text)

    monkeypatch.setattr(conversations, "read_arguments", noted)
    tiny.post("/tokenize", {"messages": [called_with('{"a": 1}')]})
    assert threads
    assert all(name.startswith("text") for name in threads)
