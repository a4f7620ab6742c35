# The commands of every day. The first one makes the virtual environment .venv.
.PHONY: setup test check serve

setup: .venv

.venv: pyproject.toml
	python3 -m venv .venv
	.venv/bin/pip install --quiet -e '.[dev]'
	touch .venv

test: .venv
	.venv/bin/python -m pytest

check: .venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

serve: .venv
	.venv/bin/forwardscope
