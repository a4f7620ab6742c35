"""OpenAI's SDK sends edits as an additional field of the body, and shows what they matched on each choice."""

from typing import Any

import openai
import pytest

from tests.clients.conftest import sdk
from tests.service.running import Running

PROMPT = "the cat sat on"
EDITS: list[dict[str, Any]] = [
    {"stage": "blocks.2.resid_post", "op": "add", "vector": [1.0] * 256, "positions": "last"},
    {"stage": "blocks.*.attn.z", "op": "zero", "heads": [1]},
]


def test_edits_are_sent_in_extra_body(bundled: Running) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    expected = bundled.answer("/generate", edits=EDITS, **fields)
    plain = bundled.answer("/generate", **fields)
    with sdk(bundled) as client:
        found = client.completions.create(model="bundled", extra_body={"edits": EDITS}, **fields)
        assert found.choices[0].text == expected["text"] != plain["text"]
        assert found.choices[0].to_dict()["edits"] == expected["edits"]
        assert expected["edits"][0] == {"stages": ["blocks.2.resid_post"], "positions": [3]}
        chunks = list(client.completions.create(model="bundled", stream=True, extra_body={"edits": EDITS}, **fields))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected["text"]
        assert chunks[-1].choices[0].to_dict()["edits"] == expected["edits"]
        without = client.completions.create(model="bundled", **fields)
        assert "edits" not in without.choices[0].to_dict()
        wrong = [EDITS[0] | {"stage": "blocks.9.resid_post"}]
        with pytest.raises(openai.BadRequestError, match=r"edits\.0\.stage: 'blocks\.9\.resid_post' matches no stage"):
            client.completions.create(model="bundled", extra_body={"edits": wrong}, **fields)
