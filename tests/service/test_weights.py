"""GET /weights and GET /weights/{name}: every number of every weight that a pass multiplies by."""

import base64
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forwardscope.results.weights import Weight, WeightList
from forwardscope.tensor_files import read_safetensors
from model.network.weight_parts import Table
from model.network.weight_views import WeightViews, tensor_views
from model.ops.summary import summarize
from model.worked_examples import WORKED_EXAMPLES, worked_example
from tests.service.running import PATIENCE_SECONDS, Running, Start, validate, wait_until

W_Q = "/weights/blocks.0.attn.W_Q"


def weights_of(service: Running) -> WeightViews:
    return WeightViews(service.checkpoint.model)


def get(service: Running, path: str, **query: str) -> dict[str, Any]:
    response = service.get(path, params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def error(service: Running, path: str, **query: str) -> tuple[int, str, str | None]:
    """The status, code and param of an error answer."""
    response = service.get(path, params=query or None)
    assert response.status_code >= 400, response.text[:1000]
    found = response.json()["error"]
    return response.status_code, found["code"], found["param"]


def test_the_list_has_every_weight_with_its_shape_and_all_parameters(tiny: Running) -> None:
    found = validate(WeightList, get(tiny, "/weights"))
    views = weights_of(tiny)
    assert list(found.weights) == list(views)
    for name, weight in found.weights.items():
        assert weight.shape == tuple(views[name].read().shape)
    own = sum(weight.num_parameters for weight in found.weights.values() if weight.tied_to is None)
    assert own == tiny.checkpoint.parameters.total


def test_a_weight_is_read_whole_with_its_summary(tiny: Running) -> None:
    for name, view in weights_of(tiny).items():
        answer = get(tiny, f"/weights/{name}")
        found, expected = validate(Weight, answer), view.read().float()
        assert (found.shape, found.full_shape) == (view.shape, view.shape)
        np.testing.assert_array_equal(np.float32(found.values), expected.numpy())
        assert found.summary is not None
        assert found.summary.l2 == pytest.approx(float(expected.norm()), rel=1e-5)
        assert found.summary.std == pytest.approx(float(expected.std(correction=0)), rel=1e-5)


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ({"head": "0"}, np.s_[:1]),
        ({"head": "-1", "d_model": "2:5"}, np.s_[-1:, 2:5]),
        ({"d_model": "-3:", "d_head": ":2"}, np.s_[:, -3:, :2]),
        ({"d_model": "1::4"}, np.s_[:, 1::4]),
        ({"d_model": "5, 0:2,-1,5"}, np.s_[:, [5, 0, 1, -1, 5]]),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "base64", "safetensors"])
def test_a_part_has_the_indices_that_the_query_names(
    tiny: Running, query: dict[str, str], index: Any, encoding: str
) -> None:
    whole = weights_of(tiny)["blocks.0.attn.W_Q"].read().float().numpy()
    response = tiny.get(W_Q, params={**query, "encoding": encoding})
    if encoding == "safetensors":
        arrays, answer = read_safetensors(response.content)
        (values,) = arrays.values()
        assert list(arrays) == ["blocks.0.attn.W_Q"]
    else:
        answer = response.json()
        values = np.array(validate(Weight, answer).values)
    np.testing.assert_array_equal(np.float32(values), whole[index])
    assert tuple(answer["shape"]) == whole[index].shape
    assert tuple(answer["full_shape"]) == whole.shape


def test_the_header_accept_chooses_safetensors_as_for_forward(tiny: Running) -> None:
    response = tiny.get(W_Q, headers={"Accept": "application/x-safetensors"})
    assert response.headers["content-type"] == "application/x-safetensors"
    arrays, _ = read_safetensors(response.content)
    np.testing.assert_array_equal(arrays["blocks.0.attn.W_Q"], weights_of(tiny)["blocks.0.attn.W_Q"].read().float())


def test_a_dtype_converts_the_numbers(tiny: Running) -> None:
    answer = get(tiny, W_Q, dtype="float16", encoding="base64", head="0")
    numbers = np.frombuffer(base64.b64decode(answer["values"]), "<f2").reshape(answer["shape"])
    expected = weights_of(tiny)["blocks.0.attn.W_Q"].read()[:1].half()
    assert answer["dtype"] == "float16"
    np.testing.assert_array_equal(numbers, expected.numpy())


def test_a_dtype_that_cannot_hold_a_number_is_refused(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "read", lambda table, rows, columns: torch.full((len(rows), len(columns)), 1e6))
    assert error(tiny, "/weights/embed.W_E", dtype="float16") == (400, "invalid_value", "dtype")


def test_the_detail_leaves_out_numbers_and_summary(tiny: Running) -> None:
    values, summary, none = (get(tiny, W_Q, detail=detail) for detail in ("values", "summary", "none"))
    assert {*values} - {*summary} == {"values"}
    assert {*summary} - {*none} == {"summary"}
    assert values["summary"] == pytest.approx(summary["summary"])


