# `make` alone lists the commands. Every one sets up .venv first, once; works with GNU make 3.81 and newer.

PYTHON ?= python3
CHAPTER ?=
NPROC ?= 4
PORT ?= 8000
NOTEBOOK ?=
WORKERS ?= 4
SETTINGS ?= ATEN_CPU_CAPABILITY=default,DNNL_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=avx2,DNNL_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1
ARGS ?=
TORCH ?=
ALL ?=

VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
# Set-up is done when this file exists. Its name changes with what set-up reads, and with the folder's place.
READY := $(VENV)/ready-$(word 1,$(shell (pwd; cat requirements.txt requirements.lock pyproject.toml) | cksum))
BENCH_READY := $(READY)-bench-$(word 1,$(shell cat requirements-bench.txt 2>/dev/null | cksum))
PIP := $(BIN)/python -m pip --disable-pip-version-check
# PyPI's torch for Linux brings gigabytes of CUDA. Without a GPU, PyTorch's own index has a smaller build.
CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu --no-deps --retries 0 --timeout 10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book pdf serve test lab scripts run picture check rehearse sabotage bench soak portability outputs system setup lock

help:
	@echo "World Size One"
	@echo
	@echo "  make book         build the book, and every chapter's script"
	@echo "  make pdf          build the book, and print all of it as one PDF, which its first page then links"
	@echo "  make picture      take the picture that README.md and cards of links show, from the built book"
	@echo "  make serve        show the built book at http://127.0.0.1:8000/  (PORT=8000)"
	@echo
	@echo "  make check        ruff, and all tests that start no ranks, browsers and clusters"
	@echo "  make check CHAPTER=04    ruff, and one chapter: its cells, its script, its rehearsal"
	@echo "  make test         run every notebook's cell, every script, and what else needs Python alone; 10 to 20 minutes on two cores"
	@echo "  make test ALL=1   also the built pages, in browsers too, several hosts, a Slurm cluster, lies and many kills, as CI does"
	@echo "  make test TORCH=2.15.0   the same under another PyTorch, in an environment of its own"
	@echo "  make system       install what some tests and the PDF need: chromium, Slurm  (asks first)"
	@echo
	@echo "  make lab          open the notebooks in JupyterLab"
	@echo "  make scripts      write every chapter's torchrun script to scripts/"
	@echo "  make run          export one chapter and run it under torchrun  (CHAPTER=04 NPROC=4 ARGS='--epochs 2')"
	@echo
	@echo "  make rehearse     run the GPU path of eleven chapters on 8 or 2 x 8 pretended GPUs"
	@echo "  make sabotage     tell the chapters lies, see which cells notice, and name asserts that cannot fail"
	@echo "  make bench        measure this project beside other ways to do the same  (ARGS=--record writes the book's tables)"
	@echo "  make soak         run a chapter's script 40 times on 2 ranks and 40 times on 4  (CHAPTER=04 ARGS='--runs 40')"
	@echo "  make soak CHAPTER=13 ARGS='--kills 200'    kill ranks of its job, and compare its last weights to the last bit"
	@echo "  make soak CHAPTER=16 ARGS='--kills 1000'   kill ranks of its job, each time on another mesh, and compare its weights"
	@echo "  make portability  compare the notebooks' outputs under other CPU settings"
	@echo "  make outputs      run notebooks and store their outputs  (NOTEBOOK=notebooks/04_ddp.ipynb, default all)"
	@echo
	@echo "  make lock         pin what requirements.txt brings with it, in requirements.lock"
	@echo
	@echo "The first command makes .venv, with PYTHON=python3; that takes a few minutes."

# Without bytecode each of the tests' processes would compile this project's sources again.
unexport PYTHONDONTWRITEBYTECODE

# --- set-up ---------------------------------------------------------------------------------------------------------

setup: $(READY)

# A .venv that no set-up finished (interrupted, moved, or somebody's own) is made anew; a finished one is brought up to
# date. The old mark goes first and the new one comes last, so a step that fails leaves none.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1 || true)."; \
	  echo "Install one, then name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@echo "Setting up $(VENV) from requirements.txt (the first time takes a few minutes)."
	@ls $(VENV)/ready-* >/dev/null 2>&1 && grep -qsF "$(CURDIR)/$(BIN)" $(BIN)/pip && $(BIN)/python -c "" 2>/dev/null \
	  || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/ready-*
	@if [ -n "$(TORCH)" ]; then sed 's/^torch==.*/torch==$(TORCH)/' requirements.txt; \
	  else cat requirements.txt && echo "-c ../requirements.lock"; fi >$(VENV)/pins.txt
	@[ "$$(uname)" != Linux ] || nvidia-smi >/dev/null 2>&1 \
	  || $(PIP) install --quiet $(CPU_TORCH) "$$(grep ^torch== $(VENV)/pins.txt)" 2>/dev/null \
	  || echo "PyTorch's index of CPU builds does not answer: pip takes the build that it finds."
	@[ -t 1 ] || quiet=--quiet; $(PIP) install $$quiet -r $(VENV)/pins.txt
	@$(PIP) install --quiet --no-deps --editable .
	@touch $@

