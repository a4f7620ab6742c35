"""A harvest has the rows of single passes, and an interrupted one goes on to the same files."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from forwardscope.local import LocalModel, load
from forwardscope.local_harvest import Harvest
from model.analysis.harvest import passes
from model.analysis.harvest.manifest import Manifest
from model.analysis.harvest.passes import run_stages
from model.analysis.harvest.statistics import EDGES, Histogram
from model.checkpoints.load import load_checkpoint
from model.errors import InvalidField
from model.tracing.tap import Recorder
from service.commands import harvest as command
from tests.service.checkpoints import CONTEXT, write_checkpoint

TEXTS = ["the cat sat on the mat", "and the dög ran ☃ on the log; that was that\r\n" * 3, "", "the cats ran there " * 9]
STAGES = ["blocks.0.attn.z", "blocks.1.resid_pre"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return LocalModel(load_checkpoint(str(directory), kernels="auto"))


def contexts_of(found: Harvest) -> Iterator[slice]:
    """The rows of each context."""
    starts = [*(found.positions == 0).nonzero()[:, 0].tolist(), found.num_tokens]
    return (slice(start, end) for start, end in pairwise(starts))


@pytest.mark.parametrize("packed", [True, False])
def test_the_rows_of_each_context_are_those_of_a_pass_over_it_alone(
    model: LocalModel, tmp_path: Path, packed: bool
) -> None:
    found = model.harvest(TEXTS, STAGES, tmp_path, context=30, packed=packed, file_bytes=20_000)
    assert len(list(found.parts)) > 1
    assert found.is_complete
    for rows in contexts_of(found):
        trace = model.run(found.ids[rows].tolist(), STAGES)
        assert all(torch.equal(found[name][rows], trace[name][0]) for name in STAGES)
        assert packed or len(set(found.documents[rows].tolist())) == 1
    lengths = [rows.stop - rows.start for rows in contexts_of(found)]
    assert max(lengths) == 30
    if packed:
        assert set(lengths[:-1]) == {30}


def test_every_token_of_the_corpus_is_in_one_row_with_its_characters(model: LocalModel, tmp_path: Path) -> None:
    found = model.harvest(TEXTS, "embed", tmp_path, context=30)
    end_id = model.checkpoint.generation.eos_token_ids[0]
    assert found.ids.tolist() == [each for text in TEXTS for each in [*model.to_tokens(text), end_id]]
    for number, text in enumerate(TEXTS):
        own = found.documents == number
        spans = list(zip(found.begins[own].tolist(), found.ends[own].tolist(), strict=True))
        assert spans.pop() == (len(text), len(text))
        assert {place for begin, end in spans for place in range(begin, end)} == set(range(len(text)))
    assert model.to_text(found.ids[:2].tolist()) == TEXTS[0][: int(found.ends[1])]


def test_nothing_after_the_last_wanted_stage_is_computed(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("computed")

    network = model.checkpoint.model
    monkeypatch.setattr(network.blocks[1], "forward", never)
    monkeypatch.setattr(network, "compute_logits", never)
    assert model.harvest(TEXTS, "blocks.0.resid_post", tmp_path).is_complete


def interrupted(
    model: LocalModel, directory: Path, num_passes: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Begin a harvest that fails after some passes."""
    left = [num_passes]

    def run_some(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        run_stages(*args)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "run_stages", run_some)
        with pytest.raises(KeyboardInterrupt):
            model.harvest(TEXTS, STAGES, directory, **options)


