# The targets of docs/commands.md. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# uv finds local wheels where pip is told to look; without PIP_FIND_LINKS this does nothing.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# One arithmetic thread a process: ranks and test workers share cores.
export OMP_NUM_THREADS := 1
# Tests start hundreds of processes: what one has compiled, none compiles again, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE
UV := $(BIN)/uv pip
# Of a node: `make install PREFIX=/opt/tidelm`. DESTDIR is put before it where a package or an image is made.
PREFIX ?= /opt/tidelm
NODE := $(DESTDIR)$(PREFIX)

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(UV) install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

setup: $(VENV)/.ready ## a virtual environment in .venv with everything, developer tools included

demo: setup ## start the mini model on two ranks, ask it something over HTTP, show its statistics, stop
	@bash minis/demo.sh

lint: setup ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

resolve: setup ## the tested versions resolve for x86_64 and aarch64 (nothing is installed)
	for machine in x86_64 aarch64; do \
	  $(UV) compile --quiet --no-header --no-annotate --only-binary :all: --python-version 3.12 \
	    --python-platform $$machine-manylinux_2_31 -c constraints.txt --extra dev pyproject.toml -o /dev/null \
	    || exit 1; echo "$$machine: resolved"; done

test: lint resolve ## everything that can be tested without an accelerator
	$(BIN)/pytest -n 2 --dist loadgroup -m "not browser and not faults and not gpu and not systemd"

test-ssh: setup ## two nodes on this machine by a real ssh (root, openssh-client and openssh-server)
	$(BIN)/pytest -rs tests/tidectl/test_real_ssh.py

test-gpu: setup ## what needs a CUDA device; says so where there is none
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then $(BIN)/pytest -m gpu; else echo "no CUDA device here: nothing was tested"; fi

test-page: setup ## the page of the expert map in a headless Chromium, and on the mini while it is asked
	@command -v chromium chromium-browser google-chrome google-chrome-stable chrome > /dev/null || \
	  { echo "no Chromium in PATH: apt-get install chromium (Debian, Ubuntu), then again"; exit 1; }
	$(BIN)/pytest tests/page

pictures: setup ## docs/images again: the page and its tide in a headless Chromium, of the mini while it is asked
	$(BIN)/python -m tests.page.picture docs/images

test-systemd: setup ## an installation, and units that really start, hang, die and stop under a systemd of their own, on one node and two (root; 5 to 15 minutes)
	$(BIN)/pytest -m systemd -rs

fuzz: setup ## 10,000 requests made from our own document, 2,000 beside it, 20,000 damaged files, messages and answers: never a fault or a hang
	TIDE_FUZZ_EXAMPLES=650 $(BIN)/pytest -n auto tests/api/test_document_fuzz.py tests/api/test_openai_fuzz.py tests/fuzz

soak: setup ## 500 mixed requests a run over HTTP against each mini, all experts resident and then moving ones; nothing leaks
	$(BIN)/python -m tests.soak

faults: setup ## a simulated pair 1,000 times, a pair of each mini at every stage of its life, each struck as its seed says; DeepSeek's is the table in docs/results.md
	$(BIN)/pytest -m faults
	$(BIN)/python -m tests.faults.simulated --receipt docs/receipts/faults-simulated.txt
	rm -f docs/receipts/faults.jsonl
	$(BIN)/python -m tests.faults --keep docs/receipts/faults.jsonl --table docs/results.md
	$(BIN)/python -m tests.faults.simulated --mini glm
	$(BIN)/python -m tests.faults --mini glm

bench: setup ## where a decode step of the mini model spends its time, on two ranks
	$(BIN)/python bench/decode_step.py profiles/mini-deepseek.toml

bench-viewers: setup ## what four viewers of the expert map cost a running answer; fails where that can be measured (to be run at rest)
	$(BIN)/python bench/viewers.py

bench-http: setup ## what HTTP costs a token of 8 streams; fails where that is too much (to be run at rest)
	$(BIN)/python bench/http_overhead.py

build/uv/bin/uv:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet uv

# The environment is made beside and put in place as a whole. It is read by a service that writes nothing there, so it is
# compiled here; and moved to where it belongs by who packs it, so its scripts find their Python beside themselves.
install: build/uv/bin/uv ## TideLM for a node: an environment of its own in PREFIX (/opt/tidelm), commands in PREFIX/bin; then `tidectl service install`
	@set -eu; umask 022; \
	case "$(PREFIX)" in /?*) ;; *) echo "PREFIX must be absolute, and not /" >&2; exit 2;; esac; \
	python=$$($(PYTHON) -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'); \
	case "$$python" in /root/*|/home/*) \
	  echo "$$python lies in a home, which the service cannot see: make install PYTHON=/usr/bin/python3" >&2; exit 2;; esac; \
	new="$(NODE)/venv.new"; rm -rf "$$new" build/lib build/bdist*; mkdir -p "$(NODE)/bin"; \
	build/uv/bin/uv venv --quiet --no-project --relocatable --python "$$python" "$$new"; \
	build/uv/bin/uv pip install --quiet --python "$$new/bin/python" -c constraints.txt --compile-bytecode .; \
	site=$$("$$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	mkdir -p "$$site/minis"; cp -R minis/deepseek minis/glm "$$site/minis/"; \
	rm -rf "$(NODE)/venv.old"; if [ -e "$(NODE)/venv" ]; then mv "$(NODE)/venv" "$(NODE)/venv.old"; fi; \
	mv "$$new" "$(NODE)/venv"; rm -rf "$(NODE)/venv.old"; \
	for name in tidectl tided; do ln -sfn "../venv/bin/$$name" "$(NODE)/bin/$$name"; done; \
	echo "installed $$("$(NODE)/bin/tidectl" --version) in $(NODE); next: $(PREFIX)/bin/tidectl service install"

uninstall: ## take that away again; models, histories and profiles stay
	@set -eu; \
	if grep -qs "=$(PREFIX)/bin/tided " "$(DESTDIR)/etc/systemd/system/tided@.service"; then \
	  echo "the service's units start it: $(PREFIX)/bin/tidectl service uninstall first" >&2; exit 1; fi; \
	for name in tidectl tided; do \
	  if [ "$$(readlink "$(NODE)/bin/$$name")" = "../venv/bin/$$name" ]; then rm "$(NODE)/bin/$$name"; fi; done; \
	rm -rf "$(NODE)/venv" "$(NODE)/venv.new" "$(NODE)/venv.old"; \
	rmdir --ignore-fail-on-non-empty "$(NODE)/bin" "$(NODE)" 2>/dev/null || true; \
	echo "removed $(NODE)/venv and its commands"

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

.PHONY: help setup demo install uninstall lint resolve test fuzz soak faults pictures test-page test-systemd test-ssh test-gpu bench bench-http bench-viewers clean
