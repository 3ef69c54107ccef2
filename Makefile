# `make` alone lists the commands. Each sets up .venv first, once; works with GNU make 3.81 and newer.
PYTHON ?= python3
NPROC ?= 4
PORT ?= 8000
NOTEBOOK = $(firstword $(wildcard $(foreach number,$(CHAPTER) 0$(CHAPTER),notebooks/$(number)_*.ipynb)))
# With CHAPTER, make check runs these: the cells, what the tests hold of every notebook, and what it prints.
OF_CHAPTER = "$(NOTEBOOK)" tests/test_chapters.py tests/test_notebooks.py tests/test_scripts.py tests/test_commands.py \
  -k "$(basename $(notdir $(NOTEBOOK))) or test_chapters or test_each_line"
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Many tests wait, for a cluster, a time-out or a network: so there are more workers than a small machine has cores.
PYTEST := $(BIN)/python -m pytest --nbval --dist loadfile --no-loadscope-reorder
STATIC = $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary helpers tools
unexport TORCH  # a make that a test starts must not set up another environment
unexport PYTHONDONTWRITEBYTECODE  # without bytecode each of the tests' processes would compile the sources again

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book pages pdf epub translate publish serve lab scripts run chapter check test rehearse gpu sabotage soak bench outputs system lock

help:
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'
	@echo "The first command makes .venv with PYTHON=python3, which takes a few minutes. ARGS='...' goes to the program."

# Which PyTorch it takes, and what else it decides, is in tools/set_up.py.
$(READY): requirements.txt requirements.lock pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no $(PYTHON). Name a Python from 3.11 on: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) tools/set_up.py $(VENV) $(TORCH)

book: scripts  ## build the book, and every chapter's script
	@rm -rf _build  # a page that left the table of contents must not linger, nor a warning be seen only once
	@$(BIN)/jupyter-book build . --warningiserror --keep-going -n --quiet >/dev/null
	@test -f _build/html/index.html  # jupyter-book 2 would build nothing, and exit with 0
	@echo "The book is in _build/html: open file://$(CURDIR)/_build/html/index.html, or run 'make serve'."
pages: $(READY)  ## measure the built book's chapters: screens of code, text, output, pictures; run make book first
	@$(BIN)/python tools/measure_pages.py
pdf: book  ## build the book, and print all of it as one PDF, which its first page then links
	@$(BIN)/python tools/print_pdf.py _build/html _build/world-size-one.pdf
epub: book  ## build the book, and make one EPUB of it for e-readers, which its first page then links
	@$(BIN)/python tools/make_epub.py _build/html _build/world-size-one.epub
translate: scripts  ## a translation: what is left to translate, and the book in it  (LANGUAGE=de PAGE=book/glossary)
	@$(BIN)/python tools/translate.py $(LANGUAGE) $(PAGE)
publish: export BOOK_REPOSITORY_URL = $(ADDRESS)
publish: $(if $(ADDRESS),book)  ## the book for its ADDRESS=https://github.com/OWNER/NAME, with launch buttons
	@test -n "$(ADDRESS)" || { echo "Give the repository: make publish ADDRESS=https://github.com/OWNER/NAME" >&2; exit 1; }
	@$(BIN)/python tools/publish.py "$(ADDRESS)"
serve: $(READY)  ## show the built book on 127.0.0.1  (PORT=8000)
	@test -f _build/html/index.html || { echo "The book is not built yet. Run 'make book' first." >&2; exit 1; }
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT))).close()' 2>/dev/null || { \
	  echo "Port $(PORT) is taken. Try another: make serve PORT=8001" >&2; exit 1; }
	@echo "The book is at http://127.0.0.1:$(PORT)/ until you press Ctrl-C."
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

lab: $(READY)  ## open the notebooks in JupyterLab
	@$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null  # or JupyterLab strips the stored figures
	@$(BIN)/jupyter lab --config=tools/lab/jupyter_config.py --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