@pytest.mark.parametrize("packed", [True, False])
def test_a_harvest_that_was_interrupted_goes_on_to_the_same_files(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    options = {"context": 20, "packed": packed, "file_bytes": 12_000}
    whole = model.harvest(TEXTS, STAGES, tmp_path / "whole", **options)
    for num_passes in (0, 4, 7):
        directory = tmp_path / str(num_passes)
        interrupted(model, directory, num_passes, monkeypatch, **options)
        if num_passes:
            assert not Harvest(directory).is_complete
            assert Harvest(directory).num_tokens > 20 * num_passes - 60, "at most one file is lost"
        model.harvest(TEXTS, STAGES, directory, **options)
        assert (directory / "manifest.json").read_text() == (tmp_path / "whole/manifest.json").read_text()
    assert len(list(whole.parts)) > 3


def test_a_damaged_file_is_computed_again(model: LocalModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"context": 20, "file_bytes": 12_000}
    model.harvest(TEXTS, STAGES, tmp_path, **options)
    manifest, path = (tmp_path / "manifest.json").read_text(), tmp_path / "00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    model.harvest(TEXTS, STAGES, tmp_path, **options)
    assert path.read_bytes() == content
    assert (tmp_path / "manifest.json").read_text() == manifest
    assert "00002.safetensors is missing or damaged" in caplog.text


def test_a_directory_with_another_harvest_or_other_files_is_refused(model: LocalModel, tmp_path: Path) -> None:
    model.harvest(TEXTS, STAGES, tmp_path / "a", context=20)
    with pytest.raises(InvalidField, match=r"out: .*another harvest: context is 20 there and 21 here"):
        model.harvest(TEXTS, STAGES, tmp_path / "a", context=21)
    with pytest.raises(InvalidField, match="another harvest: corpus is"):
        model.harvest(TEXTS[:1], STAGES, tmp_path / "a", context=20)
    with pytest.raises(InvalidField, match=r"out: .*has other files"):
        model.harvest(TEXTS, STAGES, tmp_path)


def test_a_directory_with_the_harvest_of_another_corpus_of_the_same_size_is_refused(
    model: LocalModel, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    pairs: list[tuple[Any, Any]] = [(["a cat"], ["a dog"]), ([[1, 2]], [[1, 3]]), (path, path)]
    for index, (corpus, other) in enumerate(pairs):
        path.write_text("a cat")
        model.harvest(corpus, STAGES, tmp_path / str(index))
        assert model.harvest(corpus, STAGES, tmp_path / str(index)).is_complete
        path.write_text("a dog")
        with pytest.raises(InvalidField, match="another harvest: corpus is"):
            model.harvest(other, STAGES, tmp_path / str(index))


def test_a_harvest_that_was_killed_in_its_first_file_goes_on(model: LocalModel, tmp_path: Path) -> None:
    (tmp_path / "unfinished").write_bytes(b"{")
    assert model.harvest(TEXTS, STAGES, tmp_path).is_complete
    assert not (tmp_path / "unfinished").exists()


def test_files_of_every_kind_have_the_same_rows(model: LocalModel, tmp_path: Path) -> None:
    tokens = [model.to_tokens(text) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"story": text}) + "\n\n" for text in TEXTS))
    (tmp_path / "ids.jsonl").write_text("".join(f"{ids}\n" for ids in tokens))
    pq.write_table(pa.table({"other": [1] * len(TEXTS), "story": TEXTS}), tmp_path / "texts.parquet")
    pq.write_table(pa.table({"story": tokens}), tmp_path / "ids.parquet")
    paths = []
    for index, text in enumerate(TEXTS):
        paths.append(tmp_path / f"{index}.txt")
        paths[-1].write_bytes(text.encode())
    expected = model.harvest(TEXTS, STAGES, tmp_path / "expected")
    corpora: list[Any] = [
        paths,
        tokens,
        *(tmp_path / f"{kind}.{end}" for kind in ("texts", "ids") for end in ("jsonl", "parquet")),
    ]
    for index, corpus in enumerate(corpora):
        found = model.harvest(corpus, STAGES, tmp_path / str(index), field="story")
        assert torch.equal(found.ids, expected.ids)
        assert all(torch.equal(found[name], expected[name]) for name in STAGES)
        has_text = corpus is paths or (isinstance(corpus, Path) and "texts" in corpus.name)
        assert torch.equal(found.ends, expected.ends if has_text else torch.full_like(expected.ends, -1))


