# Start with `make demo` or `make test`. Both do all set-up themselves, and are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
BUILDERS = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt hatchling ziglang

TARGETS = linux-x86_64 linux-aarch64 darwin-x86_64 darwin-aarch64

.PHONY: demo test lint types unit soak site wheels format clean

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
	$(BUILDERS) --editable '.[cluster]'
	$(BIN)/pytest -q -s -m soak

# The pages and the API as a site, build/site/index.html. A warning or a link that leads nowhere is an error.
site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[site]'
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/site
	$(BIN)/python docs/links.py build/site

# An sdist, and a wheel with compiled kernels for each target; all are built on one machine, by zig.
wheels: $(READY)
	$(BUILDERS)
	$(BIN)/python -m hatchling build --target sdist
	for target in $(TARGETS); do DIRPRUNE_TARGET=$$target $(BIN)/python -m hatchling build --target wheel || exit 1; done

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# The stamp is written last, so that an interrupted install is repeated.
$(READY): pyproject.toml constraints.txt
	@echo "Installing torch and the rest into $(VENV), once: a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lab,dev]'
	touch $@
