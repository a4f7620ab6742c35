"""Requests in the middle of a session, as real programs send them, against several kinds of chat templates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.histories import HISTORIES
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, read_events, running

CHAT = "/v1/chat/completions"
TEMPLATES = {
    "without tools": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "with tools": (
        "{% for tool in tools or [] %}{{ tool.function.parameters.properties | tojson }}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    ),
    "of parts": (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    ),
    "that demands turns": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "that drops the system": (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    ),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("checkpoints") / "long"
    write_checkpoint(directory, max_position_embeddings=8192)
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param])
    with running(model=str(directory), max_num_seqs=4) as found:
        yield found


@pytest.mark.parametrize("name", HISTORIES)
def test_a_request_of_a_session_is_answered_and_nothing_of_it_is_lost(service: Running, name: str) -> None:
    history = HISTORIES[name]
    body: dict[str, Any] = history.body | {"return_token_ids": True}
    if body.get("max_tokens") == -1:
        body |= {"max_completion_tokens": 8}
    response = service.post(CHAT, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"].split(", ") == list(history.ignored)
    answer = read_events(response.content)[0] if body.get("stream") else response.json()
    prompt = service.answer("/detokenize", tokens=answer["prompt_token_ids"])["text"]
    for text in history.texts:
        assert text in prompt.replace('": "', '": "'), (text, prompt)
