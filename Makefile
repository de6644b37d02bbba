# Two commands for everyone: `make demo` and `make test`. Each makes .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types pytest peers clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks demo

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One thread a worker: on two cores that is faster than two threads each.
pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

# GPflow and GPJax, each in an environment of its own, for `python -m benchmarks speed --peers`.
peers:
	$(PYTHON) -m venv .venv-peers/gpflow
	.venv-peers/gpflow/bin/python -m pip install --quiet gpflow tensorflow-cpu tf-keras "setuptools<81"
	$(PYTHON) -m venv .venv-peers/gpjax
	.venv-peers/gpjax/bin/python -m pip install --quiet gpjax optax

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
