# Everything happens in .venv, which is made anew only when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	$(BIN)/lit-diffrl fit --config configs/quickstart.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

# mypy does not follow the mapping of callbacks/ into lit_diffrl, so it reads a tree in which the two are put together.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed
	cp -R lit_diffrl build/typed/ && cp -R callbacks build/typed/lit_diffrl/callbacks
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
