# make demo   set up .venv and generate from the tiny checkpoint with both engines
# make test   set up .venv and run the tests
# make check  set up .venv and run the linter, the type checker and the kernel checks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The MLX back-end for this machine: Metal comes with mlx on Apple silicon, Linux needs an extra.
ifeq ($(shell uname -s),Darwin)
  BACKEND :=
else ifneq ($(shell command -v nvidia-smi),)
  DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1 | cut -d . -f 1)
  BACKEND := $(if $(shell test 0$(DRIVER) -ge 580 && echo new),cuda13,cuda12)
else
  BACKEND := cpu
endif
comma := ,
EXTRAS := $(BACKEND)$(if $(BACKEND),$(comma))

.PHONY: demo test check clean

demo: $(VENV)/demo
	$(BIN)/python examples/ab.py

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lily-mlx kernels check

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 15) or sys.exit(f"{sys.executable} is Python {v[0]}.{v[1]}; lily-mlx needs 3.11 to 3.14: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

# One stamp file for what is installed: demo, test or dev.
$(VENV)/demo: EXTRA = $(EXTRAS)bench
$(VENV)/test: EXTRA = $(EXTRAS)bench,test
$(VENV)/dev: EXTRA = $(EXTRAS)dev
$(VENV)/%: pyproject.toml lily_mlx/lily_mlx.pth | $(BIN)/python
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -e '.[$(EXTRA)]'
	@touch $@

clean:
	rm -rf $(VENV)
