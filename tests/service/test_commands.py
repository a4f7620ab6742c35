"""The console command: which program runs, what a wrong command line says, and the exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model import __version__
from service.__main__ import PIPE_STATUS, main
from service.commands import COMMANDS
from tests.service.running import ROOT, run_command

TEXT = "It was a dark night, and the captain was there. " * 40


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "forwardscope", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout == f"forwardscope {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_a_command_ends_without_a_traceback_if_nobody_reads_its_output(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "forwardscope", *arguments]
    with os.fdopen(writer, "w") as closed:
        found = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (found.returncode, found.stderr) == (PIPE_STATUS, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_output_without_space_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "service", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert found.returncode == 1
    assert found.stderr == "forwardscope: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["serv"], 2)])
def test_closed_standard_files_are_replaced_and_keep_their_numbers(arguments: list[str], status: int) -> None:
    """Otherwise the first connection would get the number 2, and with it all that libraries write to standard error."""
    code = f"""
import os, sys
from service.__main__ import main
sys.argv = ["forwardscope", *{arguments}]
try:
    main()
except SystemExit as error:
    status = error.code
else:
    status = 0
assert os.open(os.devnull, os.O_RDONLY) > 2
sys.exit(status)
"""
    shell = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, cwd=ROOT, check=False).returncode == status


def test_the_version_is_that_of_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"forwardscope {__version__}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("serv", "'serve'"),
        ("perplxity", "'perplexity'"),
        ("run", "'chat'"),
        ("pull", "'serve'"),
        ("./checkpoint", "serve, chat, drift"),
        ("a b.gguf", "forwardscope serve 'a b.gguf'"),
    ],
)
def test_an_unknown_command_ends_with_2_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, hint: str
) -> None:
    assert run_command(monkeypatch, name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert repr(name) in line
    assert hint in line


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from contextlib import suppress; from service.__main__ import PIPE_STATUS, main\n"
        "for arguments in (['--help'], ['serve', '--help'], ['chat', '-h'], ['--port', 'x'], ['serve', '--prot']):\n"
        "    sys.argv = ['forwardscope', *arguments]\n"
        "    with suppress(SystemExit): main()\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.endswith("False\n")
    assert len(found.stderr.splitlines()) == 2


def test_the_help_names_gguf_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["serve"], ["chat"], ["drift"], ["compare"], ["perplexity"]):
        assert run_command(monkeypatch, *command, "--help") == 0
        assert "gguf" in capsys.readouterr().out.lower(), command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_its_own_name_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run_command(monkeypatch, name, "--help") == 0
    assert f"usage: forwardscope {name} " in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_option_ends_every_command_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """`chat` with a model passes unknown options on to the server that it starts, so it gets a URL here."""
    required = {
        "chat": ["http://localhost:1"],
        "compare": ["a", "b"],
        "completion": ["bash"],
        "harvest": ["a", "b", "--stages", "embed", "--out", "x"],
        "perplexity": ["text"],
        "train": ["text", "--out", "x"],
    }
    assert run_command(monkeypatch, name, *required.get(name, []), "--no-such-option") == 2
    assert "--no-such-option is not an option; `forwardscope" in capsys.readouterr().err
    near = {"serve": "--modle", "chat": "--temprature", "train": "--batsh", "mcp": "--prot"}.get(name, "--quantise")
    assert run_command(monkeypatch, name, *required.get(name, []), near, "1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"forwardscope {name}: {near} is not an option; ")
    assert ("did you mean" in line) == (name not in ("completion", "perplexity"))


@pytest.mark.parametrize("option", ["--model", "-m", "-hf", "--modle"])
def test_chat_says_that_the_model_is_an_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert run_command(monkeypatch, "chat", option, "x") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (f"forwardscope chat: {option} is not an option; the model is an argument: forwardscope chat MODEL")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "no/such/model", "--port", "0"],
        pytest.param(["chat", "no/such/model"], marks=pytest.mark.slow),  # it starts a server
        ["drift", "--model", "no/such/model"],
        ["compare", "no/such/model", "bundled"],
        ["compare", "bundled", "no/such/model"],
        ["perplexity", "TEXT", "--model", "no/such/model"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_model_that_does_not_exist_ends_every_command_with_1(
    arguments: list[str],
    text_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    errors_logged: list[str],
) -> None:
    arguments = [text_file if argument == "TEXT" else argument for argument in arguments]
    assert run_command(monkeypatch, *arguments) == 1
    shown = capsys.readouterr().err + "".join(errors_logged)
    assert "no/such/model: no such file or directory" in shown
    assert "Traceback" not in shown
    errors_logged.clear()


def test_the_first_argument_of_serve_is_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Started(Exception):
        pass

    def create_app(settings: object, **_: object) -> None:
        raise Started(settings)

    monkeypatch.setattr("service.commands.serving.create_app", create_app)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    for arguments in (["serve", "/a", "--port", "7"], ["serve", "--model", "/a", "--port", "7"]):
        monkeypatch.setattr(sys, "argv", ["forwardscope", *arguments])
        with pytest.raises(Started) as started:
            main()
        settings = started.value.args[0]
        assert (settings.model, settings.port) == ("/a", 7)
    assert run_command(monkeypatch, "serve", "/a", "--model=/b") == 2
    assert "given twice" in capsys.readouterr().err


def test_perplexity_prints_its_figures(
    text_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "perplexity", text_file) == 0
    assert '"perplexity": ' in capsys.readouterr().out
