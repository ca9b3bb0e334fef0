# `make demo` and `make test` are all that a newcomer needs; the first call creates .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin

# About 45 minutes on two cores; each benchmark prints a ratio against a limit measured in the same run.
BENCHMARKS = round_loop naive gossip_average robust_average prune_and_regrow packing evaluation partition start_up side_by_side \
  kept_heap memory_format batched_peers memory_at_rest memory_peak memory_of_peers many_peers states_on_disk ray_speed ray_overhead codec transport relay bandwidth serving \
  channel_exchange channel_export channel_rounds membership private_memory clock view_pages

.PHONY: demo test check reference messages docs bench fuzz clean

demo: $(VENV)/.installed
	$(BIN)/dispfl demo

# Tests start hundreds of processes: compile the modules for them once, and not in each, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Three files run at the same time, because many tests wait for real processes; the longest first (tests/conftest.py).
test: $(VENV)/.installed
	$(BIN)/pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder

# Linters, types and import directions.
check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

# The pages in docs/reference, from the settings and the commands themselves.
reference: $(VENV)/.installed
	$(BIN)/python -m dispfl.cli.reference docs/reference

# tests/messages.json, the wording of all messages that tests expect; look at its difference.
MESSAGES = $(CURDIR)/build/messages
messages: $(VENV)/.installed
	rm -rf $(MESSAGES)
	DISPFL_MESSAGES=$(MESSAGES) $(BIN)/pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile
	DISPFL_MESSAGES=$(MESSAGES) $(BIN)/python tests/shared/messages.py

# The documentation site, in build/site; a broken link is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html"

bench: $(VENV)/.installed
	for benchmark in $(BENCHMARKS); do $(BIN)/python benchmarks/$$benchmark.py || exit 1; done

# Damaged messages and files, simulated federations on faulty networks and with hostile members, and 32 real peers
# monitored for leaks, for a quarter of the time each; the seeds that were tried are printed. `make fuzz FUZZ_MINUTES=120` for a night.
FUZZ_MINUTES ?= 10
fuzz: $(VENV)/.installed
	for campaign in wire/test_bad_bytes cli/test_damaged_files peer/test_simulated_federation peer/hostile/test_leaks; do \
	  DISPFL_FUZZ_SECONDS=$$(( 15 * $(FUZZ_MINUTES) )) $(BIN)/pytest -s tests/$$campaign.py || exit 1; \
	done

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
