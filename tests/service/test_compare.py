"""POST /compare finds the first stage that differs, and refuses what it cannot compare."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from forwardscope.results.comparisons import Comparison
from service.executors import LANES
from service.routes.compare import open_sources
from tests.analysis.planted_faults import record
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start, running, validate, wait_until

PROMPT = [257, 69, 270, 273, 264, 40, 41, 42]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def comparing(directory: Path, tiny_directory: Path) -> Iterator[Running]:
    with running(model=str(tiny_directory), compare_directory=directory, max_compare_tokens=32) as service:
        yield service


def stages_of(service: Running) -> dict[str, Tensor]:
    """The stages of the served network, without those that follow from the logits."""
    stages = record(service.checkpoint.model, PROMPT)
    return {name: tensor.clone() for name, tensor in stages.items() if name not in ("probabilities", "loss")}


def upload(stages: dict[str, Tensor], **metadata: str) -> dict[str, str]:
    contiguous = {name: tensor.contiguous() for name, tensor in stages.items()}
    return {"tensors": base64.b64encode(save(contiguous, metadata or None)).decode()}


def compare(service: Running, b: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = service.answer("/compare", prompt=PROMPT, b=b, **fields)
    validate(Comparison, answer)
    return answer


def test_the_served_model_does_not_differ_from_its_own_stages(comparing: Running) -> None:
    answer = compare(comparing, upload(stages_of(comparing)))
    assert answer["verdict"] == {
        "differs": False,
        "first_stage": None,
        "last_equal_stage": "logits",
        "differing_stages": [],
        "hints": [],
    }
    assert answer["logits"]["top1_agreement"] == 1
    assert answer["dtype"] == "float32"


def test_the_first_stage_that_differs_is_named_with_its_mistake(comparing: Running) -> None:
    stages = stages_of(comparing)
    order = [1, 0, 2, 3, 5, 4]
    stages["blocks.1.attn.z"] = stages["blocks.1.attn.z"][:, :, order]
    answer = compare(comparing, upload(stages), per_head=True, per_position=True)
    verdict = answer["verdict"]
    assert verdict["first_stage"] == "blocks.1.attn.z"
    assert verdict["hints"][0]["code"] == "permuted_heads"
    assert "1, 0, 2, 3, 5, 4" in verdict["hints"][0]["message"]
    z = next(stage for stage in answer["stages"] if stage["name"] == "blocks.1.attn.z")
    assert [error > 0.1 for error in z["per_head"]] == [head != place for head, place in enumerate(order)]
    assert len(z["per_position"]) == len(PROMPT)


def test_four_bits_of_a_request_are_named_as_rounded(comparing: Running) -> None:
    assert "int4 rounded to nearest" in compare(comparing, {"setting": {"quantize": "int4"}})["b"]


@pytest.mark.parametrize("setting", [{}, {"dtype": "bfloat16"}, {"kernels": "torch"}])
def test_a_setting_without_quantization_does_not_differ(comparing: Running, setting: dict[str, str]) -> None:
    assert not compare(comparing, {"setting": setting})["verdict"]["differs"]


def test_quantized_weights_differ_from_the_first_linear_layer_on(comparing: Running) -> None:
    verdict = compare(comparing, {"setting": {"quantize": "int8", "kernels": "torch"}})["verdict"]
    assert verdict["first_stage"] == "blocks.0.attn.q"


def test_files_and_checkpoints_of_the_directory_can_be_compared(comparing: Running, directory: Path) -> None:
    save_file({name: each.contiguous() for name, each in stages_of(comparing).items()}, directory / "own.safetensors")
    write_checkpoint(directory / "other", rope_theta=10_000.0)
    assert not compare(comparing, {"path": "own.safetensors"})["verdict"]["differs"]
    verdict = compare(comparing, {"path": "other"})["verdict"]
    assert verdict["first_stage"] == "blocks.0.attn.rot_q"
    assert verdict["hints"][0]["code"] == "rotary_theta"


def test_no_path_outside_of_the_directory_can_be_named(
    comparing: Running, directory: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "secret.safetensors"
    save_file({"embed": torch.zeros(1)}, outside)
    (directory / "link.safetensors").symlink_to(outside)
    (directory / "loop.npz").symlink_to("loop.npz")
    messages = set()
    for path in (
        str(outside),
        "../secret.safetensors",
        "link.safetensors",
        "loop.npz",
        "missing.safetensors",
        ".",
        "a/../..",
    ):
        response = comparing.post("/compare", {"prompt": PROMPT, "b": {"path": path}})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "b.path"
        messages.add(error["message"].replace(repr(path), ""))
    assert len(messages) == 1, "the message tells whether a file exists"


def test_a_server_without_a_directory_reads_no_files(tiny: Running) -> None:
    response = tiny.post("/compare", {"prompt": PROMPT, "b": {"path": "own.safetensors"}})
    assert response.status_code == 400
    assert "--compare-directory" in response.json()["error"]["message"]


def test_other_token_ids_are_refused_with_the_first_position(comparing: Running) -> None:
    other = [*PROMPT[:3], 99, *PROMPT[4:]]
    b = upload(stages_of(comparing), input_ids=json.dumps(other))
    response = comparing.post("/compare", {"prompt": PROMPT, "b": b})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "position 3: A has 273, B has 99" in error["message"]


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ({"tensors": "%%%"}, "base64"),
        ({"tensors": base64.b64encode(b"no file").decode()}, "safetensors"),
        (upload({"unknown": torch.zeros(2)}), "is a stage"),
        (upload({"embed": torch.zeros(1, 3, 24)}), "(1, 3, 24), but embed is (1, 8, 24)"),
    ],
)
def test_stages_that_do_not_fit_are_refused(comparing: Running, b: dict[str, Any], message: str) -> None:
    response = comparing.post("/compare", {"prompt": PROMPT, "b": b})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_names_of_tensors_can_be_given(comparing: Running) -> None:
    stages = stages_of(comparing)
    b = upload({"mine": stages["blocks.0.resid_post"], "other": stages["embed"], "rest": torch.zeros(3)})
    answer = compare(comparing, b, names={"mine": "blocks.0.resid_post", "other": None})
    assert [stage["name"] for stage in answer["stages"]] == ["blocks.0.resid_post"]
    assert (answer["not_compared"], answer["num_not_compared"]) == (["rest"], 1)


def test_an_answer_names_a_limited_number_of_other_tensors(comparing: Running) -> None:
    others = {f"{index}{'é' * 190}": torch.zeros(1) for index in range(300)}
    answer = compare(comparing, upload(others | {"embed": stages_of(comparing)["embed"]}))
    assert (len(answer["not_compared"]), answer["num_not_compared"]) == (100, 300)
    assert max(map(len, answer["not_compared"])) <= 200


@pytest.mark.parametrize(
    ("tensors", "fields", "param", "message"),
    [
        ({}, {}, "b", "b: no tensor of b.tensors is a stage of this model; it has no tensors; give a map"),
        ({"embed": torch.zeros(1)}, {"names": {"x": None}}, "names", "names: 'x' is not a tensor of B"),
        (
            {"tokens": torch.tensor([1])},
            {},
            "prompt",
            "prompt: the token ids differ first at position 0: A has 257, B has 1",
        ),
    ],
)
def test_an_error_names_its_field_once(
    comparing: Running, tensors: dict[str, Tensor], fields: dict[str, Any], param: str, message: str
) -> None:
    response = comparing.post("/compare", {"prompt": PROMPT, "b": upload(tensors)} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"] == message


def test_a_long_name_of_a_tensor_is_an_error_that_shortens_it(comparing: Running) -> None:
    name = "x/" * 50_000 + "hidden_states.0"
    response = comparing.post("/compare", {"prompt": PROMPT, "b": upload({name: torch.zeros(1)})})
    assert response.status_code == 400
    assert "has a name of more than 200 characters" in response.json()["error"]["message"]
    assert len(response.text) < 1000


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0"])
def test_an_unknown_dtype_is_named(comparing: Running, dtype: str) -> None:
    header = json.dumps({"embed": {"dtype": dtype, "shape": [2], "data_offsets": [0, 1 if dtype == "F4" else 2]}})
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(1 if dtype == "F4" else 2)
    b = {"tensors": base64.b64encode(content).decode()}
    response = comparing.post("/compare", {"prompt": PROMPT, "b": b})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert not message.startswith("b.tensors: b.tensors")
    assert f"embed is {dtype}, which cannot be read" in message


def test_a_long_prompt_is_refused_before_it_is_computed(comparing: Running) -> None:
    response = comparing.post("/compare", {"prompt": [1] * 33, "b": {"setting": {}}})
    assert response.status_code == 413
    assert "--max-compare-tokens" in response.json()["error"]["message"]


def test_the_memory_of_a_comparison_is_limited(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_bytes=100_000)
    response = service.post("/compare", {"prompt": PROMPT, "b": {"setting": {}}})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "pass_too_large"


def test_a_file_is_not_unpacked_beyond_the_memory_of_a_pass(start: Start, tiny_directory: Path, tmp_path: Path) -> None:
    service = start(model=str(tiny_directory), compare_directory=tmp_path, max_pass_bytes=50 << 20)
    np.savez_compressed(tmp_path / "large.npz", embed=np.zeros((60 << 20) // 4, np.float32))
    response = service.post("/compare", {"prompt": PROMPT, "b": {"path": "large.npz"}})
    assert response.status_code == 400
    assert f"the limits are 8192 and {50 << 20}" in response.json()["error"]["message"]


def test_a_comparison_begins_only_after_the_files_of_an_abandoned_one_are_read(
    comparing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, began = threading.Event(), []

    def slow(*arguments: Any) -> Any:
        began.append(arguments)
        released.wait(20)
        return open_sources(*arguments)

    monkeypatch.setattr("service.routes.compare.open_sources", slow)
    comparing.send("/compare", {"prompt": PROMPT, "b": {"setting": {}}}).close()
    wait_until(lambda: len(began) == 1, "the first comparison reads")
    body = {"prompt": PROMPT, "b": {"setting": {}}}
    connections = [comparing.send("/compare", body) for _ in range(LANES["comparisons"].max_waiting or 0)]
    try:
        wait_until(lambda: comparing.metric("num_requests_waiting") == len(connections), "the others wait")
        assert comparing.post("/compare", body).status_code == 429
        assert len(began) == 1, "two comparisons read files at the same time"
    finally:
        released.set()
    for connection in connections:
        with connection:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_generations_go_on_during_a_comparison(comparing: Running) -> None:
    """A comparison has a thread of its own."""
    before = comparing.answer("/generate", prompt=PROMPT, max_tokens=8, ignore_eos=True, temperature=0)
    connection = comparing.send("/compare", {"prompt": PROMPT, "b": {"setting": {"quantize": "int8"}}})
    with connection:
        during = comparing.answer("/generate", prompt=PROMPT, max_tokens=8, ignore_eos=True, temperature=0)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    assert during["tokens"] == before["tokens"]


def test_loaded_files_stay_as_they_are(comparing: Running, tiny_directory: Path) -> None:
    before = {name: each.clone() for name, each in load_file(tiny_directory / "model.safetensors").items()}
    compare(comparing, {"setting": {"dtype": "bfloat16"}})
    after = load_file(tiny_directory / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
