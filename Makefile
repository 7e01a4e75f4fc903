# `make demo` and `make test` are enough on a fresh clone: Python >= 3.10 and a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
NATIVE  = $(shell git ls-files 'templates/*.h' 'templates/*.cuh' 'templates/*.cpp' 'templates/*.cu')

.PHONY: help demo test slow env lint format report tables clean

help:
	@echo "make demo    install into $(VENV) and run examples/quickstart.py"
	@echo "make test    install into $(VENV) and run the CPU tests, but for the slow ones"
	@echo "make slow    the slow tests: the full coverage grid, compilers under every option, many processes"
	@echo "make lint    ruff, mypy, import-linter, clang-format, result tables: what CI checks"
	@echo "make format  rewrite the sources the way lint wants them"
	@echo "make tables  write the result tables of README.md from benchmarks/results"
	@echo "make report  files and functions that have grown large (a sign, not a failure)"
	@echo "make clean   remove $(VENV) and build output"

demo: $(VENV)/.installed-hf
	$(BIN)/python examples/quickstart.py

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not multigpu" $(PYTEST_ARGS)

slow: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu and not multigpu" $(PYTEST_ARGS)

env: $(VENV)/.installed-dev

# One stamp an extra: an install is repeated only when pyproject.toml has changed.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing moeflex and what it needs into $(VENV) (PyTorch is large: the first time takes minutes)"
	$(PIP) install --editable ".[$(if $(filter dev,$*),hf$(,)dev,$*)]"
	@touch $@

, := ,

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else "moeflex needs Python 3.10 or newer, $(PYTHON) is %d.%d; say which one to use: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(NATIVE),$(BIN)/clang-format --dry-run --Werror $(NATIVE))
	$(BIN)/python benchmarks/render_tables.py --check

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE),$(BIN)/clang-format -i $(NATIVE))

report: env
	@echo "Files over 400 lines (500 for C++ and CUDA):"
	@git ls-files '*.py' '*.h' '*.cuh' '*.cpp' '*.cu' | while read -r file; do \
	    case $$file in *.py) limit=400 ;; *) limit=500 ;; esac; \
	    lines=$$(wc -l < "$$file"); \
	    if [ "$$lines" -gt "$$limit" ]; then printf '  %6d  %s\n' "$$lines" "$$file"; fi; \
	done
	@echo "Functions of complexity over 10:"
	@$(BIN)/ruff check --select C901 --exit-zero --output-format concise . | sed 's/^/  /'

tables: env
	$(BIN)/python benchmarks/render_tables.py

clean:
	rm -rf $(VENV) build dist *.egg-info
