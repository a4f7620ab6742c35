"""`load`: a model in this process, whose numbers are those of the service."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forwardscope import Client, UnknownStage
from forwardscope.local import LocalModel, load
from model.errors import InvalidField
from service.routes import generate
from tests.published_models import smollm2
from tests.service.checkpoints import write_checkpoint

PROMPT = "the cat sat on"


def test_an_attention_pattern_takes_two_lines() -> None:
    trace = load("bundled").run(PROMPT)
    pattern = trace["blocks.0.attn.pattern"]
    assert pattern.shape == (1, 8, 4, 4)
    assert torch.allclose(pattern.float().sum(-1), torch.ones(1, 8, 4), atol=0.02)
    assert trace.dims("blocks.0.attn.pattern") == ("batch", "head", "query", "key")


def test_a_trace_has_the_numbers_of_a_client_to_the_last_bit(local: LocalModel, client: Client) -> None:
    ours, theirs = local.run(PROMPT), client.run(PROMPT)
    assert list(ours) == list(theirs) == local.stages
    for name in ours:
        assert np.array_equal(ours[name].float().numpy(), theirs[name], equal_nan=True), name
    assert np.array_equal(ours.logits.float().numpy(), theirs.logits)
    assert np.array_equal(ours.loss.per_token.numpy(), theirs.loss.per_token, equal_nan=True)
    assert (ours.loss.mean, ours.loss.perplexity) == (theirs.loss.mean, theirs.loss.perplexity)
    assert (ours.tokens, ours.positions, ours.predictions) == (theirs.tokens, theirs.positions, theirs.predictions)
    described: object = ours.stages
    assert described == theirs.stages


@pytest.mark.parametrize("stages", ["blocks.*.attn.pattern", ["blocks.1.attn.z", "embed", "logits", "loss"]])
def test_a_selection_is_that_of_a_client(local: LocalModel, client: Client, stages: str | list[str]) -> None:
    selection = {"stages": stages, "positions": [3, 1], "heads": [5, 0], "top_k": 2, "targets": [None, 5, 6, 7]}
    ours, theirs = local.run(PROMPT, **selection), client.run(PROMPT, **selection)  # type: ignore[call-overload]
    assert set(theirs) <= set(ours) <= {*theirs, "logits"}
    for name in theirs:
        assert np.array_equal(ours[name].float().numpy(), theirs[name], equal_nan=True), name
    assert ours.positions == theirs.positions == (3, 1)
    assert ours.predictions == theirs.predictions
    assert ours.loss.mean == theirs.loss.mean


def test_names_may_be_written_as_in_transformerlens(local: LocalModel) -> None:
    trace = local.run(PROMPT, "blocks.*.hook_resid_pre")
    assert torch.equal(trace["blocks.0.hook_resid_pre"], trace["blocks.0.resid_pre"])
    assert "blocks.5.hook_resid_pre" in trace
    assert len(trace) == 7  # six blocks, and the logits


def test_an_unexpected_exception_of_a_route_reaches_the_caller(
    local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("a planted error")

    monkeypatch.setattr(generate, "start_generation", fail)
    with pytest.raises(RuntimeError, match="a planted error"):
        local.generate(PROMPT, max_tokens=1)


def test_an_unknown_name_is_an_error_with_the_nearest_names(local: LocalModel) -> None:
    trace = local.run(PROMPT, "blocks.0.*")
    with pytest.raises(UnknownStage, match=r"similar names: blocks\.0\.attn\.pattern"):
        trace["blocks.0.attn.hook_patern"]
    with pytest.raises(KeyError):
        trace["blocks.1.attn.pattern"]
    with pytest.raises(InvalidField, match=r"similar names: blocks\.0\.attn\.pattern"):
        local.run(PROMPT, "blocks.0.attn.patern")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [5] * 513}, "prompt"),
        ({"positions": [4]}, "positions"),
        ({"positions": [3, -1]}, "positions"),
        ({"positions": []}, "positions"),
        ({"heads": [8]}, "heads"),
        ({"targets": [1]}, "targets"),
        ({"targets": [1, 2, 3, -1]}, "targets"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 5000}, "top_k"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_run_is_named(local: LocalModel, arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        local.run(**{"prompt": PROMPT} | arguments)  # type: ignore[call-overload]
    assert raised.value.field == field


def test_positions_may_count_from_the_end(local: LocalModel, client: Client) -> None:
    last, fourth = local.run(PROMPT, positions=[-1]), local.run(PROMPT, positions=[3])
    theirs = client.run(PROMPT, "blocks.5.resid_post", positions=[-1])
    assert last.positions == theirs.positions == (3,)
    assert np.array_equal(theirs["blocks.5.resid_post"], last["blocks.5.resid_post"].float().numpy())
    assert torch.equal(last["blocks.5.resid_post"], fourth["blocks.5.resid_post"])


def test_changing_a_result_changes_no_other_result(local: LocalModel) -> None:
    first = local.run(PROMPT)
    kept = {name: first[name].clone() for name in first}
    first["blocks.0.resid_post"].zero_()
    local.run("another text of more tokens")
    for name in first:
        if name != "blocks.0.resid_post":
            assert torch.equal(first[name].nan_to_num(), kept[name].nan_to_num()), name
    assert torch.equal(local.run(PROMPT)["blocks.0.resid_post"], kept["blocks.0.resid_post"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0, "max_tokens": 20, "logprobs": 2},
        {"temperature": 0.9, "seed": 3, "n": 3, "max_tokens": 12, "top_k": 50},
        {"temperature": 0, "stop": ["."], "echo": True},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_generation_is_that_of_a_client(local: LocalModel, client: Client, arguments: dict[str, object]) -> None:
    ours = local.generate("To be, or not to", **arguments)  # type: ignore[call-overload]
    theirs = client.generate("To be, or not to", **arguments)  # type: ignore[call-overload]
    assert len(ours.choices) == arguments.get("n", 1)
    for mine, other in zip(ours.choices, theirs.choices, strict=True):
        assert (mine.text, mine.tokens, mine.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert mine.stop_reason == other.stop_reason
        assert mine.usage.completion_tokens == other.usage.completion_tokens
        assert [each.logprob for each in mine.logprobs or ()] == [each.logprob for each in other.logprobs or ()]
    assert ours.text == ours.choices[0].text


def test_a_generated_token_is_the_most_likely_one_of_run(local: LocalModel) -> None:
    """So `run` looks inside the steps that generated a text."""
    generation = local.generate(PROMPT, max_tokens=5, temperature=0)
    ids = [*local.to_tokens(PROMPT), *generation.tokens]
    chosen = local.run(ids, "logits").logits.argmax(-1).tolist()
    assert tuple(chosen[3:-1]) == generation.tokens


def test_wrong_arguments_of_generate_are_named_and_leave_the_model_usable(local: LocalModel) -> None:
    for arguments, message in (
        ({"temprature": 1}, r"^temprature: .*temperature"),
        ({"max_tokens": 10_000}, "^max_tokens: this model's maximum context length is 512"),
        ({"max_tokens": 0}, "^max_tokens: 0 generates nothing"),
        ({"top_p": 2}, "^top_p"),
        ({"stop_token_ids": [5000]}, "^stop_token_ids"),
    ):
        with pytest.raises(InvalidField, match=message):
            local.generate(PROMPT, **arguments)
    assert local.generate(PROMPT, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.slow
def test_a_model_with_a_chat_template_answers_a_conversation() -> None:
    model = load(str(smollm2()), dtype="float32")
    answer = model.chat("What is the capital of France?", temperature=0, max_tokens=20)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    messages = [{"role": "user", "content": "What is the capital of France?"}, answer.message]
    again = model.chat([*messages, {"role": "user", "content": "And of Italy?"}], temperature=0, max_tokens=20)
    assert again.text is not None
    assert "Rome" in again.text
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_model_without_a_chat_template_says_so(local: LocalModel) -> None:
    with pytest.raises(InvalidField, match=r"the model .bundled. has no chat template"):
        local.chat("Hello")


def test_tokens_and_text_are_those_of_a_client(local: LocalModel, client: Client) -> None:
    text = "Zwölf Boxkämpfer 🥊 jagen\u2028Viktor"
    assert local.to_tokens(text) == client.to_tokens(text)
    assert local.to_text(local.to_tokens(text)) == client.to_text(local.to_tokens(text)) == text


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny")
    (directory / "tokenizer.json").unlink()
    model = load(str(directory))
    assert [token.text for token in model.run([1, 2, 3]).tokens] == [None, None, None]
    assert len(model.generate([1, 2], max_tokens=2, ignore_eos=True).tokens) == 2
    with pytest.raises(InvalidField, match="token ids"):
        model.run("text")


def test_a_model_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="no/such/model: no such file or directory"):
        load("no/such/model")


def test_a_model_is_compared_with_files_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write_checkpoint(tmp_path / "first"), write_checkpoint(tmp_path / "second")
    weights = load_file(second / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5] *= 2
    save_file(weights, second / "model.safetensors")
    model = load(first)
    save_file(dict(load(second).run(PROMPT)), tmp_path / "stages.safetensors")
    for path in (second, tmp_path / "stages.safetensors"):
        assert model.compare(PROMPT, path=str(path)).verdict.first_stage == "blocks.1.mlp.pre_linear"
    monkeypatch.chdir(tmp_path)
    assert not model.compare(PROMPT, path="first").differs
