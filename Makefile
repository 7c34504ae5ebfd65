# `make demo` and `make test` each do all of the set-up: they need python3 (3.11 to 3.13), make and git.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Two workers, a file whole in one of them: what a file starts (ranks, servers) is started once. Files are begun in the
# order of tests/conftest.py, the longest first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
READY = $(VENV)/.ready

.PHONY: demo test lint types layers tests install clean

demo: install
	$(BIN)/diptych demo --output demo.mp4 --sheet demo.png

test: install lint types layers tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy --cache-dir $(VENV)/.mypy_cache

layers: install
	$(BIN)/lint-imports

# Where no bytecode is written, every process that a test starts compiles the package anew.
tests: install
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# Requirements are installed when pyproject.toml or constraints.txt changed; the project itself every time.
install: $(READY)
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(0 if (3, 11) <= v <= (3, 13) else "diptych needs Python 3.11, 3.12 or 3.13; this is %d.%d" % v)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	echo "installing python3-venv, which Debian keeps apart from python3"; \
	apt-get update -qq && apt-get install -qq -y python3-venv; } || { \
	echo "python3-venv is missing: run 'apt-get install python3-venv' as root, then make again" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,server]'
	@touch $(READY)

clean:
	rm -rf $(VENV) demo.mp4 demo.png build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
