"""Named vectors over HTTP: stored, listed, replaced and deleted by clients with the API key, and used by edits."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from forwardscope import ApiError, Client
from model.checkpoints.load import load_checkpoint
from service.answers.prompts import prompt_ids
from service.loading import load_vectors
from service.settings import Settings
from tests.checkpoints.test_vector_files import HOSTILE, write_control_vector
from tests.service.running import PATIENCE_SECONDS, Running, running, wait_until
from tests.service.test_gate import answer_to_head

IDS = [5, 9, 77, 200, 31, 8]
WIDTH = 24
KEY = {"Authorization": "Bearer k-1"}
SAFETENSORS = {"Content-Type": "application/x-safetensors"}
STAGE = "blocks.0.resid_post"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors")
    save_file({"vector": torch.full((WIDTH,), 2.0)}, path / "two.safetensors")
    save_file({"a": torch.ones(WIDTH), "b": 3 * torch.ones(WIDTH)}, path / "several.safetensors")
    write_control_vector(path / "control.gguf", {"direction.1": np.full(WIDTH, 2, np.float32)})
    return path


@pytest.fixture(scope="module")
def keyed(tiny_directory: Path, directory: Path) -> Iterator[Running]:
    """A service with an API key, preloaded vectors, and room for two stored ones."""
    with running(
        model=str(tiny_directory), api_key="k-1", vectors=directory, max_vectors=2, max_vector_bytes=4096
    ) as service:
        service.client.headers.update(KEY)
        yield service


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete what a test has stored."""
    yield
    if "keyed" in request.fixturenames:
        service: Running = request.getfixturevalue("keyed")
        for entry in service.get("/vectors").json()["vectors"]:
            if entry["uploaded"]:
                assert service.client.delete(f"/vectors/{entry['name']}").status_code == 200


def put(service: Running, name: str, content: bytes, **options: Any) -> httpx.Response:
    return service.client.put(f"/vectors/{name}", content=content, **({"headers": SAFETENSORS} | options))


def vector_of(value: float) -> bytes:
    return save({"vector": torch.full((WIDTH,), float(value))})


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def steered(service: Running, vector: Any, stage: str = STAGE) -> list[float]:
    """The logits with a vector added to a stage."""
    edits = [{"stage": stage, "op": "add", "vector": vector}]
    found: list[float] = service.answer("/logits", prompt=IDS, edits=edits)["positions"][0]["logits"]
    return found


def test_a_stored_vector_gives_the_numbers_of_the_same_vector_in_the_request(keyed: Running) -> None:
    numbers = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    entry = put(keyed, "mine", save({"any": numbers})).json()
    assert entry == {
        "name": "mine",
        "uploaded": True,
        "by_stage": False,
        "tensors": [{"name": "any", "shape": [WIDTH], "dtype": "float32"}],
        "bytes": 4 * WIDTH,
    }
    assert steered(keyed, "mine") == steered(keyed, "mine/any") == steered(keyed, numbers.tolist())
    assert steered(keyed, "mine") != steered(keyed, (2 * numbers).tolist())


def test_a_vector_by_stage_changes_the_stages_that_it_has(keyed: Running) -> None:
    ones = torch.ones(WIDTH)
    assert put(keyed, "mine", save({STAGE: ones, "blocks.1.hook_resid_post": 2 * ones})).json()["by_stage"]
    edits = [{"stage": "*.resid_post", "op": "add", "vector": "mine", "scale": 0.5}]
    answer = keyed.answer("/logits", prompt=IDS, edits=edits)
    assert answer["edits"] == [{"stages": [STAGE, "blocks.1.resid_post"], "positions": [[0, 5]]}]
    apart = [
        {"stage": STAGE, "op": "add", "vector": [0.5] * WIDTH},
        {"stage": "blocks.1.resid_post", "op": "add", "vector": [1.0] * WIDTH},
    ]
    assert answer["positions"] == keyed.answer("/logits", prompt=IDS, edits=apart)["positions"]


