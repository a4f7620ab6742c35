"""Exports of what the page shows: as a command, as a program, as safetensors, and as pictures."""

import ast
import json
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.service.running import Running
from tests.web.browsing import open_view, url_of, wait_until_ready
from tests.web.conftest import API_KEY

if TYPE_CHECKING:
    from playwright.sync_api import Page

# With everything that a shell or Python could read in another way.
PROMPT = 'It\'s a "test" of $HOME, `id`, \\n and {braces}\nin ünïcode'
EXAMPLE = "When Mary and John went to the park, John gave a ball to"
SECONDS = 240  # to import PyTorch on a busy machine


def copied(page: "Page", name: str) -> str:
    page.get_by_role("button", name=name).click()
    text: str = page.get_by_label("The copied text").inner_text()
    return text


def run(command: list[str], **environment: str) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environment}, check=True
    )
    return result.stdout


def token_ids(output: str) -> list[int]:
    return [int(token_id) for token_id in re.findall(r"[\"']token[\"']: ?\{[\"']id[\"']: ?(\d+)", output)]


def test_copied_commands_generate_the_tokens_that_are_shown(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate", prompt=PROMPT, temperature=0.8, seed=4, max_tokens=6)
    expected = bundled.answer("/generate", prompt=PROMPT, temperature=0.8, seed=4, max_tokens=6)["tokens"]
    assert token_ids(run(["bash", "-c", copied(page, "Copy as curl")])) == expected
    program = run([sys.executable, "-c", copied(page, "Copy as Python")])
    assert tuple(expected) == ast.literal_eval(program.split("\n")[0])
    assert bundled.answer("/detokenize", tokens=expected)["text"].strip() in program


def test_a_key_is_named_in_commands_but_not_shown(page: "Page", keyed: str, findings: list[str]) -> None:
    page.goto(url_of(keyed, "generate"))
    page.get_by_role("dialog").get_by_label("Key").fill(API_KEY)
    page.get_by_role("dialog").get_by_label("Key").press("Enter")
    wait_until_ready(page)
    curl, program = copied(page, "Copy as curl"), copied(page, "Copy as Python")
    assert "sesame" not in curl + program
    assert len(token_ids(run(["bash", "-c", curl], FORWARDSCOPE_API_KEY=API_KEY))) == 24
    output = run([sys.executable, "-c", program], FORWARDSCOPE_API_KEY=API_KEY)
    assert len(ast.literal_eval(output.split("\n")[0])) == 24
    findings.clear()


def test_the_status_is_copied_as_a_get_request(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    assert json.loads(run(["bash", "-c", copied(page, "Copy as curl")]))["model"] == "bundled"
    assert re.search(r"model +'bundled'", run([sys.executable, "-c", copied(page, "Copy as Python")]))


def test_the_copied_command_of_a_weight_reads_the_part_that_is_shown(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.0.attn.W_O", head=2)
    answer = json.loads(run(["bash", "-c", copied(page, "Copy as curl")]))
    expected = bundled.client.get("/weights/blocks.0.attn.W_O", params={"head": 2}).json()
    assert (answer["shape"], answer["values"]) == ([1, 32, 256], expected["values"])


def test_python_writes_every_value_of_json(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    values = {"a": [None, True, False, -1.5, "☃\u2028\"'\\"], "b": {}}
    code = page.evaluate(
        "body => import('/page/export.js').then((m) => m.asPython({path: '/forward', body}, {base: ''}))",
        {"prompt": "x", "edits": values},
    )
    line = next(line for line in code.split("\n") if line.startswith("trace = "))
    assert ast.literal_eval(line.removeprefix('trace = client.run("x", edits=').removesuffix(")")) == values


@pytest.mark.parametrize("view", ["forward", "weights", "attention", "lens", "loss", "worked", "steps", "edits"])
def test_copied_programs_end_in_the_arrays_or_the_text(page: "Page", base: str, view: str) -> None:
    """The program of each view runs, and the object that it ends in has what the view shows."""
    open_view(page, base, view)
    output = run([sys.executable, "-c", copied(page, "Copy as Python")])
    expected = {
        "weights": "blocks.0.attn.W_Q (1, ",
        "attention": "attn.pattern (1, 1, ",
        "lens": "'layers'",
        "worked": "blocks.0.ln1.out (",
        "steps": "(",
    }
    assert expected.get(view, " (1, ") in output
    if view in ("forward", "attention", "edits", "worked"):
        assert "\n[[" in output  # the numbers of an array


def test_the_text_can_be_copied_with_its_prompt(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate", max_tokens=12)
    answer = bundled.answer("/generate", prompt=EXAMPLE, max_tokens=12, temperature=0)
    page.get_by_role("button", name="Copy the text").click()
    assert page.get_by_label("The copied text").evaluate("each => each.textContent") == EXAMPLE + answer["text"]


def download(page: "Page", name: str, directory: Path) -> Path:
    with page.expect_download() as started:
        page.get_by_role("button", name=name).click()
    path: Path = directory / started.value.suggested_filename
    started.value.save_as(path)
    return path


@pytest.mark.parametrize(
    ("view", "name"), [("generate", "tokens"), ("status", "tokens a second"), ("loss", "losses"), ("steps", "steps")]
)
def test_pictures_are_saved_as_png_and_svg(
    page: "Page", bundled: Running, base: str, tmp_path: Path, view: str, name: str
) -> None:
    open_view(page, base, view)
    picture = download(page, f"SVG: {name}", tmp_path).read_text()
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    num_tokens = len(bundled.answer("/tokenize", text=EXAMPLE)["tokens"])
    # Of the steps: two texts in the corner and for each of the positions, the names of 8 steps, and what the first has.
    steps = 2 + 2 * (num_tokens + 8) + 8 + num_tokens + 1
    assert len(texts) == {"generate": 24, "status": 6, "loss": 2 * num_tokens, "steps": steps}[view]
    content = download(page, f"PNG: {name}", tmp_path).read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG")
    assert width == 2 * float(root.attrib["width"])
    assert height >= 60


def test_safetensors_hold_the_stages_that_are_shown(page: "Page", bundled: Running, base: str, tmp_path: Path) -> None:
    open_view(page, base, "forward")
    path = download(page, "Download safetensors", tmp_path)
    assert path.name.startswith("bundled-forward")
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert "blocks.0.attn.pattern" in header
    expected = bundled.answer("/forward", prompt=EXAMPLE, stages=["blocks.0.attn.pattern"], detail="none")
    assert header["blocks.0.attn.pattern"]["shape"] == expected["stages"][0]["shape"]


def test_the_name_of_a_file_says_what_it_holds(page: "Page", base: str, tmp_path: Path) -> None:
    open_view(page, base, "attention", layer=3, head=5)
    assert download(page, "Download safetensors", tmp_path).name == "bundled-attention-layer-3-head-5.safetensors"
    assert download(page, "SVG: layer 3 head 5", tmp_path).name == "bundled-attention-layer-3-head-5.svg"
    open_view(page, base, "worked", example="a-tokens-journey")
    assert download(page, "Download safetensors", tmp_path).name == "a-tokens-journey-worked.safetensors"
