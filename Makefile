# Two commands do everything on a bare Linux machine with Python 3.11: `make demo` and `make test`.
# Each builds the environment first if it is not there (about two minutes, once).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCK := requirements/cpu.lock

.PHONY: help demo test check static unit fix serve bench soak thumbs judged docs lock install clean
.DEFAULT_GOAL := help

help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

demo: $(INSTALLED)  ## Watch an agent learn: ten minutes; DEMO_ARGS="--seed 1 --steps 200", "--shuffle-rewards", ...
	$(BIN)/whetstone demo $(DEMO_ARGS)

test: check  ## Everything, with a real vLLM, PostgreSQL and Redis
	$(BIN)/pytest -m "slow or stack" $(TEST_ARGS)

check: $(INSTALLED)  ## Lint, types, contracts, unit tests: a minute
	$(MAKE) --no-print-directory --jobs 2 --output-sync static unit

static: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(INSTALLED)
	$(BIN)/pytest -m "not slow and not stack" $(TEST_ARGS)

fix: $(INSTALLED)  ## Mend what a machine can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve: $(INSTALLED)  ## The stack, until Ctrl-C; SERVE_ARGS="--data DIR --model MODEL --train"
	$(BIN)/whetstone up $(SERVE_ARGS)

bench: $(INSTALLED)  ## What the proxy costs, as a ratio to the upstream alone
	$(BIN)/python benchmarks/overhead.py $(BENCH_ARGS)

soak: $(INSTALLED)  ## Whether the proxy holds: 10,000 requests, apps that hang up, a model server that goes wrong
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

thumbs: $(INSTALLED)  ## Whether thumbs on single answers teach: a few minutes; THUMBS_ARGS="--shuffle", ...
	$(BIN)/python -m benchmarks.thumbs $(THUMBS_ARGS)

judged: $(INSTALLED)  ## Whether judges rank 1,000 groups once each, their worker killed meanwhile: eight minutes
	$(BIN)/python -m benchmarks.judged $(JUDGED_ARGS)

docs: $(INSTALLED)  ## Write the pages that are made from the code
	$(BIN)/python -m whetstone.docs

install: $(INSTALLED)  ## Only the environment

lock: $(INSTALLED)  ## Choose versions anew; FIND_LINKS names a folder with PyTorch's CPU wheel
	sh requirements/lock.sh $(BIN) $(LOCK) $(FIND_LINKS)

clean:  ## Remove the environment and what demos left
	rm -rf $(VENV) data

$(INSTALLED): $(LOCK) pyproject.toml
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 11) and f"the lock is for Python 3.11, this is {v[0]}.{v[1]}: install python3.11 or name one with PYTHON=...")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
