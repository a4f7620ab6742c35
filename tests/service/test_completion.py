"""The completions of the command line, as bash asks for them."""

import shutil
import subprocess
from importlib import import_module

import pytest

from service.commands import COMMANDS
from tests.service.running import run_command


def test_every_command_has_a_parser_for_completions() -> None:
    for module, _ in COMMANDS.values():
        assert import_module(module).make_parser().prog


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("forwardscope se", {"serve"}),
        ("forwardscope serve --tensor", {"--tensor-parallel"}),
        ("forwardscope serve --kv-cache-dtype ", {"auto", "int8"}),
        ("forwardscope drift --held", {"--held-out"}),
    ],
)
def test_bash_completes_commands_options_and_values(
    words: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason='needs shtab: pip install "forwardscope[completion]"')
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert run_command(monkeypatch, "completion", "bash") == 0
    script = capsys.readouterr().out
    ask = f"""
        COMP_WORDS=({words.rpartition(" ")[0]} "{words.rpartition(" ")[2]}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shtab_forwardscope
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    found = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == expected
