"""Libraries of which private parts are used are installed in the versions with which they were tested."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
# `service/http/connections.py` and `http_parser.py` extend uvicorn's HTTP protocol and the connection of h11, and
# `model/text/template_*.py` the parser and the sandbox of Jinja. After a new release, read what changed in these parts
# before you change a number.
TESTED = {"uvicorn": (0, 54), "h11": (0, 16), "jinja2": (3, 1)}


@pytest.mark.parametrize("name", TESTED)
def test_a_release_with_which_nothing_was_tested_is_not_installed(name: str) -> None:
    major, minor = TESTED[name]
    installed = version(name)
    assert installed.startswith(f"{major}.{minor}."), f"the tested version is {major}.{minor}: read what has changed"
    requirements = map(Requirement, tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"])
    (allowed,) = (requirement.specifier for requirement in requirements if requirement.name == name)
    assert installed in allowed
    assert f"{major}.{minor + 1}.0" not in allowed
