# Start with `make demo` or `make test`. Both do all set-up themselves, and are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types unit soak format clean

demo: $(READY)
	$(BIN)/dirprune demo

test: lint types unit

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -q -n 2

soak: $(READY)
	$(BIN)/pytest -q -s -m soak

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# The stamp is written last, so that an interrupted install is repeated.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lab,dev]'
	touch $@
