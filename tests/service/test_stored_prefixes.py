"""Stored prefixes: the same bits after a restart, and neither damaged files nor a slow disk do harm."""

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.block_files import BlockFiles
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine
from model.engine.network_identity import network_identity
from model.engine.request import Request
from model.errors import InvalidField
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from service import stored_prefixes
from service.settings import Settings
from service.stored_prefixes import StoredPrefixes
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.engine.test_adapters import random_adapters, served
from tests.engine.test_recorded_traces import assert_same_bits
from tests.service.running import running, wait_until
from tests.tiny import CONFIGS, build

SIZE, LIMIT = 4, 1 << 24  # tokens of a block; bytes


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the thread that reads files may get no time for a while."""
    monkeypatch.setattr(stored_prefixes, "SECONDS_OF_LOAD", 30.0)


def files_of(directory: Path, model: Transformer, **options: object) -> BlockFiles:
    dtype = model.embed.weight.dtype
    block_bytes = SIZE * bytes_of_token(model.config, dtype, str(options.get("kv_cache_dtype", "auto")))  # type: ignore[arg-type]
    return BlockFiles(directory, repr(options).encode().ljust(16), block_bytes, LIMIT)


def restarted(directory: Path, model: Transformer, files: BlockFiles | None = None, **options: object) -> Engine:
    """An engine that has computed nothing yet, over a directory of stored prefixes."""
    engine = new_engine(model, **options)  # type: ignore[arg-type]
    files = files or files_of(directory, model, **options)
    return Engine(model, None, engine.config, random_adapters(model), open_store=partial(StoredPrefixes, files))


def run_and_close(engine: Engine, *requests: Request) -> dict[tuple[str, int], Result]:
    results = run(engine, *requests)
    engine.close()
    return results


def num_cached(results: dict[tuple[str, int], Result]) -> dict[str, int]:
    return {id: result.num_cached for (id, _), result in results.items()}


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("llama", "auto"), ("gemma2", "int8")])
def test_after_a_restart_no_bit_changes_and_prefixes_are_shared_as_in_memory(
    name: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    model = served(name, torch.bfloat16)
    plain = ask("plain", prompt(30), max_tokens=11)
    requests = [
        plain,
        replace(plain, id="salted", cache_salt="a"),
        replace(plain, id="adapted", adapter="a"),
    ]
    expected = run_and_close(restarted(tmp_path, model, kv_cache_dtype=kv_cache_dtype), *requests)
    others = [replace(plain, id="other salt", cache_salt="b"), replace(plain, id="other adapter", adapter="b")]
    engine = restarted(tmp_path, model, kv_cache_dtype=kv_cache_dtype)
    found = run_and_close(engine, *requests, *others)
    assert num_cached(found) == {"plain": 28, "salted": 28, "adapted": 28, "other salt": 0, "other adapter": 0}
    assert_same_bits({key: found[key] for key in expected}, expected)
    counts = engine.stats().stored_prefixes
    assert counts.num_read == 3 * 7
    assert counts.num_written == 2 * 10  # of 30 and 10 tokens, for the two others
    longer = ask("longer", [*plain.prompt_ids, *expected["plain", 0].ids], max_tokens=3)
    found = run_and_close(restarted(tmp_path, model, kv_cache_dtype=kv_cache_dtype), longer)
    assert num_cached(found) == {"longer": 40}, "generated tokens are stored, too"
    assert_same_bits(found, run(new_engine(model, kv_cache_dtype=kv_cache_dtype), longer))  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "other name"])
def test_a_damaged_file_is_a_miss_with_one_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, request = served("llama"), ask("1", prompt(30))
    expected = run_and_close(restarted(tmp_path, model), request)
    paths = sorted(tmp_path.glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(paths[3].read_bytes())
    if damage == "flipped bit":
        content[-1] ^= 1
    content = {"truncated": content[:-1], "other name": bytearray(paths[2].read_bytes())}.get(damage, content)
    paths[3].write_bytes(content)
    for num_blocks in (3, 7):
        found = run_and_close(restarted(tmp_path, model), request)
        assert_same_bits(found, expected)
        assert num_cached(found) == {"1": 4 * num_blocks}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is damaged" in caplog.text


def test_other_requests_run_while_a_disk_hangs_and_nobody_waits_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_prefixes, "SECONDS_OF_LOAD", 1.0)
    model, request, other = served("llama"), ask("1", prompt(30)), ask("2", prompt(30, seed=2))
    expected = run_and_close(restarted(tmp_path, model), request)
    expected |= run(new_engine(model), other)
    files, returns = files_of(tmp_path, model), threading.Event()
    read = files.read

    def hang(digest: bytes) -> memoryview | None:
        returns.wait(60)
        return read(digest)

    monkeypatch.setattr(files, "read", hang)
    drive = Drive(restarted(tmp_path, model, files, num_blocks=24))
    drive.add(request, other)
    drive.until(lambda: drive.results["2", 0].end is not None)
    assert not drive.results["1", 0].ids
    drive.add(replace(request, id="aborted"))
    drive.step()
    drive.abort("aborted")
    drive.until(lambda: drive.results["1", 0].end is not None)
    drive.add(replace(request, id="3", cache_salt="other"), ask("4", prompt(30)[:20], max_tokens=2))
    drive.finish()
    returns.set()
    drive.engine.close()
    assert_same_bits({key: drive.results[key] for key in expected}, expected)
    assert drive.results["1", 0].num_cached == 0
    assert drive.engine.stats().stored_prefixes.num_read == 0


def test_a_block_that_the_cache_has_reused_is_skipped_and_never_stored_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = served("llama"), [ask(str(seed), prompt(40, seed=seed)) for seed in range(3)]
    expected = [run(new_engine(model), each) for each in requests]
    files, goes_on = files_of(tmp_path, model), threading.Event()
    touch = files.touch
    monkeypatch.setattr(files, "touch", lambda digest: goes_on.wait(60) and touch(digest))
    engine = restarted(tmp_path, model, files, num_blocks=13)
    for each in requests:
        run(engine, each)
    goes_on.set()
    engine.close()
    counts = engine.stats().stored_prefixes
    assert counts.num_skipped > 0
    assert counts.num_written == len(list(tmp_path.glob("*/*"))) > 0
    for each, result in zip(requests, expected, strict=True):
        assert_same_bits(run_and_close(restarted(tmp_path, model), each), result)


def test_a_running_process_finds_the_blocks_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_prefixes, "REFRESH_SECONDS", 0.01)
    model, request = served("llama"), ask("1", prompt(30))
    engine = restarted(tmp_path, model)
    expected = run_and_close(restarted(tmp_path, model), request)
    drive = Drive(engine)
    store = engine._store
    assert isinstance(store, stored_prefixes.StoredPrefixes)
    wait_until(lambda: store._known == store._files.names() != set(), "all blocks of the other one are found")
    drive.add(request)
    found = drive.finish()
    assert num_cached(found) == {"1": 28}
    assert_same_bits(found, expected)


@pytest.mark.slow
def test_a_served_model_answers_as_before_its_restart_and_counts_what_it_read(tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time, there was a little girl. " * 8, "max_tokens": 8, "temperature": 0}
    answers, counts = [], []
    for _ in range(2):
        with running(model="bundled", prefix_cache_directory=tmp_path, prefix_cache_bytes=LIMIT) as service:
            answers.append(service.answer("/generate", **body))
        counts.append(service.state.engine.stats().stored_prefixes)  # type: ignore[union-attr]
    cached = [answer["usage"].pop("prompt_tokens_details", None) for answer in answers]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert counts[0].num_written > counts[1].num_read > 0 == counts[1].num_written, cached
    assert counts[1].num_skipped == 0


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prefix_cache_bytes", {"prefix_cache_bytes": "1G"}),
        ("prefix_cache_directory", {"prefix_cache_directory": "/tmp", "model": "none"}),
        ("prefix_cache_directory", {"prefix_cache_directory": "/tmp", "tensor_parallel": 2}),
    ],
)
def test_a_setting_without_effect_is_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{field}: "):
        Settings(**options)


def hashes(number: int, first: int = 0) -> Sequence[bytes]:
    return [index.to_bytes(32, "big") for index in range(first, first + number)]


WRITE = """
import sys
from pathlib import Path
from model.engine.block_files import BlockFiles, logger

