# Two commands do all the set-up on a fresh machine: `make quickstart` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
# Installed before everything else: a plain requirement on torch may bring gigabytes of CUDA to a machine without a GPU.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-slow check format bench-buffer clean

quickstart: $(VENV)/.installed
	$(BIN)/async-rl train recipes/quickstart.toml
	@echo
	@echo "The same with your own data: docs/recipes/quickstart.md, section 'Your own data'."

test: $(VENV)/.installed-dev check
	$(BIN)/pytest -m "not slow and not gpu"

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu" --timeout 1800

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Ray and TransferQueue are compared with, never used: they stand in an environment of their own.
bench-buffer:
	$(MAKE) $(VENV)-bench/.installed-bench VENV=$(VENV)-bench
	$(VENV)-bench/bin/python benchmarks/buffer.py

clean:
	rm -rf $(VENV) $(VENV)-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/pip install --quiet "ray==2.60.0" "TransferQueue==0.1.11"
	@touch $@
