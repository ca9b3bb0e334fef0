# `make demo` and `make test` are all a newcomer needs; the first call builds .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test check bench fuzz clean

demo: $(VENV)/.installed
	$(BIN)/dispfl demo

test: $(VENV)/.installed
	$(BIN)/pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/local_training.py
	$(BIN)/python benchmarks/memory_at_rest.py
	$(BIN)/python benchmarks/side_by_side.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/transport.py

# Bounded campaigns: more than 100,000 damaged messages (minutes), 5,000 federations in bad weather (an hour or two).
fuzz: $(VENV)/.installed
	DISPFL_FUZZ=12600 $(BIN)/pytest tests/wire/test_bad_bytes.py
	DISPFL_SIMULATIONS=5000 $(BIN)/pytest tests/peer/test_simulated_federation.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
