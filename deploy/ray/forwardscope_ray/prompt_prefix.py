"""The beginning of a prompt as a list of hashes, so that requests with a common beginning can be recognized.

It knows the fields of the routes that generate, and nothing of replicas.
"""

from hashlib import blake2b
from typing import Any

import orjson

GENERATING_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
BLOCK_CHARACTERS = 64  # about the 16 tokens of a block of the key-value cache
MAX_BLOCKS = 256
MAX_BODY_BYTES = 1 << 20  # larger bodies are not parsed here: that would delay other requests for milliseconds


def prefix_blocks(path: str, body: bytes) -> tuple[int, ...]:
    """Hash the prompt of a request in blocks. The hash of a block depends on all text before it, and on the adapter.

    Two requests have as many equal hashes at the beginning as their prompts have equal blocks of `BLOCK_CHARACTERS`.
    The result is empty for short prompts, for other routes, and for bodies that cannot be read; the replica reports
    those.
    """
    if path not in GENERATING_PATHS or len(body) > MAX_BODY_BYTES:
        return ()
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ()
    if not isinstance(values, dict):
        return ()
    text = text_of(values.get("messages", values.get("prompt")))
    hashed = orjson.dumps([values.get("model"), values.get("adapter"), values.get("tools"), values.get("edits")])
    hashes = []
    for start in range(0, min(len(text), BLOCK_CHARACTERS * MAX_BLOCKS) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
        block = text[start : start + BLOCK_CHARACTERS]
        hashed = blake2b(hashed + block.encode("utf-8", "replace"), digest_size=8).digest()
        hashes.append(int.from_bytes(hashed, "little"))
    return tuple(hashes)


def text_of(prompt: Any) -> str:
    """The beginning of a prompt: a text, token ids, a list of texts, or the messages of a chat."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        return f"{prompt.get('role')}: {text_of(prompt.get('content', prompt.get('text')))}\n"
    if isinstance(prompt, list):
        return "".join(text_of(part) for part in prompt[: BLOCK_CHARACTERS * MAX_BLOCKS])
    return "" if prompt is None else f"{prompt} "
