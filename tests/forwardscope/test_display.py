"""Every result fits on a screen, on a console and in a notebook: a heading, shapes, and the first values."""

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from forwardscope import Client, LocalModel, UnknownStage, load
from tests.service.running import Running, running

PROMPT, CORRUPTED = "the cat sat on", "the man sat on"
EDITS = [{"stage": "blocks.0.attn.z", "op": "zero", "heads": [0]}]
TOKEN: dict[str, Any] = {"token": " the"}
LOCAL: dict[str, Callable[[LocalModel], Any]] = {
    "run": lambda model: model.run(PROMPT),
    "run with edits": lambda model: model.run(PROMPT, edits=EDITS, baseline=True),
    "run, a long prompt": lambda model: model.run("the cat sat on " * 100, "*.attn_out"),
    "generate": lambda model: model.generate(PROMPT, max_tokens=300, ignore_eos=True, n=2, logprobs=2),
}
CALLS: dict[str, Callable[[Client], Any]] = {
    "run": lambda client: client.run(PROMPT),
    "run with edits": lambda client: client.run(PROMPT, edits=EDITS, baseline=True),
    "logits": lambda client: client.logits(PROMPT, "all"),
    "logits of the first tokens": lambda client: client.logits(PROMPT, "all", top_k=3, logprobs=True),
    "patterns": lambda client: client.patterns(PROMPT),
    "compare": lambda client: client.compare(PROMPT, setting={"dtype": "float32"}),
    "generate": lambda client: client.generate(PROMPT, max_tokens=300, ignore_eos=True, n=2, logprobs=2),
    "generate with a trace": lambda client: client.generate(
        PROMPT, max_tokens=3, trace={"stages": "*.resid_post", "logit_lens": True}
    ),
    "one step of a trace": lambda client: client.generate(
        PROMPT, max_tokens=1, trace={"stages": "*.resid_post", "logit_lens": True}
    ).trace[0],  # type: ignore[index]
    "generate with edits": lambda client: client.generate(PROMPT, max_tokens=3, edits=EDITS, baseline=True),
    "events": lambda client: next(iter(client.stream(PROMPT, max_tokens=2))),
    "the last event": lambda client: list(client.stream(PROMPT, max_tokens=2))[-1],
    "direct": lambda client: client.attribute("direct", PROMPT, **TOKEN),
    "gradient": lambda client: client.attribute("gradient", PROMPT, **TOKEN),
    "integrated_gradients": lambda client: client.attribute("integrated_gradients", PROMPT, steps=2, **TOKEN),
    "attribution_patching": lambda client: client.attribute(
        "attribution_patching", PROMPT, corrupted=CORRUPTED, **TOKEN
    ),
    "patching": lambda client: client.attribute(
        "patching", PROMPT, corrupted=CORRUPTED, stages="blocks.0.attn.z", **TOKEN
    ),
    "logit_lens": lambda client: client.attribute("logit_lens", PROMPT),
    "a cell": lambda client: next(
        client.stream_sweep(PROMPT, CORRUPTED, token=" the", stages="blocks.0.attn.z", by=["head"])
    ),
    "model": lambda client: client.model(),
    "the first of the models": lambda client: client.models()[0],
    "the last of the models": lambda client: client.models()[-1],
    "status": lambda client: client.status(),
}


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return load("bundled")


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(model="bundled") as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[Client]:
    host, port = service.address
    with Client(f"http://{host}:{port}") as client:
        yield client


