# Each target sets up what it needs, in .venv, on a machine that has Python 3.10 to 3.13 and make.
#
#   make lab      train a model through a real pipeline and show what happened
#   make test     prove it equal to one process: a quick selection
#   make full     every test
#   make mutants  break the engine in every way we know, and see which test notices (SECTIONS=9.12,9.15)
#   make layouts  draw N layouts of a model and compare each with one process (N=200 SEED=0)
#   make check    lint, format, types
#   make clean    remove everything that was set up or written
#
# PYTHON=python3.12   builds the environment with another Python
# USE_SYSTEM=1        uses the torch that this Python already has (GPU containers), in .venv-system

PYTHON ?= python3
NPROC ?= 4
ifeq ($(USE_SYSTEM),1)
VENV := .venv-system
else
VENV := .venv
endif
BIN := $(VENV)/bin/python
CONSTRAINTS := $(VENV)/constraints.txt
INSTALL := $(BIN) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
CHECKED := $(wildcard ds_lite chapters labs tests)

.PHONY: lab test full mutants layouts check clean
.DELETE_ON_ERROR:

lab: $(VENV)/core.done
	$(BIN) -m ds_lite lab 2 --impl solution --nproc $(NPROC)

N ?= 200
SEED ?= 0

test full mutants layouts: export OMP_NUM_THREADS = 1

test: $(VENV)/tools.done
	$(BIN) -m pytest --quiet --doctest-modules ds_lite
	$(BIN) -m pytest --numprocesses auto --dist loadgroup tests

full: $(VENV)/tools.done
	$(BIN) -m pytest --quiet --doctest-modules ds_lite
	$(BIN) -m pytest --numprocesses auto --dist loadgroup --full tests

mutants: $(VENV)/tools.done
	$(BIN) tests/mutants $(if $(SECTIONS),--sections $(SECTIONS))

layouts: $(VENV)/tools.done
	$(BIN) -m pytest --numprocesses auto --dist loadgroup -rP --layouts $(N) --layout-seed $(SEED) tests/test_every_layout.py -k any_layout

check: $(VENV)/tools.done
	$(BIN) -m ruff check $(CHECKED)
	$(BIN) -m ruff format --check $(CHECKED)
	$(BIN) -m mypy ds_lite

clean:
	rm -rf .venv .venv-system .pytest_cache .mypy_cache .ruff_cache .hypothesis build runs site *.egg-info
	find ds_lite chapters labs tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Re-done only when the project's requirements change.
$(VENV)/core.done: $(CONSTRAINTS)
	$(INSTALL) --editable .
	touch $@

$(VENV)/tools.done: $(CONSTRAINTS)
	$(INSTALL) --editable '.[test,dev,hf,domino]'
	touch $(VENV)/core.done $@

.venv/constraints.txt: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	cp constraints.txt $@

# A system torch stays as it is: it is pinned to its own version, and of our pins only those of the tools count,
# because the system's numpy, sympy and the like were chosen to fit that torch.
.venv-system/constraints.txt: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import torch' || { echo 'USE_SYSTEM=1: $(PYTHON) has no torch; name another with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv --system-site-packages .venv-system
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	    > "$$(.venv-system/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-torch.pth"
	grep -E '^(pytest|pytest-xdist|hypothesis|ruff|mypy|transformers|safetensors|tokenizers|huggingface-hub|greenlet)==' constraints.txt > $@
	$(PYTHON) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> $@
