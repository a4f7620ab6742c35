"""The chat templates of a checkpoint are those that transformers reads, and an invalid one is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.checkpoints.chat_templates import read_chat_template
from model.checkpoints.load import load_checkpoint
from model.checkpoints.locate import locate
from model.errors import CheckpointError
from model.text.tokenizer import Tokenizer
from service.loading import load_model
from service.settings import Settings
from tests.checkpoints.files import hub_files, write_tokenizer

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, 71)
    return Tokenizer.from_directory(tmp_path)


def write_config(directory: Path, **config: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_file(directory: Path, name: str, source: str) -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


def test_a_checkpoint_without_templates_has_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert read_chat_template(tmp_path, tokenizer) is None
    write_config(tmp_path, chat_template=None)
    assert read_chat_template(tmp_path, tokenizer) is None
    assert read_chat_template(tmp_path, None) is None


@pytest.mark.parametrize(
    ("value", "with_tools"),
    [
        ("c", "c"),
        ([{"name": "default", "template": "c"}, {"name": "tool_use", "template": "t"}], "t"),
    ],
)
def test_templates_are_read_from_the_tokenizer_config(
    tmp_path: Path, tokenizer: Tokenizer, value: Any, with_tools: str
) -> None:
    write_config(tmp_path, chat_template=value)
    template = read_chat_template(tmp_path, tokenizer)
    assert template is not None
    assert [template.render(MESSAGES), template.render(MESSAGES, tools=[])] == ["c", with_tools]


def test_files_win_over_the_tokenizer_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_config(tmp_path, chat_template=[{"name": "rag", "template": "c"}])
    write_file(tmp_path, "chat_template.jinja", "file")
    write_file(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
    template = read_chat_template(tmp_path, tokenizer)
    assert template is not None
    assert [template.render(MESSAGES), template.render(MESSAGES, tools=[])] == ["file", "tools"]


def test_templates_and_special_tokens_are_those_of_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    write_config(tmp_path, bos_token={"content": "<b>", "__type": "AddedToken"}, eos_token="<e>", pad_token=None)
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}\r\n{{ messages[0].content }}\n"
    write_file(tmp_path, "chat_template.jinja", source)
    template = read_chat_template(tmp_path, tokenizer)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == reference.apply_chat_template(MESSAGES, tokenize=False)


def test_a_given_file_replaces_all_templates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_config(tmp_path, chat_template=[{"name": "default", "template": "c"}, {"name": "tool_use", "template": "t"}])
    template = read_chat_template(tmp_path, tokenizer, write_file(tmp_path, "own.jinja", "own"))
    assert template is not None
    assert [template.render(MESSAGES), template.render(MESSAGES, tools=[])] == ["own", "own"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "own.jinja"])
def test_an_invalid_template_is_an_error_of_one_line_that_names_the_file(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    path = write_file(tmp_path, name, "\n{% if %}")
    with pytest.raises(CheckpointError) as caught:
        read_chat_template(tmp_path, tokenizer, path if name == "own.jinja" else None)
    assert str(path) in str(caught.value)
    assert "line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], "{% if %}", {"default": 5}])
def test_an_invalid_template_in_the_tokenizer_config_is_an_error_that_names_the_file(
    tmp_path: Path, tokenizer: Tokenizer, value: Any
) -> None:
    write_config(tmp_path, chat_template=value)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        read_chat_template(tmp_path, tokenizer)


def test_a_given_file_must_exist_and_needs_a_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"own\.jinja: file is missing"):
        read_chat_template(tmp_path, tokenizer, tmp_path / "own.jinja")
    with pytest.raises(CheckpointError, match=r"own\.jinja: a chat template needs a tokenizer"):
        read_chat_template(tmp_path, None, tmp_path / "own.jinja")


def test_an_empty_template_is_left_out_with_a_warning(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_file(tmp_path, "chat_template.jinja", " \n")
    assert read_chat_template(tmp_path, tokenizer) is None
    assert f"{path}: a chat template is empty, so it is left out" in caplog.text
    with pytest.raises(CheckpointError, match=r"own\.jinja: the chat template is empty"):
        read_chat_template(tmp_path, tokenizer, write_file(tmp_path, "own.jinja", ""))


def test_further_templates_that_cannot_be_read_are_not_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_file(tmp_path, "chat_template.jinja", "c")
    write_file(tmp_path, "additional_chat_templates", "a file in the place of the directory")
    with pytest.raises(OSError, match="additional_chat_templates"):
        read_chat_template(tmp_path, tokenizer)


def test_a_loaded_checkpoint_has_its_templates(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("tied")
    assert load_checkpoint(str(directory)).chat_template is None
    write_tokenizer(directory, 71)
    path = write_file(directory, "chat_template.jinja", "from the checkpoint")
    template = load_checkpoint(str(directory)).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "from the checkpoint"
    path.write_text("from the setting")
    other = path.rename(directory / "own.jinja")
    checkpoint = load_model(Settings(model=str(directory), chat_template=other))
    assert checkpoint is not None
    assert checkpoint.chat_template is not None
    assert checkpoint.chat_template.render(MESSAGES) == "from the setting"


def test_templates_are_downloaded_with_a_hub_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # exported without saying so

    wanted: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: hub_files("model.safetensors"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **patterns: wanted.update(patterns) or ".")
    locate("org/name")
    wanted = {key: value for key, value in wanted.items() if key.endswith("_patterns")}
    files = ["config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["original/params.json", "onnx/model.safetensors", "consolidated.safetensors", "model.py", "model.bin"]
    assert list(filter_repo_objects([*files, *others], **wanted)) == files
