"""Adapters over HTTP: requests choose them by `model` or `adapter`, and every route computes with them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forwardscope import Client
from model.checkpoints.adapters import load_adapter
from model.checkpoints.load import load_checkpoint
from model.network.joint_passes import AdaptedNetwork
from service.loading import load_model
from service.settings import Settings
from tests.checkpoints.adapter_files import write_adapter
from tests.service.running import Running, running

IDS = [5, 9, 77, 200, 31, 8]


@pytest.fixture(scope="module")
def paths(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        "first": write_adapter(directory / "one", tiny_directory, seed=1),
        "second": write_adapter(directory / "two", tiny_directory, seed=2, targets=("q_proj", "v_proj"), r=3),
    }


@pytest.fixture(scope="module")
def served(tiny_directory: Path, paths: dict[str, Path]) -> Iterator[Running]:
    adapter = [f"{name}={path}" for name, path in paths.items()]
    with running(model=str(tiny_directory), adapter=adapter) as service:
        yield service


@pytest.fixture(scope="module")
def logits(tiny_directory: Path, paths: dict[str, Path]) -> dict[str | None, torch.Tensor]:
    """The logits of the last token of `IDS`, for each adapter and for none."""
    checkpoint = load_checkpoint(str(tiny_directory))
    adapters = {name: load_adapter(checkpoint, path) for name, path in paths.items()}
    return {
        name: AdaptedNetwork(checkpoint.model, adapters.get(name or ""))(torch.tensor([IDS]))[0, -1]
        for name in (None, *adapters)
    }


def error(service: Running, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = service.post(path, body)
    return response.status_code, response.json()["error"]


def chosen(name: str | None, by: str) -> dict[str, str]:
    return {} if name is None else {by: name}


def test_the_metrics_tell_an_endpoint_picker_which_adapters_are_loaded_and_since_when(served: Running) -> None:
    (line,) = (line for line in served.get("/metrics").text.splitlines() if "lora_requests_info{" in line)
    series, value = line.rsplit(" ", 1)
    labels = 'max_lora="2",running_lora_adapters="first,second",waiting_lora_adapters=""'
    assert series == f"forwardscope_lora_requests_info{{{labels}}}"
    assert time.time() - 600 < float(value) <= time.time()


@pytest.mark.parametrize("by", ["model", "adapter"])
@pytest.mark.parametrize("name", [None, "first", "second"])
class TestRoutes:
    def test_logits(self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str) -> None:
        answer = served.answer("/logits", prompt=IDS, **chosen(name, by))
        assert answer["model"] == (name or "tiny")
        torch.testing.assert_close(torch.tensor(answer["positions"][0]["logits"]), logits[name], atol=1e-4, rtol=0)

    def test_forward(self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str) -> None:
        stages = ["logits", "blocks.0.attn.lora_q", "blocks.1.mlp.lora_out"]
        answer = served.answer("/forward", prompt=IDS, stages=stages, detail="values", **chosen(name, by))
        assert answer["model"] == (name or "tiny")
        q, out, found = (torch.tensor(stage["values"]) for stage in answer["stages"])
        torch.testing.assert_close(found[0, -1], logits[name], atol=1e-4, rtol=0)
        assert (bool(q.any()), bool(out.any())) == (name is not None, name == "first")

    def test_attribute(
        self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str
    ) -> None:
        expected = float(logits[name][5] - logits[name][9])
        fields = {"prompt": IDS, "token": 5, "minus": 9, **chosen(name, by)}
        direct = served.answer("/attribute", method="direct", **fields)
        assert direct["logit"] == pytest.approx(expected, abs=1e-4)
        assert abs(direct["remainder"]) < 1e-4
        assert served.answer("/attribute", method="gradient", **fields)["value"] == pytest.approx(expected, abs=1e-4)
        sweep = served.answer("/attribute", method="patching", corrupted=IDS, stages="embed", **fields)
        assert sweep["stages"][0]["values"] == pytest.approx([expected] * len(IDS), abs=1e-4)
        lens = served.answer("/attribute", method="logit_lens", prompt=IDS, token=5, **chosen(name, by))
        assert lens["layers"][-1]["token"][0]["logit"] == pytest.approx(float(logits[name][5]), abs=1e-4)

    def test_generate(self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str) -> None:
        answer = served.answer("/generate", prompt=IDS, max_tokens=1, logprobs=0, temperature=0, **chosen(name, by))
        assert answer["model"] == (name or "tiny")
        assert answer["tokens"] == [int(logits[name].argmax())]
        assert answer["logprobs"][0]["logprob"] == pytest.approx(float(logits[name].log_softmax(-1).max()), abs=1e-4)

    def test_completions(
        self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str
    ) -> None:
        body = {"prompt": IDS, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = served.answer("/v1/completions", **body, **chosen(name, by))
        assert answer["model"] == (name or "tiny")
        assert answer["choices"][0]["token_ids"] == [int(logits[name].argmax())]

    def test_chats(self, served: Running, name: str | None, by: str) -> None:
        messages = [{"role": "user", "content": "the cat"}]
        found = served.answer("/v1/chat/completions", messages=messages, max_tokens=8, seed=1, **chosen(name, by))
        assert found["model"] == (name or "tiny")
        assert served.checkpoint.tokenizer is not None
        prompt = served.checkpoint.tokenizer.encode("the cat\n")
        same = served.answer("/generate", prompt=prompt, max_tokens=8, seed=1, **chosen(name, "adapter"))
        assert found["choices"][0]["message"]["content"] == same["text"]

    def test_a_traced_generation_shows_what_the_adapter_adds(
        self, served: Running, logits: dict[str | None, torch.Tensor], name: str | None, by: str
    ) -> None:
        trace = {"stages": ["*.lora_v"], "detail": "values"}
        body = {"prompt": IDS, "max_tokens": 2, "ignore_eos": True, "trace": trace}
        answer = served.answer("/generate", **body, **chosen(name, by))
        stages = [stage for step in answer["trace"] for stage in step["stages"]]
        assert len(stages) == 4
        assert all(bool(torch.tensor(stage["values"]).any()) == (name is not None) for stage in stages)


def test_the_client_chooses_an_adapter(served: Running, logits: dict[str | None, torch.Tensor]) -> None:
    with Client(f"http://127.0.0.1:{served.address[1]}") as client:
        found = client.logits(IDS, adapter="first").logits
        torch.testing.assert_close(torch.tensor(found)[0], logits["first"], atol=1e-4, rtol=0)
        assert client.generate(IDS, max_tokens=3, adapter="second").model == "second"
        assert client.run(IDS, "logits", adapter="second").model == "second"
        assert client.chat("the cat", max_tokens=3, adapter="second").model == "second"
        assert [each.kind for each in client.models()[:3]] == ["checkpoint", "adapter", "adapter"]


@pytest.mark.parametrize("by", ["model", "adapter"])
def test_weights_have_the_product_of_the_adapter(served: Running, by: str) -> None:
    changed = {"attn.W_Q": True, "attn.W_V": True, "attn.W_O": False, "mlp.W_in": False}
    for name, is_changed in changed.items():
        path = f"/weights/blocks.0.{name}"
        plain, adapted = served.get(path).json(), served.get(path, params={by: "second"}).json()
        assert (plain["adapter"], adapted["adapter"]) == (None, "second" if is_changed else None)
        assert (plain["values"] != adapted["values"]) == is_changed, name
    # What the adapter adds to q follows from the difference of the weights.
    answer = served.answer(
        "/forward", prompt=IDS, stages=["blocks.0.ln1.out", "blocks.0.attn.lora_q"], detail="values", adapter="second"
    )
    normed, added = (np.array(stage["values"])[0] for stage in answer["stages"])
    path = "/weights/blocks.0.attn.W_Q"
    weights = [np.array(served.get(path, params=query).json()["values"]) for query in ({by: "second"}, None)]
    np.testing.assert_allclose(np.einsum("tc,hcd->thd", normed, weights[0] - weights[1]), added, atol=1e-5)


def test_the_lists_of_models_have_the_adapters(served: Running) -> None:
    listed = served.get("/models").json()["models"]
    assert [(each["name"], each["kind"]) for each in listed[:3]] == [
        ("tiny", "checkpoint"), ("first", "adapter"), ("second", "adapter")
    ]  # fmt: skip
    cards = served.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("first", "tiny"), ("second", "tiny")]
    assert served.get("/v1/models/second").json()["parent"] == "tiny"
    assert served.get("/v1/models/third").status_code == 404


def test_the_catalogue_has_the_stages_of_adapters_only_if_there_are_any(served: Running, tiny: Running) -> None:
    def found(service: Running) -> list[str]:
        return [each["name"] for each in service.get("/model").json()["stages"] if ".lora_" in each["name"]]

    names = ["attn.lora_q", "attn.lora_k", "attn.lora_v", "attn.lora_out"]
    names += ["mlp.lora_pre", "mlp.lora_pre_linear", "mlp.lora_out"]
    assert found(served) == [f"blocks.{layer}.{name}" for layer in range(2) for name in names]
    assert found(tiny) == []


@pytest.mark.parametrize("path", ["/logits", "/forward", "/generate", "/v1/completions"])
def test_unknown_and_contradicting_names_are_errors(served: Running, tiny: Running, path: str) -> None:
    status, found = error(served, path, prompt=IDS, adapter="third")
    assert (status, found["param"], found["code"]) == (404, "adapter", "adapter_not_found")
    assert found["message"] == "adapter: 'third' is not served; send first, second, or leave the field out"
    status, found = error(served, path, prompt=IDS, model="third")
    assert (status, found["code"]) == (404, "model_not_found")
    assert "send tiny, first, second" in found["message"]
    status, found = error(served, path, prompt=IDS, model="first", adapter="second")
    assert (status, found["param"]) == (400, "adapter")
    assert "is not the adapter 'first' that `model` names" in found["message"]
    status, found = error(tiny, path, prompt=IDS, adapter="first")
    assert (status, found["code"]) == (404, "adapter_not_found")
    assert "this server has no adapters; start it with --adapter NAME=PATH" in found["message"]
    assert served.post(path, {"prompt": IDS, "model": "tiny", "adapter": "second"}).status_code == 200
    assert served.post(path, {"prompt": IDS, "model": "first", "adapter": "first"}).status_code == 200


def test_worked_examples_take_no_adapter(served: Running) -> None:
    status, found = error(served, "/forward", prompt="AI rocks", model="ai-rocks", adapter="first")
    assert (status, found["param"]) == (400, "adapter")


def test_adapters_can_be_named_where_only_the_tokenizer_counts(served: Running) -> None:
    assert served.post("/tokenize", {"text": "the cat", "model": "first"}).status_code == 200


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (["first"], "'first' is not NAME=PATH"),
        (["=path"], "is not NAME=PATH"),
        (["a=x", "b=y", "a=z"], "the name 'a' is given twice"),
    ],
)
def test_a_wrong_setting_is_refused(adapter: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Settings(adapter=adapter)


def test_several_adapters_may_be_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDSCOPE_ADAPTER", "a=/x/y=z, b=../w")
    assert Settings().adapters == {"a": "/x/y=z", "b": "../w"}


@pytest.mark.parametrize(
    ("model", "adapter", "reason"),
    [
        (None, "a=missing", "missing: no such directory"),
        (None, "tiny={first}", "'tiny' has the name of a model"),
        (None, "ai-rocks={first}", "'ai-rocks' has the name of a model"),
        ("bundled", "a={first}", "adapter_model.safetensors lacks "),
    ],
)
def test_an_adapter_that_cannot_be_served_ends_the_start(
    tiny_directory: Path, paths: dict[str, Path], model: str | None, adapter: str, reason: str
) -> None:
    settings = Settings(model=model or str(tiny_directory), adapter=[adapter.format(**paths)])
    with pytest.raises(ValueError, match=reason):
        load_model(settings)


def test_the_memory_of_an_adapter_is_logged(
    tiny_directory: Path, paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        load_model(Settings(model=str(tiny_directory), adapter=[f"second={paths['second']}"]))
    assert "adapter second: 2 layers, rank 3, 0.0 MB" in caplog.messages
