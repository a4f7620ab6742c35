"""`forwardscope mcp`: an assistant lists its tools, and each returns the numbers of the server."""

import base64
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import pytest

from service.commands.mcp_tools import MAX_CELLS, blocks, colours
from tests.service.running import PATIENCE_SECONDS, ROOT, Running

mcp = pytest.importorskip("mcp", reason="needs pip install 'forwardscope[mcp]'")
PROMPT = "the cat sat on the mat"
ZERO = {"stage": "blocks.0.attn.z", "op": "zero", "heads": [1]}
Call = Callable[..., Coroutine[Any, Any, Any]]


def examine(url: str, session: Callable[[Call, Any], Coroutine[Any, Any, None]]) -> None:
    """Start the command, and talk to it over its standard input and output with the client of the mcp package."""
    command = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "service", "mcp", "--url", url], env={"PYTHONPATH": str(ROOT)}
    )

    async def run() -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            async with mcp.Client(command) as client:

                async def call(name: str, **arguments: Any) -> Any:
                    found = await client.call_tool(name, arguments)
                    (content,) = found.content
                    if content.type == "image":
                        return base64.b64decode(content.data)
                    assert found.is_error or json.loads(content.text) is not None
                    return content.text if found.is_error else json.loads(content.text)

                await session(call, client)

    anyio.run(run)


@pytest.mark.slow
def test_an_assistant_examines_the_model_of_a_server(tiny: Running) -> None:
    async def session(call: Call, client: Any) -> None:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == ["model", "generate", "look", "picture", "edit", "attribute", "compare"]
        assert all(tool.description for tool in listed.values())
        model = await call("model")
        assert (model["num_layers"], model["stages"]["blocks.N.attn.z"]) == (2, ["batch", "position", "head", "d_head"])

        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        generated = await call("generate", prompt=PROMPT, max_tokens=5)
        assert generated["text"] == tiny.answer("/generate", **body)["text"]
        assert len(generated["tokens"]) == 5

        looked = await call("look", prompt=PROMPT, stages=["blocks.1.resid_post"], positions=[-1])
        (expected,) = tiny.answer(
            "/forward", prompt=PROMPT, stages=["blocks.1.resid_post"], positions=[-1], detail="values"
        )["stages"]
        assert np.ravel(looked["stages"][0]["values"]) == pytest.approx(np.ravel(expected["values"]), rel=1e-3)

        edited = await call("edit", prompt=PROMPT, edits=[ZERO], max_tokens=5)
        assert edited["text_without_edits"] == generated["text"]
        assert edited["text"] == tiny.answer("/generate", **body, edits=[ZERO])["text"]
        assert edited["moved"]["blocks.1.resid_post"] > 0

        shares = await call("attribute", prompt=PROMPT, token=" the")
        direct = tiny.answer("/attribute", method="direct", prompt=PROMPT, token=" the")
        assert shares["logit"] == pytest.approx(direct["logit"], rel=1e-3)
        assert len(shares["heads"]) == 12
        assert len((await call("attribute", prompt=PROMPT, token=" the", method="logit_lens")).popitem()[1]) >= 2
        assert (await call("compare", prompt=PROMPT, dtype="bfloat16"))["differs"] is False

        picture = await call("picture", prompt=PROMPT, stage="blocks.1.attn.pattern", head=2)
        assert picture.startswith(b"\x89PNG\r\n")

        for arguments, word in (({"stages": ["*"]}, "at most 40"), ({"stages": ["blocks.0.attn.patern"]}, "pattern")):
            assert word in await call("look", prompt=PROMPT, **arguments)

    examine(str(tiny.client.base_url), session)


def test_a_large_picture_shows_the_largest_number_of_each_block() -> None:
    values = np.zeros((300, 50))
    values[299, 3], values[0, 49] = -5.0, 2.0
    shown = blocks(values)
    assert shown.shape == (100, 50)
    assert max(shown.shape) <= MAX_CELLS
    assert (shown[99, 3], shown[0, 49]) == (-5.0, 2.0)
    pixels = colours(shown)
    assert tuple(pixels[0, 0]) == (255, 255, 255)
    assert tuple(pixels[-1, 3 * (len(pixels) // 100)]) == (255, 0, 0)