@pytest.mark.parametrize(
    ("corpus", "stages", "options", "message"),
    [
        ([], "embed", {}, "corpus: is empty"),
        ([""], "embed", {"packed": False}, "corpus: has no tokens"),
        ([[1, 284]], "embed", {}, "corpus: document 0 is neither a text nor a list of token ids from 0 to 283"),
        ("a", "blocks.9.resid_post", {}, "stages: .*matches no stage"),
        ("a", "blocks.0.attn.pattern", {}, "stages: .*has a number for each key"),
        ("a", "logits", {}, "stages: logits is not harvested"),
        ("a", "embed", {"context": CONTEXT + 1}, "context: 65 must be from 1 to 64"),
        ("a", "embed", {"store": "int8"}, "store: 'int8' is not auto, float32, bfloat16 or float16"),
        ("a", "embed", {"statistics": "median"}, "statistics: 'median' is not"),
        ("a", "embed", {"top_k": 0}, "top_k: 0 must be from 1"),
        ("a", "embed", {"top_k": 3}, "top_k: counts examples of the statistic top"),
        ("a", "embed", {"layers": 0}, "layers: is not an option"),
        (["a", "b\ud800"], "embed", {}, "corpus: .*contains a lone surrogate"),
        ("a", [], {}, "stages: is empty; name at least one stage"),
        ("a", "embed", {"context": 1.5}, r"context: 1\.5 is not an integer"),
        ("a", "embed", {"file_bytes": "256M"}, "file_bytes: '256M' is not an integer"),
        ("a", "embed", {"packed": "no"}, "packed: 'no' is not True or False"),
        ("a", "embed", {"field": 3}, "field: 3 is not a text"),
    ],
)
def test_a_wrong_argument_is_named(
    model: LocalModel, tmp_path: Path, corpus: Any, stages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.harvest(corpus, stages, tmp_path / "out", **options)


def test_rows_are_converted_and_a_number_too_large_for_float16_is_an_error(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model.harvest(TEXTS, STAGES, tmp_path / "plain")
    for store in ("bfloat16", "float16"):
        found = model.harvest(TEXTS, STAGES, tmp_path / store, store=store)
        assert all(torch.equal(found[name], plain[name].to(getattr(torch, store))) for name in STAGES)
    record = Recorder.__call__
    monkeypatch.setattr(Recorder, "__call__", lambda self, name, tensor: record(self, name, 1e6 * tensor))
    with pytest.raises(InvalidField, match=r"store: blocks.0.attn.z has numbers beyond 65,504"):
        model.harvest(TEXTS, STAGES, tmp_path / "large", store="float16")


def test_statistics_are_those_of_the_rows_also_after_an_interruption(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = model.harvest(TEXTS, STAGES, tmp_path / "rows", context=20)
    options: dict[str, Any] = {"context": 20, "statistics": ["covariance", "histogram", "top"], "top_k": 3}
    monkeypatch.setattr("model.analysis.harvest.statistics.SECONDS_PER_FILE", 0.0)
    interrupted(model, tmp_path / "out", 4, monkeypatch, **options)
    assert 0 < Harvest(tmp_path / "out").num_tokens < rows.num_tokens
    found = model.harvest(TEXTS, STAGES, tmp_path / "out", **options)
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".safetensors"]
    assert found.num_tokens == rows.num_tokens
    for name in STAGES:
        values = rows[name].flatten(1)
        own = found.statistics[name]
        assert own.mean is not None
        assert own.covariance is not None
        assert own.top is not None
        torch.testing.assert_close(own.mean, values.double().mean(0), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own.covariance, values.double().T.cov(), rtol=1e-10, atol=1e-14)
        assert own.histogram is not None
        for counts, numbers in zip(own.histogram, values.T, strict=True):
            expected = np.histogram(numbers, np.array([-np.inf, *own.edges.tolist(), np.inf]))[0]
            assert counts.tolist() == expected.tolist()
        assert torch.equal(own.top.values, values.topk(3, dim=0).values)
        index = values.argmax(0)
        for column in ("ids", "documents", "begins", "ends", "positions"):
            assert torch.equal(getattr(own.top, column)[0], getattr(rows, column)[index])
    variances = model.harvest(TEXTS, STAGES, tmp_path / "mean", context=20, statistics=["mean"]).statistics
    for name in STAGES:
        assert variances[name].covariance is None
        torch.testing.assert_close(variances[name].variance, rows[name].flatten(1).double().var(0))


def test_a_bin_of_a_histogram_has_its_lower_edge_and_not_its_upper_one() -> None:
    numbers = torch.cat([EDGES, torch.tensor([0.0, 1e9, -1e9, 3.0])])
    histogram = Histogram(torch.zeros((1, len(EDGES) + 1), dtype=torch.int64))
    histogram.add(numbers[:, None])
    expected = np.histogram(numbers, np.array([-np.inf, *EDGES.tolist(), np.inf]))[0]
    assert histogram.counts[0].tolist() == expected.tolist()


@pytest.mark.slow
def test_a_calibrated_model_is_named_and_the_command_harvests_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat.")
    model = load("bundled", quantize="int4")
    expected = model.harvest(tmp_path / "text.txt", "blocks.0.attn_out", tmp_path / "expected")
    line = ["bundled", str(tmp_path / "text.txt"), "--stages", "blocks.0.attn_out", "--quantize", "int4"]
    monkeypatch.setattr(sys, "argv", ["harvest", *line, "--out", str(tmp_path / "found")])
    command.main()
    found = Harvest(tmp_path / "found")
    assert torch.equal(found["blocks.0.attn_out"], expected["blocks.0.attn_out"])
    assert found.settings == expected.settings
    assert (found.settings["quantization"], model.model().quantization) == ("int4", "int4")
    own = model.compare("a b", setting={"quantize": "int4"})
    assert own.b == "bundled (bfloat16, int4, auto)"
    assert own.logits == model.compare("a b", setting={}).logits


@pytest.mark.slow
def test_a_killed_command_loses_at_most_one_file(tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text((json.dumps("Once upon a time there was a cat named Tom. " * 20) + "\n") * 120)
    command = [sys.executable, "-m", "forwardscope", "harvest", "bundled", str(source)]
    command += ["--stages", "blocks.*.resid_post", "--context", "256", "--file-bytes", "1M"]
    killed = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "killed").glob("0*.safetensors"))) < 3:
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = Manifest.read(tmp_path / "killed")
    assert not before.is_complete
    finished = [tmp_path / "killed" / each.name for each in before.files]
    assert len(finished) >= 2
    written = [path.stat().st_mtime_ns for path in finished]
    subprocess.run([*command, "--out", str(tmp_path / "killed")], check=True, capture_output=True)
    assert [path.stat().st_mtime_ns for path in finished] == written
    whole = load("bundled").harvest(source, "blocks.*.resid_post", tmp_path / "whole", context=256, file_bytes=1 << 20)
    assert (
        json.loads((tmp_path / "killed/manifest.json").read_text())["files"]
        == json.loads((tmp_path / "whole/manifest.json").read_text())["files"]
    )
    assert whole.is_complete
