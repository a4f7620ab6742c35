"""A wrong argument of a call is an error that names the argument, in the clients and in `load`'s model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forwardscope import Client, ForwardscopeError, InvalidArgument, LocalModel, load, requests

ZERO = {"stage": "blocks.0.attn.z", "op": "zero"}
CALLS: dict[str, Callable[[Any], Any]] = {
    "prompt: 3 is not a text": lambda model: model.run(3),
    "prompt: b'abc' is not a text": lambda model: model.run(b"abc"),
    "prompt: {'a': 1} is not a text": lambda model: model.run({"a": 1}),
    "prompt: ['a', 'b'] is a list of prompts, but here is place for one": lambda model: model.stream(["a", "b"]),
    "prompt: array([[1, 2]]) is a list of prompts": lambda model: model.stream(np.array([[1, 2]])),
    "prompt: [['a'], 'b'] is a list of prompts": lambda model: model.run([[["a"], "b"], "c"]),
    "token: has 1 of 2 entries; give one for each prompt": lambda model: model.attribute(
        "direct", [[1], [2]], token=[5]
    ),
    "prompt: 1.5 is not an integer; token ids": lambda model: model.run([1.5]),
    "prompt: True is not an integer": lambda model: model.run([True]),
    "stages: 5 is not a text": lambda model: model.run("a", 5),
    "stages: None is not a text": lambda model: model.run("a", [None]),
    "positions: 0 is not a list of integers": lambda model: model.run("a", positions=0),
    "positions: '01' is not a list of integers": lambda model: model.run("a", positions="01"),
    "positions: 0.5 is not an integer": lambda model: model.run("a", positions=[0.5]),
    "heads: 1 is not a list": lambda model: model.run("a", heads=1),
    "targets: 5 is not a list of token ids": lambda model: model.run("a b", targets=5),
    "targets: 'x' is not an integer": lambda model: model.run("a b", targets=["x", None]),
    "edits: is one edit; put it into a list": lambda model: model.run("a", edits=ZERO),
    "edits: is one edit; put": lambda model: model.run("a", edits={}),
    "edits: 3 is not a list of edits": lambda model: model.run("a", edits=3),
    "name: 5 is not a text": lambda model: model.weight(5),
    "name: is empty": lambda model: model.weight(""),
    "edits.0: 3 is not a mapping": lambda model: model.run("a", edits=[3]),
    "edits.0.positions: 1.5 is not a word": lambda model: model.run("a", edits=[ZERO | {"positions": 1.5}]),
    "edits.1.heads: 2 is not a list": lambda model: model.run("a", edits=[ZERO, ZERO | {"heads": 2}]),
    "stop: 5 is not a text": lambda model: model.generate("a", stop=5),
    "messages: 5 is not a list of messages": lambda model: model.chat(5),
    "messages.1: 'hi' is not a mapping": lambda model: model.chat([{"role": "user"}, "hi"]),
    "ids: 'abc' is not a list of integers": lambda model: model.to_text("abc"),
    "heads: 2 is not a list of integers, such as [0, 1]": lambda model: model.run("a", heads=2),
    "positions: 2 is not a list of integers, such as [0, -1]": lambda model: model.run("a", positions=2),
    "trace: True is not a mapping, such as": lambda model: model.generate("a", trace=True),
    "trace: '*.z' is not a mapping, such as": lambda model: model.generate("a", trace="*.z"),
    "setting: 'int8' is not a mapping, such as": lambda model: model.compare("a", setting="int8"),
    "names: 'x' is not a mapping": lambda model: model.compare("a", {}, names="x"),
    "stages: [1] is not a mapping from names to arrays": lambda model: model.compare("a", [1]),
    "logits: an array of bool cannot be sent": lambda model: model.compare("a", {"logits": np.zeros(2, bool)}),
    "logits: has lists of different lengths": lambda model: model.compare("a", {"logits": [[1], [1, 2]]}),
    "edits.0.source.prompt: ['a'] is a list of prompts": lambda model: model.run(
        "a", edits=[ZERO | {"op": "patch", "source": {"prompt": ["a"]}}]
    ),
    "edits.0.source.prompts.1: 5 is not a text": lambda model: model.run(
        "a", edits=[ZERO | {"op": "mean", "source": {"prompts": ["a", 5]}}]
    ),
}


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return load("bundled")


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_argument_is_named(message: str, model: LocalModel) -> None:
    """A client raises the error before it sends anything."""
    for caller in (Client("http://localhost:1"), model):
        with pytest.raises(InvalidArgument) as raised:
            CALLS[message](caller)
        assert str(raised.value).startswith(message)
        assert raised.value.name == message.partition(":")[0]
        assert isinstance(raised.value, ForwardscopeError)
        assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("temperature: nan cannot be sent", lambda client: client.generate("a", temperature=float("nan"))),
        ("metadata: <object", lambda client: client.chat("a", metadata=object())),
        ("edits.1.scale: nan cannot", lambda client: client.logits("a", edits=[ZERO, ZERO | {"scale": float("nan")}])),
        ("token: 1.5 is not an integer", lambda client: client.attribute("direct", "a", token=1.5)),
        ("corrupted: 7 is not a text", lambda client: client.attribute("patching", "a", corrupted=7)),
        ("layers: 'x' is not a list", lambda client: client.patterns("a", "x")),
    ],
)
def test_a_caller_is_told_what_cannot_be_sent(message: str, call: Callable[[Any], Any], model: LocalModel) -> None:
    for caller in (Client("http://localhost:1"), model):
        with pytest.raises(InvalidArgument) as raised:
            call(caller)
        assert str(raised.value).startswith(message)


def test_numbers_and_arrays_of_numpy_and_pytorch_and_ranges_are_sent_as_numbers_and_lists() -> None:
    """Also in a list, and inside of a mapping."""
    generate: Any = requests.generate
    own = generate(
        "a",
        max_tokens=np.int64(3),
        seed=torch.tensor(7),
        trace={"stages": "*.z", "positions": np.array([0, 1]), "heads": range(2)},
        edits=[
            {"stage": "embed", "op": "add", "vector": list(np.array([0.5, 2], np.float32)), "scale": np.float32(0.5)}
        ],
        scales=np.array([0.0, 1.0]),
    )
    plain = generate(
        "a",
        max_tokens=3,
        seed=7,
        trace={"stages": "*.z", "positions": [0, 1], "heads": [0, 1]},
        edits=[{"stage": "embed", "op": "add", "vector": [0.5, 2.0], "scale": 0.5}],
        scales=[0.0, 1.0],
    )
    assert own.request.content == plain.request.content


def test_a_model_takes_an_integer_of_numpy_and_vectors_in_a_list(model: LocalModel) -> None:
    any_model: Any = model
    vectors = torch.eye(256)[:2]
    for subspace in (list(vectors), list(vectors.numpy())):
        edits = [[{"stage": "embed", "op": "project", "subspace": each}] for each in (subspace, vectors)]
        first, second = (any_model.run("a b", "logits", top_k=np.int64(1), edits=each) for each in edits)
        assert torch.equal(first.logits, second.logits)
    with pytest.raises(InvalidArgument, match=r"^top_k: 1\.5 is not an integer; give a whole number"):
        any_model.run("a", top_k=1.5)
    for call in (model.run, model.to_tokens):
        with pytest.raises(ValueError, match=r"^(prompt|text): contains a lone surrogate"):
            call("a\ud800")
    with pytest.raises(ValueError, match=r"^heads: -1 is out of range; there are 8 heads"):
        model.run("a", heads=[-1])
    with pytest.raises(ValueError, match=r"^heads: none of the selected stages has heads"):
        model.run("a", "embed", heads=[0])
    with pytest.raises(InvalidArgument, match=r"^stride: 1\.5 is not an integer"):
        any_model.score_text("a b", stride=1.5)
    with pytest.raises(InvalidArgument, match=r"^hooks: \[.* is not a mapping from stages to functions"):
        any_model.run("a", hooks=[("embed", print)])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("top_k: '3' is not an integer; give a whole number", {"top_k": "3"}),
        ("top_k: 5000 must be from 0 to 4096", {"top_k": 5000}),
        ("edits.0.stage: 3 is not the name of a stage", {"edits": [{"stage": 3, "op": "zero"}]}),
        (
            "edits.0.source.prompt: contains a lone surrogate",
            {"edits": [ZERO | {"op": "patch", "source": {"prompt": "\ud800"}}]},
        ),
    ],
)
def test_the_model_of_load_names_wrong_arguments_of_run(
    message: str, arguments: dict[str, Any], model: LocalModel
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        model.run("a", **arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("model: 3 is not the name or the path", {"model": 3}),
        ("quantize: 'int3' is not stored, none, int8, int5, int4 or auto", {"quantize": "int3"}),
        ("kernels: 'fast' is not auto, invariant or torch", {"kernels": "fast"}),
        ("kv_cache_dtype: 'int4' is not auto or int8", {"kv_cache_dtype": "int4"}),
        ("adapters: .* is not a mapping", {"adapters": ["a"]}),
        ("device 'tpu' cannot be used here: it is not auto, cpu, cuda or cuda:N", {"device": "tpu"}),
        ("device 'cuda:99' cannot be used here", {"device": "cuda:99"}),
        ("dtype 'int8' is not implemented", {"dtype": "int8"}),
        ("quantize_loss: 'x' is not an increase", {"quantize": "auto", "quantize_loss": "x"}),
    ],
)
def test_load_names_a_wrong_argument(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        load(**arguments)
    assert "\n" not in str(raised.value)
    assert "mkldnn" not in str(raised.value)


def test_no_stages_are_the_logits_in_both(model: LocalModel) -> None:
    assert list(model.run("a", [])) == ["logits"]
    body = requests.run("a", []).request.body
    assert isinstance(body, dict)
    assert body["stages"] == ["logits"]


def test_integers_of_every_library_are_integers(model: LocalModel) -> None:
    expected = model.run([1, 2, 3]).logits
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4), (1, 2, 3), iter([1, 2, 3])):
        assert torch.equal(model.run(prompt).logits, expected)  # type: ignore[arg-type]
    assert load(Path("bundled")).name == "bundled"


@pytest.mark.parametrize(
    ("url", "hint"),
    [("localhost:8000", "did you mean 'http://localhost:8000'"), ("ftp://a", "https://$"), (3, "url: 3")],
)
def test_a_url_without_its_scheme_is_refused_with_the_url(url: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        Client(url)