class Cells(HTMLParser):
    """The texts of the cells of a table, which must be well-formed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "td":
            self.rows[-1][-1] += data


def check_display(result: Any) -> None:
    lines = repr(result).splitlines()
    assert lines[0].startswith(type(result).__name__)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110
    assert "object at 0x" not in repr(result)
    rows = Cells(result._repr_html_()).rows
    assert 1 <= len(rows) <= 24
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize("call", LOCAL)
def test_every_result_of_load_fits_on_a_screen(call: str, model: LocalModel) -> None:
    check_display(LOCAL[call](model))


@pytest.mark.parametrize("call", CALLS)
def test_every_result_of_a_client_fits_on_a_screen(call: str, client: Client) -> None:
    check_display(CALLS[call](client))


def test_a_trace_shows_its_tokens_and_the_shapes_and_first_values_of_its_stages(model: LocalModel) -> None:
    trace = model.run(PROMPT, "blocks.0.attn.pattern")
    text = repr(trace)
    assert text.startswith("Trace: 'the cat sat on'\n")
    values = ", ".join(f"{value:.4g}" for value in trace["blocks.0.attn.pattern"][0, 0, 0].tolist())
    assert re.search(rf"\n  blocks\.0\.attn\.pattern +\(1, 8, 4, 4\) batch head query key +{re.escape(values)}\n", text)
    assert re.search(r"\('[^']+' 0\.\d", text), "the most likely token at the first position"
    (row,) = (row for row in Cells(trace._repr_html_()).rows if row[0] == "blocks.0.attn.pattern")
    assert row[1:] == ["(1, 8, 4, 4) batch head query key", values]
    assert re.search(r"\n  \.\.\. \d+ more\n", repr(model.run(PROMPT)))


def test_small_results_are_shown_on_one_line(model: LocalModel) -> None:
    trace = model.run(PROMPT, [])
    assert re.fullmatch(r"PositionPredictions\(.*\('[^']+' 0\.\d.*", repr(trace.predictions[0]))
    assert re.fullmatch(r"Prediction\(.*text='[^']+'.*\)", repr(trace.predictions[0][0]))
    assert repr(trace.tokens[0]) == "PositionedToken(id=2313, text='the', position=0)"


def test_long_lists_of_results_are_shown_in_part(model: LocalModel, client: Client) -> None:
    long = "the cat sat on " * 100
    stages = client.compare(PROMPT, setting={"dtype": "float32"}).stages
    for shown in (model.run(long, []).tokens, stages):
        lines = repr(shown).splitlines()
        assert len(lines) == 21
        assert re.fullmatch(r" \.\.\. \d+ more[)}]", lines[-1])
        assert max(map(len, lines)) <= 150


def test_markup_of_a_prompt_is_text_in_a_notebook(model: LocalModel) -> None:
    shown = model.run("<b>&amp;", [])._repr_html_()
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("resid_pre", 3), "blocks.3.resid_pre"),
        (("hook_resid_post", 0), "blocks.0.resid_post"),
        (("pattern", 2), "blocks.2.attn.pattern"),
        (("attn", 2), "blocks.2.attn.pattern"),
        (("z", 1, "attn"), "blocks.1.attn.z"),
        (("scale", 4, "ln2"), "blocks.4.ln2.scale"),
        ("blocks.1.hook_mlp_out", "blocks.1.mlp_out"),
    ],
)
def test_a_stage_is_named_as_in_transformerlens(key: Any, name: str, model: LocalModel) -> None:
    trace = model.run(PROMPT)
    assert trace[key].equal(trace[name])
    assert trace.dims(key) == trace.dims(name)


@pytest.mark.parametrize("stages", ["blocks.0.*", "blocks.[012].*", "blocks.[235].*", "embed", "*"])
def test_a_negative_number_of_a_block_is_refused_because_a_trace_may_lack_the_last_blocks(
    stages: str, model: LocalModel
) -> None:
    trace = model.run(PROMPT, stages)
    with pytest.raises(UnknownStage, match=r"blocks\.-1\.resid_pre.* number from 0"):
        trace["resid_pre", -1]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (("resid_pree", 3), "'blocks.3.resid_pree' is not among the stages of this trace; similar names: blocks.3."),
        (("resid_pre", 9), "'blocks.9.resid_pre' is not among"),
        (("pattern", 0, "mlp"), "'blocks.0.mlp.pattern' is not among"),
        ((), "is not among"),
        (3, "'3' is not among"),
    ],
)
def test_a_key_of_no_stage_is_an_error_with_similar_names(key: Any, hint: str, model: LocalModel) -> None:
    trace = model.run(PROMPT, "*.resid_pre")
    with pytest.raises(UnknownStage, match=re.escape(hint)):
        trace[key]
    assert key not in trace


def test_patterns_have_the_means_of_each_head(client: Client) -> None:
    found = client.patterns("the cat and the cat", layers=[1, 3], heads=[0, 2, 5])
    pattern = client.run("the cat and the cat", "blocks.3.attn.pattern", heads=[2])["blocks.3.attn.pattern"][0, 0]
    assert set(found.means) == {"previous", "first", "itself", "induction"}
    assert all(each.shape == (2, 3) for each in found.means.values())
    later = pattern[1:]
    assert found.means["first"][1, 1] == pytest.approx(later[:, 0].mean(), abs=0.01)
    assert found.means["previous"][1, 1] == pytest.approx(np.diagonal(later).mean(), abs=0.01)
    assert np.isnan(client.patterns(PROMPT).means["induction"]).all()
    assert not client.patterns(PROMPT, stage="scores").means
