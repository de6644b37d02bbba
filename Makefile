# `make demo` shows it, `make test` before every commit, `make check` before a release. Each makes .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types pytest check coverage soak mutants notebooks docs peers test-versions clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks demo

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One thread per worker: on two cores that is faster than two threads each.
pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

# What trains for seconds, compiles or starts processes; five minutes of training on badly conditioned problems; twenty
# faults in the mathematics, each of which a test must notice; a hundred random models against dense references.
check: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m slow
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.soak --minutes 5 --no-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.audit --count 100
	$(BIN)/python -m tests.tools.mutation --count 20

# All tests, with the lines and branches that no test reaches, which takes longer. At least 98 per cent must be reached.
coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m 'slow or not slow' --cov --cov-report term:skip-covered

# Twenty minutes of training on badly conditioned problems, then the long property and survival tests.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.soak --minutes 20

# Break the mathematics in eighty ways; a test must notice.
mutants: $(STAMP)
	$(BIN)/python -m tests.tools.mutation

# Run the tutorials from top to bottom and keep what they print and draw.
notebooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[notebooks]"
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/build.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

# HTML pages in docs/_build/html; warnings are errors.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Python 3.10 to 3.13 and the lowest versions of the dependencies, each in an environment of its own: gigabytes, an hour.
test-versions:
	$(PYTHON) -m tests.tools.versions $(VERSIONS)

# GPflow, GPJax and GPBoost, each in an environment of its own, for `python -m benchmarks quality` and `speed --peers`.
peers:
	$(PYTHON) -m venv .venv-peers/gpflow
	.venv-peers/gpflow/bin/python -m pip install --quiet gpflow tensorflow-cpu tf-keras "setuptools<81"
	$(PYTHON) -m venv .venv-peers/gpjax
	.venv-peers/gpjax/bin/python -m pip install --quiet gpjax optax
	$(PYTHON) -m venv .venv-peers/gpboost
	.venv-peers/gpboost/bin/python -m pip install --quiet gpboost

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache docs/_build docs/notebooks