scripts: $(READY)  ## write every chapter's torchrun script to scripts/
	@$(BIN)/python -m helpers export --all --out scripts --force
	@# A copy without .git, on a machine with GPUs, finds there from which commit its scripts are.
	@if test -e .git; then git describe --always --dirty --exclude='*' >scripts/COMMIT; else rm -f scripts/COMMIT; fi
run: $(READY)  ## export one chapter and run it under torchrun  (CHAPTER=04 NPROC=4 ARGS='--epochs 2')
	@$(BIN)/python -m helpers run $(or $(CHAPTER),04) --nproc $(NPROC) -- $(ARGS)

chapter: $(READY)  ## start a chapter from the template  (NAME=17_topic)
	@$(BIN)/python tools/new_chapter.py $(NAME)
check: $(READY)  ## ruff, mypy, tests that start no ranks; CHAPTER=04: one chapter's cells, script and rehearsal
	@$(if $(CHAPTER),$(if $(NOTEBOOK),,echo "There is no chapter $(CHAPTER). Give a number: 04 or 10b" >&2; exit 1))
	@$(STATIC)
	@$(if $(CHAPTER),$(PYTEST) -n 3 -q $(OF_CHAPTER),$(PYTEST) -n 3 -q -m "not ranks and not slow and not system and not daily" tests) $(ARGS)

# CI's own variable means ALL=1. Who names tests in ARGS wants to run them, whatever they need; flags as -x name none.
# ALL=1 and DAILY=1 (and CI) also write what passed to notebooks/verified.json, for the last line of each page.
NAMES_TESTS = $(filter tests% notebooks% -k% -m%,$(ARGS))
SELECTED = $(if $(NAMES_TESTS)$(DAILY),,$(if $(ALL)$(CI),-m "not daily",-m "not slow and not system and not daily"))
test: $(READY)  ## every cell, script and process group; ALL=1: also built pages, hosts, Slurm; DAILY=1: all; TORCH=2.15.0
	@static=$$(mktemp); { $(STATIC); } >$$static 2>&1 & checked=$$!; status=0; \
	$(PYTEST) -n 4 $(if $(ALL)$(CI)$(DAILY),--record-verified) $(SELECTED) $(ARGS) || status=1; \
	wait $$checked || status=1; cat $$static; rm -f $$static; exit $$status
rehearse: $(READY)  ## run the GPU path of eleven chapters on 8 or 2 x 8 simulated GPUs
	@$(BIN)/python tools/rehearse_all.py
gpu: $(READY)  ## verify the whole book on this machine's GPUs  (ARGS='--chapters 04 06')
	@$(BIN)/python -m helpers verify $(ARGS)
sabotage: $(READY)  ## tell the chapters lies, and see which cells notice
	@PYTHONPATH=tools $(BIN)/python -m sabotage.run $(ARGS)
soak: $(READY)  ## run a script many times, or kill its ranks  (CHAPTER=13 ARGS="--kills 200")
	@PYTHONPATH=tests/support $(BIN)/python tools/soak.py --chapter $(or $(CHAPTER),04) $(ARGS)
bench: $(READY)  ## measure this project beside other ways to do the same  (ARGS=--record writes the book's tables)
	@$(PIP) install --quiet -r requirements-bench.txt && $(BIN)/python tools/bench.py $(ARGS)
outputs: $(READY)  ## run notebooks and store their outputs  (ARGS=notebooks/04_ddp.ipynb, default all)
	@OMP_WAIT_POLICY=passive $(BIN)/python tools/store_outputs.py $(ARGS)  # a spinning thread keeps its own rank waiting
system:  ## install what some tests and the PDF need: chromium, Slurm  (asks first)
	@sh tools/install_system.sh
lock: $(READY)  ## pin what requirements.txt brings with it, in requirements.lock  (ARGS=--upgrade)
	@$(PIP) install --quiet uv  # it alone resolves for every Python and system at once, with markers
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	  --output-file requirements.lock $(ARGS) requirements.txt
	@sed -i.before -E '/^(torch|triton|cuda-|nvidia-)/d' requirements.lock && rm requirements.lock.before  # set_up.py chooses