def fail(*message: object) -> None:
    raise AssertionError(message)

logger.warning = fail  # as for a block that is only partly written
files = BlockFiles(Path(sys.argv[1]), bytes(16), 968, 64_000)
for index in range(400):
    digest = (index // 2 * 2 + int(sys.argv[2]) * index % 2).to_bytes(32, "big")
    assert files.write(digest, digest[-1:] * 968)
    content = files.read(digest)
    assert content is None or content == digest[-1:] * 968
assert "torch" not in sys.modules
"""


def test_two_processes_write_one_directory_within_its_limit_and_read_only_whole_blocks(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), str(number)]) for number in range(2)]
    assert [process.wait(300) for process in started] == [0, 0]
    paths = list(tmp_path.glob("*/*"))
    assert 40 <= len(paths) <= 68  # 64 files fit, and one process may exceed the limit by a sixteenth
    files = BlockFiles(tmp_path, bytes(16), 968, 64_000)
    assert all(files.read(digest) is not None for digest in files.names())
    assert all(len(path.name) == 64 for path in paths)


def test_the_blocks_that_were_used_longest_ago_leave_and_other_files_stay(tmp_path: Path) -> None:
    files, other = (BlockFiles(tmp_path, bytes(15) + bytes([i]), 968, 32_000) for i in range(2))
    kept = tmp_path / "notes.txt"
    kept.write_text("not a block")
    oldest = hashes(1, first=999)[0]
    assert other.write(oldest, bytes(968))
    for digest in hashes(26):
        assert files.write(digest, bytes(968))
    files.touch(hashes(1)[0])
    for digest in hashes(40, first=100):
        assert files.write(digest, bytes(968))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 32_000
        assert files.touch(hashes(1)[0])
    assert kept.exists()
    assert not other.touch(oldest)
    assert files.names() >= {hashes(1)[0], *hashes(28, first=112)}
    with pytest.raises(InvalidField, match="prefix_cache_bytes: 999 bytes are too few"):
        BlockFiles(tmp_path, bytes(16), 968, 999)
    with pytest.raises(InvalidField, match=r"prefix_cache_directory: .*notes.txt cannot be used"):
        BlockFiles(kept, bytes(16), 968, 32_000)


def test_a_full_disk_is_one_warning_and_the_block_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BlockFiles(tmp_path, bytes(16), 968, 32_000)

    def no_space(self: Path, target: Path) -> None:
        assert self.stat().st_size == 32 + 968
        assert not target.exists(), "no process may see a part of a block"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", no_space)
        assert not any(files.write(digest, bytes(968)) for digest in hashes(3))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert not list(tmp_path.glob("*/*"))
    assert files.write(hashes(1)[0], bytes(968))


def test_blocks_are_stored_again_after_somebody_has_emptied_the_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "prefixes"
    files = BlockFiles(directory, bytes(16), 968, 32_000)
    for folder in directory.iterdir():
        folder.rmdir()
    assert files.write(hashes(1)[0], bytes(968))
    assert not caplog.records
    shutil.rmtree(directory)  # the whole directory: whoever deletes it makes it again
    assert not files.write(hashes(1)[0], bytes(968))
    directory.mkdir()
    assert files.write(hashes(1)[0], bytes(968))
    assert len(files.names()) == len(caplog.records) == 1


def test_the_identity_of_a_network_shows_its_files_and_each_setting_that_changes_a_bit(tmp_path: Path) -> None:
    config = replace(CONFIGS["llama"], d_head=16)
    weights, file = build(config).state_dict(), tmp_path / "weights"
    file.write_text("1")

    def identity(block_size: int = 16, **options: object) -> bytes:
        model = prepare_model(config, dict(weights), **options)  # type: ignore[arg-type]
        return network_identity(model, [file], "auto", block_size)

    plain = identity()
    assert plain == identity()
    file.write_text("22")
    found = [plain, identity(), identity(quantize="int8"), identity(kernels="torch"), identity(block_size=8)]
    weights["blocks.0.mlp.up.weight"][0, 0] += 0.1
    assert len({*found, identity()}) == 6
