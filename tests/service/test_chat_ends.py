"""A chat ends at the tokenizer's EOS too, where the template writes it after each answer. It reads all parts."""

import json
from pathlib import Path
from typing import Any

from forwardscope import load
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start

TURNS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"
QUESTION = {"role": "user", "content": "the cat"}
CHAT = "/v1/chat/completions"


def write(directory: Path, end: str) -> Path:
    """A checkpoint whose tokenizer has an EOS that the generation config does not know."""
    write_checkpoint(directory, generation={"eos_token_id": 0, "do_sample": False})
    (directory / "chat_template.jinja").write_text(TURNS.replace("END", end))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return directory


def answer(service: Running, path: str, **body: Any) -> tuple[list[int], str]:
    choice = service.answer(path, max_tokens=12, return_token_ids=True, **body)["choices"][0]
    return choice["token_ids"], choice["finish_reason"]


def test_a_chat_ends_at_the_eos_of_the_tokenizer_and_a_completion_does_not(tmp_path: Path, start: Start) -> None:
    plain = start(model=str(write(tmp_path / "plain", "<|endoftext|>")))
    ids, _ = answer(plain, CHAT, messages=[QUESTION], ignore_eos=True)
    tokenizer = plain.checkpoint.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("the cat")
    place = next(i for i, token_id in enumerate(ids) if i > 0 and token_id not in (0, *ids[:i], *prompt))
    directory = write(tmp_path / "ending", str(tokenizer._backend.id_to_token(ids[place])))
    ending = start(model=str(directory))
    assert answer(ending, CHAT, messages=[QUESTION]) == (ids[: place + 1], "stop")
    assert answer(ending, CHAT, messages=[QUESTION], ignore_eos=True)[0] == ids
    assert answer(ending, "/v1/completions", prompt=prompt)[0][: place + 2] == ids[: place + 2]
    model = load(str(directory))
    assert model.chat([QUESTION], max_tokens=12).usage.completion_tokens == place + 1
    assert model.generate(prompt, max_tokens=12).usage.completion_tokens > place + 1


def test_several_text_parts_are_read_by_every_template(tmp_path: Path, start: Start) -> None:
    parts = [{"type": "text", "text": text} for text in ("the cat", "sat on")]
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    for source, texts, text in ((TURNS, "the cat sat on", "the cat"), (template, "the cat|sat on|", "the cat|")):
        directory = write(tmp_path / str(len(source)), "<|endoftext|>")
        (directory / "chat_template.jinja").write_text(source)
        service = start(model=str(directory))
        tokenizer = service.checkpoint.tokenizer
        assert tokenizer is not None
        for content, expected in ((parts, texts), (parts[:1], text), ("the cat", text)):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
            assert service.answer(CHAT, **body)["prompt_token_ids"] == tokenizer.encode(expected)
