"""`forwardscope compare` compares files, checkpoints and servers, and its exit status says whether a stage differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forwardscope import load
from model.checkpoints.load import load_checkpoint
from service.commands.compare import DEFAULT_PROMPT, main
from tests.analysis.planted_faults import in_transformer_lens_names, record
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running

IDS = [257, 69, 270, 273, 264, 40, 41, 42]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit status, stdout, stderr."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["forwardscope compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run_command


@pytest.fixture(scope="module")
def stages(tiny_directory: Path) -> dict[str, Tensor]:
    network = load_checkpoint(str(tiny_directory), dtype="float32").model
    return in_transformer_lens_names(record(network, IDS), network.config)


def test_a_faithful_npz_file_does_not_differ(
    run: Run, tiny_directory: Path, stages: dict[str, Tensor], tmp_path: Path
) -> None:
    arrays = {name: tensor.numpy() for name, tensor in stages.items()}
    np.savez(tmp_path / "b.npz", tokens=np.array([IDS]), **arrays)  # type: ignore[arg-type]
    status, out, _ = run(str(tiny_directory), str(tmp_path / "b.npz"))
    assert status == 0
    assert "verdict: no difference" in out
    assert "blocks.1.attn.z" in out


def test_a_file_with_a_mistake_is_explained(
    run: Run, tiny_directory: Path, stages: dict[str, Tensor], tmp_path: Path
) -> None:
    name = "blocks.0.attn.hook_q"
    changed = stages | {name: stages[name][:, :, [0, 2, 1, 3, 4, 5]], "unknown": torch.zeros(2)}
    save_file({key: tensor.clone() for key, tensor in changed.items()}, tmp_path / "b.safetensors")
    status, out, _ = run(
        str(tiny_directory), str(tmp_path / "b.safetensors"), "--ids", ",".join(map(str, IDS)), "--verdict"
    )
    assert status == 3
    assert "the first stage that differs is blocks.0.attn.q" in out
    assert "hint: B's heads are A's heads 0, 2, 1, 3, 4, 5 [permuted_heads]" in out
    assert "not compared, because A has no such stages: unknown" in out


def test_a_map_names_the_tensors_of_a_file(
    run: Run, tiny_directory: Path, stages: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file({"x": stages["hook_embed"].contiguous(), "y": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / "map.json").write_text(json.dumps({"x": "embed", "y": None}))
    arguments = (str(tiny_directory), str(tmp_path / "b.safetensors"), "--ids", ",".join(map(str, IDS)), "--json")
    status, out, _ = run(*arguments, "--map", str(tmp_path / "map.json"))
    assert status == 0
    answer: dict[str, Any] = json.loads(out)
    assert [stage["name"] for stage in answer["stages"]] == ["embed"]
    (tmp_path / "map.json").write_text(json.dumps({"z": "embed"}))
    status, _, err = run(*arguments, "--map", str(tmp_path / "map.json"))
    assert (status, "'z' is not a tensor" in err) == (1, True)


def test_another_checkpoint_is_compared(run: Run, tiny_directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", rms_norm_eps=1e-5)
    status, out, _ = run(str(tiny_directory), str(other), "--json", "--per-head")
    assert status == 3
    verdict = json.loads(out)["verdict"]
    assert verdict["first_stage"] == "blocks.0.ln1.scale"
    assert verdict["hints"][0]["code"] == "norm_eps"


def test_the_same_checkpoint_with_another_dtype_does_not_differ_but_quantized_it_does(
    run: Run, tiny_directory: Path
) -> None:
    assert run(str(tiny_directory), str(tiny_directory), "--dtype", "bfloat16", "--kernels", "auto")[0] == 0
    status, out, _ = run(str(tiny_directory), str(tiny_directory), "--quantize", "int8")
    assert status == 3
    assert "the first stage that differs is blocks.0.attn.q" in out


@pytest.mark.slow
def test_int4_is_calibrated_as_in_a_loaded_model(run: Run) -> None:
    ids = load("bundled").to_tokens(DEFAULT_PROMPT)
    rows = [load("bundled", dtype="float32", quantize=each).logits(ids, "all").logits for each in ("none", "int4")]
    exact, quantized = (row.double().log_softmax(-1) for row in rows)
    kl = (exact.exp() * (exact - quantized)).sum(-1).mean()
    line = ["bundled", "bundled", "--dtype", "float32", "--quantize", "int4", "--kernels", "auto", "--json"]
    assert json.loads(run(*line)[1])["logits"]["kl"] == pytest.approx(float(kl), rel=0.01)


def test_a_running_server_is_compared(run: Run, tiny: Running, tiny_directory: Path, tmp_path: Path) -> None:
    url = str(tiny.client.base_url)
    status, out, _ = run(str(tiny_directory), url)
    assert status == 0, out
    other = write_checkpoint(tmp_path / "other", rope_theta=1e5)
    status, out, _ = run(str(other), url, "--json")
    assert status == 3
    assert json.loads(out)["verdict"]["hints"][0]["code"] == "rotary_theta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "1,2,3"], "the token ids differ first at position 0: A has 1, B has 257"),
        (["--ids", "1,999"], "999 at position 1 is no token id of A"),
        (["--ids", ""], "has 0 tokens; A takes 1 to 64"),
    ],
)
def test_a_wrong_prompt_ends_with_one_line(
    run: Run, tiny_directory: Path, stages: dict[str, Tensor], tmp_path: Path, arguments: list[str], message: str
) -> None:
    tensors = {name: tensor.clone() for name, tensor in stages.items()}
    save_file(tensors, tmp_path / "b.safetensors", {"input_ids": json.dumps(IDS)})
    status, _, err = run(str(tiny_directory), str(tmp_path / "b.safetensors"), *arguments)
    assert status == 1
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("b", "arguments", "message"),
    [
        ("b.safetensors", ["--quantize", "int8"], "--quantize: is only for a checkpoint"),
        ("b.safetensors", ["--quantize", "none"], "--quantize: is only for a checkpoint"),
        ("b.safetensors", ["--kernels", "auto"], "--kernels: is only for a checkpoint"),
        ("b.npz", ["--api-key", "k"], "--api-key: is only for the URL"),
        ("http://localhost:1", ["--kernels", "torch"], "--kernels: is only for a checkpoint"),
        ("http://localhost:1", ["--map", "map.json"], "--map: is only for a file of stages"),
        ("bundled", ["--api-key", "k"], "--api-key: is only for the URL"),
    ],
)
def test_an_option_that_b_cannot_use_is_refused(
    run: Run, tiny_directory: Path, b: str, arguments: list[str], message: str
) -> None:
    status, _, err = run(str(tiny_directory), b, *arguments)
    assert status == 1
    assert message in err
    assert err.count("\n") == 1


def test_ids_that_are_no_numbers_are_refused_with_an_example(run: Run) -> None:
    status, _, err = run("bundled", "bundled", "--ids", "a")
    assert status == 2
    assert err == "forwardscope compare: --ids: 'a' is not a list of token ids such as 1,2,3\n"


def test_a_hub_that_cannot_be_reached_ends_with_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise httpx.ConnectError("no connection")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    status, _, err = run("nosuch/model", "bundled")
    assert status == 1
    assert "cannot be reached (ConnectError: no connection); give a directory, a *.gguf file, or a mirror" in err
    assert err.count("\n") == 1


def test_errors_too_large_for_float64_are_reported_without_nan(
    run: Run, tiny_directory: Path, stages: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors = {"tokens": torch.tensor(IDS), "embed": stages["hook_embed"].double() * 1e300}
    save_file(tensors, tmp_path / "b.safetensors")
    status, out, _ = run(str(tiny_directory), str(tmp_path / "b.safetensors"))
    assert status == 3
    assert "differs is embed: its error is too large for float64" in out
    assert "times A's" not in out
    status, out, _ = run(str(tiny_directory), str(tmp_path / "b.safetensors"), "--json")
    assert status == 3
    json.loads(out, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["b.pt", "b.npy", "b.npz", "b.safetensors"])
def test_files_that_are_not_stages_end_with_one_line(run: Run, tiny_directory: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a file of stages")
    status, _, err = run(str(tiny_directory), str(tmp_path / name))
    assert status == 1
    assert name in err
    assert err.count("\n") == 1