@pytest.mark.parametrize(
    ("path", "query", "expected"),
    [
        ("/weights/blocks.0.attn.W_q", {}, (404, "weight_not_found", "name")),
        ("/weights/blocks.99.attn.W_Q", {}, (404, "weight_not_found", "name")),
        (W_Q, {"head": "99"}, (400, "invalid_value", "head")),
        (W_Q, {"head": "0:99"}, (400, "invalid_value", "head")),
        (W_Q, {"head": "1:1"}, (400, "invalid_value", "head")),
        (W_Q, {"head": "0:1:0"}, (400, "invalid_value", "head")),
        (W_Q, {"head": "first"}, (400, "invalid_value", "head")),
        (W_Q, {"head": ""}, (400, "invalid_value", "head")),
        (W_Q, {"d_model": ",".join(["0:"] * 1000)}, (400, "invalid_value", "d_model")),
        (W_Q, {"d_vocab": "0"}, (400, "invalid_value", "d_vocab")),
        (W_Q, {"heads": "0"}, (422, "extra_forbidden", "heads")),
        (W_Q, {"detail": "all"}, (422, "literal_error", "detail")),
        (W_Q, {"model": "other"}, (404, "model_not_found", "model")),
        (W_Q, {"adapter": "other"}, (404, "adapter_not_found", "adapter")),
        ("/weights", {"names": "all"}, (422, "extra_forbidden", "names")),
    ],
)
def test_a_wrong_query_is_an_error_that_names_its_field(
    tiny: Running, path: str, query: dict[str, str], expected: tuple[int, str, str]
) -> None:
    assert error(tiny, path, **query) == expected


def test_a_parameter_that_occurs_twice_is_an_error(tiny: Running) -> None:
    assert error(tiny, f"{W_Q}?head=0&head=1") == (422, "duplicate_key", "head")


def test_an_unknown_name_is_answered_with_the_weight_that_was_meant(tiny: Running) -> None:
    for name, meant in {
        "model.layers.1.self_attn.q_proj.weight": "blocks.1.attn.W_Q",
        "W_E": "embed.W_E",
        "lm_head.weight": "unembed.W_U",
        "blocks.0.attn.W_q": "blocks.0.attn.W_Q",
        "blocks.0.mlp.W_int": "blocks.0.mlp.W_in",
    }.items():
        assert meant in tiny.get(f"/weights/{name}").json()["error"]["message"], name
    assert "2 layers, 0 to 1" in tiny.get("/weights/blocks.7.ln1.w").json()["error"]["message"]


def test_a_weight_that_is_too_large_is_refused_before_it_is_read(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_response_bytes=20_000)
    status, code, _ = error(service, "/weights/embed.W_E")
    assert (status, code) == (413, "response_too_large")
    assert get(service, "/weights/embed.W_E", detail="summary")["summary"]["non_finite"] == 0
    assert get(service, "/weights/embed.W_E", d_vocab="3")["shape"][0] == 1


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_worked_examples_show_their_weights_without_a_checkpoint(empty: Running, name: str) -> None:
    views = tensor_views(worked_example(name).weights)
    found = validate(WeightList, get(empty, "/weights", model=name))
    assert list(found.weights) == list(views)
    for weight in found.weights.values():
        answer = get(empty, f"/weights/{weight.name}", model=name)
        assert np.array(answer["values"]).tolist() == views[weight.name].read().tolist()
        assert answer["dtype"] == "float64"


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_weight_shows_its_format_and_the_numbers_of_the_pass(
    start: Start, tiny_directory: Path, quantize: str
) -> None:
    service = start(model=str(tiny_directory), quantize=quantize)
    found = validate(WeightList, get(service, "/weights")).weights
    assert {each.quantization for name, each in found.items() if name.endswith(("W_Q", "W_K", "W_in", "W_out"))} == {
        {"int8": "q8_0", "int4": "int4"}[quantize]
    }
    assert found["unembed.W_U"].quantization == "q8_0"
    assert found["embed.W_E"].quantization is None
    answer = get(service, "/weights/blocks.0.mlp.W_in", d_model="3,17")
    whole = weights_of(service)["blocks.0.mlp.W_in"].read()
    np.testing.assert_array_equal(np.float32(answer["values"]), whole[[3, 17]].float())


def test_a_request_whose_client_has_gone_is_read_no_further(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block waits until the client has gone. The job then ends before the next one."""
    began, gone, blocks = threading.Event(), threading.Event(), list[Tensor]()
    executors = tiny.state.worker.executors
    monkeypatch.setattr("model.network.weight_views.NUMBERS_AT_A_TIME", 1)

    def wait(block: Tensor) -> Any:
        blocks.append(block)
        began.set()
        assert gone.wait(PATIENCE_SECONDS)
        return summarize(block)

    monkeypatch.setattr("forwardscope.local_weights.summarize", wait)
    connection = tiny.send_raw(b"GET /weights/embed.W_E?detail=summary HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert began.wait(PATIENCE_SECONDS)
    connection.close()
    wait_until(lambda: not executors._abandonments, "the server notices that the client has gone")
    gone.set()
    wait_until(lambda: executors.num_jobs == 0, "the job ends")
    assert len(blocks) == 1
