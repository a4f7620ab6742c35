# The commands of every day. The first one makes the virtual environment .venv.
.PHONY: setup test check check-javascript serve

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

check-javascript: tests/web/node_modules
	npm --prefix tests/web run --silent check

tests/web/node_modules: tests/web/package-lock.json
	npm --prefix tests/web ci --silent
	touch tests/web/node_modules

serve: .venv
	.venv/bin/forwardscope
