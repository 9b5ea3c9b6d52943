# Same verbs for people and for CI. Everything is installed into $(VENV) on first use.
#
#   make demo       set up, run a mixed-length batch on the best backend found, check it, draw it
#   make test       set up, lint, type-check, run every test that this machine can run
#   make test-gpu   the GPU tests and the properties on the cuda and triton backends
#   make notebooks  run the notebooks (on the GPU, if there is one) and save their outputs
#   make site       build the documentation into out/site
#   make lint | format | compile [ARCH=sm_90a] | bench [CASE=name] | docs | clean
#
# PYTHON=python3.12   another interpreter; VENV=dir  another place for the environment
# KDA_NO_VENV=1       (or VENV=) install nothing and run in PYTHON as it is
# EXTRA=cuda12|cuda13 which CuPy and NVRTC to install; chosen by the driver otherwise

PYTHON ?= python3
VENV ?= .venv
PYTEST_WORKERS ?= 2
# Processes that share the GPU; the tests that need much of its memory are kept in one of them.
GPU_WORKERS ?= 8

ifneq ($(strip $(KDA_NO_VENV)),)
  VENV :=
endif

ifeq ($(strip $(VENV)),)
  PY := $(PYTHON)
  READY :=
  LINT := no-lint
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/.installed
  LINT := lint
endif

# Without a driver the cuda12 set still compiles every target; with one, its CUDA version decides.
EXTRA ?= $(shell nvidia-smi 2>/dev/null | grep -qE 'CUDA( UMD)? Version: *(1[3-9]|[2-9][0-9])' \
           && echo cuda13 || echo cuda12)

TRITON_TESTS = $(wildcard tests/test_backend_triton.py tests/test_prefill_properties.py \
                 tests/test_recurrent.py tests/test_recurrent_triton.py tests/test_pack_triton.py \
                 tests/test_chunk.py)
RUN_TESTS = OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: demo test test-gpu lint no-lint format compile bench notebooks docs site clean
.DEFAULT_GOAL := demo

demo: $(READY)
	@$(PY) -m kda_jit demo $(ARGS)

test: $(READY) $(LINT)
	$(RUN_TESTS) -n $(PYTEST_WORKERS) tests
	@echo "== Triton kernels, in Triton's interpreter (a process of its own: the switch is read on import)"
	TRITON_INTERPRET=1 $(RUN_TESTS) -n $(PYTEST_WORKERS) -k triton $(TRITON_TESTS)

# Verbose, so that a run that is stopped has said what failed.
test-gpu: $(READY)
	$(PY) -m pytest -v -rfE -n $(GPU_WORKERS) --dist loadgroup tests/gpu
	$(PY) -m pytest -n $(GPU_WORKERS) -k "cuda or triton" \
	  tests/test_prefill_properties.py tests/test_recurrent.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) docs/generate.py --check

no-lint:
	@echo "== Not linted: that needs ruff and mypy in the pinned versions (make lint does it)"

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

compile: $(READY)
	$(PY) -m kda_jit compile $(if $(ARCH),--arch $(ARCH))

bench: $(READY)
	$(PY) -m kda_jit bench $(if $(CASE),--case $(CASE)) $(ARGS)

notebooks: $(READY)
	$(PY) notebooks/run.py --save $(ARGS)

docs: $(READY)
	$(PY) docs/generate.py

site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "out/site/index.html"

clean:
	rm -rf out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find kda_jit tests docs notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for every target. The stamp is written last, so a broken install is tried again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kda_jit needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "== Installing into $(VENV), once (extra: $(strip $(EXTRA)))"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[$(strip $(EXTRA)),triton,dev]'
	@touch $@