$(BENCH_READY): $(READY) requirements-bench.txt
	@$(PIP) install --quiet -r requirements-bench.txt
	@touch $@

# uv, because it alone resolves for every Python and system at once, with markers, and keeps what the file has already.
# ARGS=--upgrade takes the newest of everything that requirements.txt does not pin.
lock: $(READY)
	@$(PIP) install --quiet uv
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	  --output-file requirements.lock $(ARGS) requirements.txt

# --- the book -------------------------------------------------------------------------------------------------------

scripts: $(READY)
	@$(BIN)/python -m helpers export --all --out scripts --force

# From nothing every time: a page that left the table of contents must not linger, nor a warning be seen only once.
book: scripts
	@rm -rf _build
	@$(BIN)/jupyter-book build . --warningiserror --keep-going -n --quiet >/dev/null
	@test -f _build/html/index.html || { echo "The build wrote no _build/html/index.html." >&2; exit 1; }
	@echo
	@echo "The book is in _build/html: open file://$(CURDIR)/_build/html/index.html, or run 'make serve'."

pdf: book
	@$(BIN)/python tools/print_pdf.py _build/html _build/world-size-one.pdf

picture: book
	@$(BIN)/python tools/take_picture.py

serve: $(READY)
	@test -f _build/html/index.html || { echo "The book is not built yet. Run 'make book' first." >&2; exit 1; }
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT))).close()' 2>/dev/null || { \
	  echo "Port $(PORT) is taken. Try another: make serve PORT=8001" >&2; exit 1; }
	@echo "The book is at http://127.0.0.1:$(PORT)/ until you press Ctrl-C."
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

lab: $(READY)
	@$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null  # or JupyterLab strips the stored figures
	@$(BIN)/jupyter lab --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks $(ARGS)

run: $(READY)
	@$(BIN)/python -m helpers run $(or $(CHAPTER),04) --nproc $(NPROC) -- $(ARGS)

# --- verification ---------------------------------------------------------------------------------------------------

# A file's tests stay on one worker, and so does a notebook's kernel; conftest.py puts the longest first. Many
# tests wait, for a cluster, a time-out or a network: so there are more workers than a small machine has cores.
PYTEST = $(BIN)/python -m pytest --nbval --dist loadfile --no-loadscope-reorder -n $(WORKERS)

RUFF := $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .

# A chapter's tests are in three files.
check: WORKERS = 3
check: $(READY)
	@$(RUFF)
ifeq ($(CHAPTER),)
	@$(PYTEST) --quick -q $(ARGS)
else
	@notebook=$$(ls notebooks/$(CHAPTER)*.ipynb) && $(PYTEST) -q -k "$$(basename $$notebook .ipynb)" \
	  "$$notebook" tests/test_scripts.py tests/test_notebooks.py $(ARGS)
endif

# ALL=1, and CI's own variable, run everything. Who names tests in ARGS wants to run them.
test: $(READY)
	@status=0; { $(RUFF); } || status=1; $(PYTEST) $(if $(ALL)$(CI)$(ARGS),,--short) $(ARGS) || status=1; exit $$status

system:
	@sh tools/install_system.sh

soak: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python tools/soak.py --chapter $(or $(CHAPTER),04) $(ARGS)

# ATEN_CPU_CAPABILITY and DNNL_MAX_CPU_ISA limit which of the CPU's instructions PyTorch and oneDNN use, as an older CPU
# would. They go together: no CPU has the one limit alone, and PyTorch then fails in attention ("pack_vnni2").
portability: $(READY)
	@status=0; for setting in $(SETTINGS); do \
	  echo "$$setting"; env $$(echo $$setting | tr , ' ') $(PYTEST) notebooks -q $(ARGS) || status=1; \
	done; exit $$status

rehearse: $(READY)
	@$(BIN)/python tools/rehearse_all.py

sabotage: $(READY)
	@PYTHONPATH=tools:tests/support $(BIN)/python -m sabotage.run $(ARGS)

# On a busy machine, an OpenMP thread that spins keeps its own rank waiting.
outputs: export OMP_WAIT_POLICY := passive
outputs: $(READY)
	@$(BIN)/python tools/store_outputs.py $(NOTEBOOK)

bench: $(BENCH_READY)
	@$(BIN)/python tools/bench.py $(ARGS)