def test_preloaded_vectors_are_named_by_their_files_and_cannot_be_changed(keyed: Running) -> None:
    listed = {entry["name"]: entry for entry in keyed.get("/vectors").json()["vectors"]}
    assert list(listed) == ["control", "several", "two"]
    assert not any(entry["uploaded"] for entry in listed.values())
    assert listed["control"]["tensors"] == [{"name": "blocks.1.resid_post", "shape": [WIDTH], "dtype": "float32"}]
    stage = "blocks.1.resid_post"
    assert steered(keyed, "control", "*.resid_post") == steered(keyed, "two", stage)
    assert steered(keyed, "two") == steered(keyed, [2.0] * WIDTH)
    assert steered(keyed, "several/b") == steered(keyed, [3.0] * WIDTH)
    assert error_of(put(keyed, "two", vector_of(1))) == (400, "name", "invalid_value")
    assert error_of(keyed.client.delete("/vectors/two")) == (400, "name", "invalid_value")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "there is no vector 'nope'; known are control, several, two"),
        ("../etc/passwd", "there is no vector '..'; known are"),
        ("several", "has several tensors; choose one: several/a, several/b"),
        ("several/c", "several has no tensor 'c'; it has a, b"),
        ("control/direction.1", "control has no tensor 'direction.1'; it has blocks.1.resid_post"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(keyed: Running, name: str, reason: str) -> None:
    edits = [{"stage": STAGE, "op": "zero"}, {"stage": STAGE, "op": "add", "vector": name}]
    for path in ("/forward", "/logits", "/generate", "/v1/completions"):
        response = keyed.post(path, {"prompt": IDS, "edits": edits})
        assert error_of(response) == (400, "edits.1.vector", "unknown_vector")
        assert reason in response.json()["error"]["message"]


def test_a_vector_is_replaced_and_deleted(keyed: Running) -> None:
    put(keyed, "mine", vector_of(1))
    assert steered(keyed, "mine") == steered(keyed, [1.0] * WIDTH)
    put(keyed, "mine", vector_of(7))
    assert steered(keyed, "mine") == steered(keyed, [7.0] * WIDTH)
    assert keyed.client.delete("/vectors/mine").json()["name"] == "mine"
    assert "mine" not in [entry["name"] for entry in keyed.get("/vectors").json()["vectors"]]
    response = keyed.client.delete("/vectors/mine")
    assert error_of(response) == (404, "name", "vector_not_found")


def test_a_wrong_file_leaves_the_stored_vector_as_it_is(keyed: Running) -> None:
    put(keyed, "mine", vector_of(1))
    assert put(keyed, "mine", b"nonsense").status_code == 400
    assert steered(keyed, "mine") == steered(keyed, [1.0] * WIDTH)


def test_a_request_that_waits_keeps_its_vector_when_it_is_replaced_or_deleted(keyed: Running) -> None:
    put(keyed, "mine", vector_of(1))
    expected = steered(keyed, [1.0] * WIDTH)
    changes: list[Callable[[], httpx.Response]] = [
        lambda: put(keyed, "mine", vector_of(9)),
        lambda: keyed.client.delete("/vectors/mine"),
    ]
    for change in changes:
        put(keyed, "mine", vector_of(1))
        with ThreadPoolExecutor(1) as pool:
            with keyed.blocked():
                pending = pool.submit(steered, keyed, "mine")
                wait_until(lambda: keyed.metric("num_requests_waiting") == 1, "the pass waits")
                assert change().status_code == 200
            assert pending.result(PATIENCE_SECONDS) == expected


@pytest.mark.parametrize(("path", "answer"), [("/logits", "positions"), ("/generate", "logprobs")])
def test_a_request_has_the_vectors_of_its_arrival_also_if_others_change_while_it_is_read(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, path: str, answer: str
) -> None:
    """The prompt of a source is read before the edit that names the vector."""
    store = keyed.state.vectors
    put(keyed, "mine", vector_of(9))
    other = next(entry.vector for entry in store if entry.name == "mine")
    source = {"stage": "embed", "op": "patch", "positions": [0], "source": {"prompt": IDS}}
    body: dict[str, Any] = {"prompt": IDS, "edits": [source, {"stage": STAGE, "op": "add", "vector": "mine"}]}
    body |= {} if path == "/logits" else {"max_tokens": 2, "temperature": 0, "logprobs": 0}
    changes: list[Callable[[], object]] = []

    async def read(*arguments: Any) -> list[int]:
        for change in changes:
            change()
        return await prompt_ids(*arguments)

    monkeypatch.setattr("service.answers.edits.prompt_ids", read)
    put(keyed, "mine", vector_of(1))
    expected = keyed.answer(path, **body)[answer]
    changes.append(lambda: store.put("mine", other))
    assert keyed.answer(path, **body)[answer] == expected
    changes.clear()
    assert keyed.answer(path, **body)[answer] != expected
    put(keyed, "mine", vector_of(1))
    changes.append(lambda: store.delete("mine"))
    assert keyed.answer(path, **body)[answer] == expected


def test_at_most_so_many_vectors_can_be_stored_and_the_metric_has_their_bytes(keyed: Running) -> None:
    before = keyed.metric("vector_bytes")
    for name in ("a", "b"):
        assert put(keyed, name, vector_of(1)).status_code == 200
    assert keyed.metric("vector_bytes") == before + 2 * 4 * WIDTH
    response = put(keyed, "c", vector_of(1))
    assert error_of(response) == (413, "name", "too_many_vectors")
    assert "--max-vectors" in response.json()["error"]["message"]
    assert put(keyed, "a", vector_of(2)).status_code == 200
    keyed.client.delete("/vectors/a")
    assert put(keyed, "c", vector_of(1)).status_code == 200


def test_a_large_vector_is_refused_before_its_body_arrives(keyed: Running) -> None:
    status, answer = answer_to_head(keyed, "PUT /vectors/a HTTP/1.1\r\nAuthorization: Bearer k-1")
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert "the limit is 4096" in answer["error"]["message"]
    response = put(keyed, "a", (piece for piece in [bytes(4000), bytes(4000)]))  # type: ignore[arg-type]
    assert error_of(response) == (413, "body", "body_too_large")


@pytest.mark.parametrize("name", ["-a", "a b", "a%00", "ä", "a" * 101, ".."])
def test_a_wrong_name_is_refused(keyed: Running, name: str) -> None:
    assert put(keyed, name, vector_of(1)).status_code in (400, 404, 405)  # `/vectors/..` is `/`, which has no PUT
    assert len(keyed.get("/vectors").json()["vectors"]) == 3


def test_another_content_type_is_refused(keyed: Running) -> None:
    response = put(keyed, "a", vector_of(1), headers={"Content-Type": "application/json"})
    assert error_of(response) == (422, "body", "content_type")


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_is_stored(keyed: Running, content: bytes) -> None:
    response = put(keyed, "mine", content)
    assert error_of(response)[:2] in ((400, "body"), (413, "body"))  # some files are over the limit
    assert len(keyed.get("/vectors").json()["vectors"]) == 3


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_without_an_api_key_vectors_cannot_be_changed(tiny: Running, method: str) -> None:
    status, answer = answer_to_head(tiny, f"{method} /vectors/a HTTP/1.1")
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (403, "api_key_required", "permission_error")
    assert "--api-key" in answer["error"]["message"]
    assert tiny.get("/vectors").json() == {"vectors": []}


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_wrong_key_cannot_change_vectors(keyed: Running, method: str) -> None:
    status, answer = answer_to_head(keyed, f"{method} /vectors/a HTTP/1.1\r\nAuthorization: Bearer k-2")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_the_client_stores_lists_and_deletes_vectors(keyed: Running) -> None:
    numbers = np.linspace(-1, 1, WIDTH)
    with Client(f"http://127.0.0.1:{keyed.address[1]}", api_key="k-1") as client:
        assert client.put_vector("mine", numbers).shapes == {"vector": (WIDTH,)}
        stored = client.put_vector("more", {STAGE: torch.ones(WIDTH, dtype=torch.bfloat16), "embed": [1, 2]})
        assert (stored.by_stage, stored.shapes) == (True, {STAGE: (WIDTH,), "embed": (2,)})
        assert [each.name for each in client.vectors()] == ["control", "mine", "more", "several", "two"]
        edit = {"stage": STAGE, "op": "add", "positions": range(2, 4)}
        by_name = client.logits(IDS, edits=[edit | {"vector": "mine"}])
        inline = client.logits(IDS, edits=[edit | {"vector": numbers}])
        assert np.array_equal(by_name.logits, inline.logits)
        assert by_name.edits[0].positions == ((2, 3),)
        assert client.delete_vector("mine").name == "mine"
        with pytest.raises(ApiError, match="there is no vector 'mine'"):
            client.logits(IDS, edits=[edit | {"vector": "mine"}])


def test_vectors_that_do_not_fit_the_model_end_the_start(tiny_directory: Path, tmp_path: Path) -> None:
    write_control_vector(tmp_path / "other.gguf", {"direction.1": np.ones(99, np.float32)}, hint="qwen2")
    settings = Settings(model=str(tiny_directory), vectors=tmp_path)
    with pytest.raises(ValueError, match=r"other\.gguf: direction\.1 has the shape \[99\], but d_model is 24"):
        load_vectors(load_checkpoint(str(tiny_directory)), settings)
