# Two commands do everything on a bare Linux machine (x86-64) with Python 3.11, 3.12 or 3.13: `make demo`, `make test`.
# Each builds the environment first if it is not there (about two minutes, once).

# Which Python, and where PyTorch's CPU build is; left out, requirements/install.py looks for both.
export PYTHON TORCH_INDEX
# Bytecode is written: vLLM imports 5,000 modules at each start; compiling them takes a quarter of that time (docs/log/tests.md).
unexport PYTHONDONTWRITEBYTECODE
INSTALL := sh requirements/install.sh
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCK := requirements/cpu.lock

# Tests run in a process a core and one more: some wait. What shares a server stays in one of them (tests/sharing.py).
AT_ONCE := --numprocesses $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1) --maxprocesses 5 --dist loadscope

# What `make test-all` does: what `make test` does, and what that leaves out. PART="clients trl" does only these.
PARTS := short postgresql exact clients stacks harnesses store quantised service trl real examples unsloth
PART := $(PARTS)

# TRL, the reference of the losses: an environment of its own that sees the packages of the other.
TRL := .venv-trl
TRL_INSTALLED := $(TRL)/.installed
TRL_LOCK := requirements/trl.lock

# LangGraph, OR-Tools and reasoning-gym, which some examples need: an environment of its own, likewise.
EXAMPLES := .venv-examples
EXAMPLES_INSTALLED := $(EXAMPLES)/.installed
EXAMPLES_LOCK := requirements/examples.lock

# Unsloth on the CPU, compared with the other backend: an environment of its own, likewise.
UNSLOTH := .venv-unsloth
UNSLOTH_INSTALLED := $(UNSLOTH)/.installed
UNSLOTH_LOCK := requirements/unsloth.lock

# What looks for known weaknesses and for keys: an environment of its own.
AUDIT := .venv-audit
AUDIT_INSTALLED := $(AUDIT)/.installed
AUDIT_LOCK := requirements/audit.lock

# S3's file system and a server of its API, for the check of the adapter store: an environment of its own, likewise.
STORE := .venv-store
STORE_INSTALLED := $(STORE)/.installed
STORE_LOCK := requirements/store.lock

# bitsandbytes, which quantises a base: an environment of its own, likewise.
QUANTISED := .venv-quantised
QUANTISED_INSTALLED := $(QUANTISED)/.installed
QUANTISED_LOCK := requirements/quantised.lock

# SkyRL's server of the Tinker API, for the check of training services: an environment of its own, likewise.
SERVICE := .venv-service
SERVICE_INSTALLED := $(SERVICE)/.installed
SERVICE_LOCK := requirements/service.lock

# A GPU host: vLLM, proxy, judge, trainer and tests on CUDA 13. Unsloth takes an older transformers than vLLM does.
GPU := .venv-gpu
GPU_INSTALLED := $(GPU)/.installed
GPU_LOCK := requirements/server-cuda.lock
GPU_UNSLOTH := .venv-gpu-unsloth
GPU_UNSLOTH_INSTALLED := $(GPU_UNSLOTH)/.installed
GPU_UNSLOTH_LOCK := requirements/trainer-unsloth.lock

# What drives a browser: an environment of its own that sees the packages of the first.
SYSTEM := .venv-system
SYSTEM_INSTALLED := $(SYSTEM)/.installed
SYSTEM_LOCK := requirements/system.lock

.PHONY: help demo test test-all short $(addprefix all-,$(PARTS)) test-gpu gpu gpu-driver gpu-rehearsal gpu-install gpu-unsloth-install test-system check audit secrets static unit fix serve bench watched instructions scale pages retention soak fuzz thumbs warm judged killed outage operating chaos adapter-store hosts swaps gate real example clients steps beside-trl docs site lock install clean
.DEFAULT_GOAL := help

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 10

demo: $(INSTALLED)  ## Watch an agent learn: some ten minutes; DEMO_ARGS="--seed 1 --steps 200", "--shuffle-rewards", ...
	$(BIN)/whetstone demo $(DEMO_ARGS)

test: $(INSTALLED)  ## Everything that a change can break, with a real vLLM, PostgreSQL and Redis: a quarter of an hour
	$(MAKE) --no-print-directory --jobs 2 static short

test-all: static $(addprefix all-,$(PART))  ## And the long ones, before a release: an hour; PART="clients trl": only these (short postgresql exact clients stacks harnesses store quantised service trl real examples unsloth)

short all-short: $(INSTALLED)
	$(BIN)/pytest $(AT_ONCE) -m "not long and not gpu and not system" $(TEST_ARGS)

all-postgresql: $(INSTALLED)
	$(BIN)/pytest $(AT_ONCE) -m "long(part='postgresql')" $(TEST_ARGS)

all-exact: $(INSTALLED)
	CONVERSATIONS=400 FEEDBACKS=20000 $(BIN)/pytest --examples 6 -m "not long(part='postgresql')" \
		tests/integration/test_differential.py tests/integration/test_trajectories.py tests/docs/test_feedback_model.py $(TEST_ARGS)
	$(BIN)/pytest -m "long(part='exact')" $(TEST_ARGS)

all-clients: $(INSTALLED)
	$(BIN)/pytest -m "long(part='clients')" $(TEST_ARGS)

all-stacks: $(INSTALLED)
	$(BIN)/pytest -m "long(part='stacks')" $(TEST_ARGS)

all-harnesses: $(INSTALLED)
	$(BIN)/pytest -m "long(part='harnesses')" $(TEST_ARGS)

all-store: $(STORE_INSTALLED)
	$(STORE)/bin/python -m pytest -m "long(part='store')" $(TEST_ARGS)

all-quantised: $(QUANTISED_INSTALLED)
	$(QUANTISED)/bin/python -m pytest -m "long(part='quantised')" tests/unit/trainer $(TEST_ARGS)

all-service: $(SERVICE_INSTALLED)
	$(BIN)/pytest -m "long(part='service')" tests/unit/trainer $(TEST_ARGS)

all-trl: $(TRL_INSTALLED)
	$(BIN)/pytest -m "long(part='trl')" $(TEST_ARGS)

all-real: $(INSTALLED)
	$(BIN)/pytest -m "long(part='real')" $(TEST_ARGS)

all-examples: $(EXAMPLES_INSTALLED)
	$(EXAMPLES)/bin/python -m pytest -m "long(part='examples')" $(TEST_ARGS)

all-unsloth: $(UNSLOTH_INSTALLED)
	$(BIN)/pytest -m "long(part='unsloth')" $(TEST_ARGS)

test-gpu: $(GPU_INSTALLED)  ## What needs CUDA: the trainer's own checks on it
	$(GPU)/bin/python -m pytest -m gpu --numprocesses 0 tests/unit/trainer $(TEST_ARGS)

gpu: gpu-driver $(GPU_INSTALLED)  ## The runbook, where there are GPUs: plan, parity, tokens/s, pause, memory, three tasks; MODEL=NAME, GPU_ARGS="--task json", ...
	$(GPU)/bin/python -m benchmarks.gpu $(if $(MODEL),--model $(MODEL)) $(GPU_ARGS)

gpu-driver:
	@python3 requirements/driver.py

gpu-rehearsal: $(INSTALLED)  ## The same on the CPU with the starter model, as far as that goes: five minutes; GPU_ARGS="--task routing" learns one
	$(BIN)/python -m benchmarks.gpu --rehearse $(GPU_ARGS)

gpu-install: $(GPU_INSTALLED)  ## The environment of a GPU host, .venv-gpu: CUDA 13, a driver from 580 (docs/gpu.md)

gpu-unsloth-install: $(GPU_UNSLOTH_INSTALLED)  ## Unsloth's, .venv-gpu-unsloth, for trainer.python (docs/gpu.md)

test-system: $(SYSTEM_INSTALLED)  ## What needs system packages (Chromium, promtool): the dashboard as people use it, the alerts; says what it did not run
	$(SYSTEM)/bin/python -m pytest -m system --numprocesses 0 $(TEST_ARGS)

check: $(INSTALLED)  ## Lint, types, contracts, unit tests: a minute
	$(MAKE) --no-print-directory --jobs 2 --output-sync static unit

static: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(INSTALLED)
	$(BIN)/pytest $(AT_ONCE) -m "not slow and not stack and not gpu and not system" $(TEST_ARGS)

# The database knows PyTorch's release, not its CPU build.
audit: secrets  ## Whether a locked package has a known weakness (asks a database on the net), or a file holds a key
	for lock in $(LOCK) $(GPU_LOCK) $(GPU_UNSLOTH_LOCK) $(TRL_LOCK) $(EXAMPLES_LOCK) $(UNSLOTH_LOCK) $(STORE_LOCK) $(QUANTISED_LOCK) $(SERVICE_LOCK) $(AUDIT_LOCK) $(SYSTEM_LOCK); do \
		sed 's/^\(torch==[^ +]*\)+cpu/\1/' $$lock > $(AUDIT)/asked.txt && \
		$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off -r $(AUDIT)/asked.txt || exit 1; done

secrets: $(AUDIT_INSTALLED)  ## Only whether a file holds a key
	$(AUDIT)/bin/python requirements/scan.py

.PHONY: sbom
sbom: $(INSTALLED)  ## A bill of materials of each lock that users install, in sbom/: CycloneDX; SBOM=FOLDER
	$(BIN)/python requirements/sbom.py $(SBOM)

fix: $(INSTALLED)  ## Mend what a machine can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve: $(INSTALLED)  ## The stack, until Ctrl-C; SERVE_ARGS="--data DIR --model MODEL --train"
	$(BIN)/whetstone up $(SERVE_ARGS)

bench: $(INSTALLED)  ## What the proxy costs, beside nginx and LiteLLM: BENCH_ARGS="--litellm PATH", "--check"; ten minutes
	$(BIN)/python -m benchmarks.bench $(BENCH_ARGS)

watched: $(INSTALLED)  ## What the dashboard's live page costs the proxy, and whether it shows 200 calls/s: five minutes alone on the machine
	$(BIN)/python -m benchmarks.bench.watched $(WATCHED_ARGS)

instructions: $(INSTALLED)  ## What a request takes in instructions, which no other work changes: two minutes; needs valgrind; INSTRUCTIONS_ARGS="--kind stream"
	$(BIN)/python -m benchmarks.bench.instructions $(INSTRUCTIONS_ARGS)

scale: $(INSTALLED)  ## Whether queries stay as fast on 2,000,000 completions; SCALE_ARGS="--database postgresql"
	$(BIN)/python -m benchmarks.scale $(SCALE_ARGS)

pages: $(INSTALLED)  ## Whether each page of the dashboard takes less than 300 ms on 1,000,000 completions; five minutes
	$(BIN)/python -m benchmarks.scale.pages $(PAGES_ARGS)

retention: $(INSTALLED)  ## Whether anybody waits while 1,000,000 of 2,000,000 completions are deleted; RETENTION_ARGS="--database postgresql"
	$(BIN)/python -m benchmarks.scale.retention $(RETENTION_ARGS)

soak: $(INSTALLED)  ## Whether the proxy holds: 10,000 requests, apps that hang up; SOAK_ARGS="--minutes 15": memory
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

fuzz: $(INSTALLED)  ## Whether the proxy bears anything: 40,000 requests gone wrong, two databases; ten minutes
	$(BIN)/python -m benchmarks.fuzz $(FUZZ_ARGS)

thumbs: $(INSTALLED)  ## Whether thumbs on single answers teach: a few minutes; THUMBS_ARGS="--shuffle-rewards", ...
	$(BIN)/python -m benchmarks.learning.thumbs $(THUMBS_ARGS)

warm: $(INSTALLED)  ## Whether another server's answers warm a policy up: five minutes; WARM_ARGS="--warm 4", ...
	$(BIN)/python -m benchmarks.learning.warm $(WARM_ARGS)

judged: $(INSTALLED)  ## Whether judges rank 1,000 groups once each, their worker killed meanwhile: eight minutes
	$(BIN)/python -m benchmarks.faults.judged $(JUDGED_ARGS)

gate: $(INSTALLED)  ## How often the gate's tests err, simulated: three minutes; GATE_ARGS="--only canary"
	$(BIN)/python -m benchmarks.learning.gate $(GATE_ARGS)

real: $(INSTALLED)  ## Whether SmolLM2-135M, fetched once, gets better at a task: up to an hour; REAL_ARGS="--task routing|json|agent --seed 1 --shuffle-rewards"
	$(BIN)/python -m benchmarks.real $(REAL_ARGS)

# An example whose agent needs more than the stock client runs in the environment of the examples.
WITH_MORE := langgraph reasoning_gym
example: $(INSTALLED) $(if $(filter $(NAME),$(WITH_MORE)),$(EXAMPLES_INSTALLED))  ## Watch an example learn, half an hour: NAME=2048, mail, mail-ruler, temporal_clue, codenames, mcp, ...; EXAMPLE_ARGS="--seed 1 --shuffle-rewards"
	$(BIN)/python -m benchmarks.real --task $(or $(NAME),$(error give NAME=, such as NAME=2048; all are in examples/README.md)) $(EXAMPLE_ARGS)

killed: $(INSTALLED)  ## Whether kill -9 changes what is learned: the training worker, 20 times; six minutes
	$(BIN)/python -m benchmarks.faults.killed $(KILLED_ARGS)

outage: $(INSTALLED)  ## Whether an app feels that the database is away: PostgreSQL stopped for a minute under load
	$(BIN)/python -m benchmarks.faults.outage $(OUTAGE_ARGS)

operating: $(INSTALLED)  ## What an operator sees of a fault, and whether anything is lost: FAULT=frozen|broker|clock|disk|versions|lost_folder
	$(BIN)/python -m benchmarks.faults.operating $(FAULT) $(OPERATING_ARGS)

chaos: $(INSTALLED)  ## Whether kill -9 of any process loses or doubles anything: 20,000 completions, 40 kills
	$(BIN)/python -m benchmarks.faults.chaos $(CHAOS_ARGS)

# moto and s3fs: an environment of its own that sees the packages of the first.
adapter-store: $(STORE_INSTALLED)  ## Whether a faulty object store leaves a version half published or half live: 20 versions; ten minutes; STORE_ARGS="--alone": without a learner, two
	$(STORE)/bin/python -W ignore -m benchmarks.faults.store $(STORE_ARGS)

hosts: $(STORE_INSTALLED)  ## Whether two hosts without a shared folder serve and train, and each can be lost: ten minutes; HOSTS_ARGS="--steps 32"
	$(STORE)/bin/python -W ignore -m benchmarks.faults.hosts $(HOSTS_ARGS)

swaps: $(INSTALLED)  ## Whether swaps of adapters are felt: 50 under load, vLLM killed, one of two refuses; ten minutes
	$(BIN)/python -m benchmarks.swaps $(SWAPS_ARGS)

clients: $(INSTALLED)  ## Run the clients that people use, and write docs/clients.md: installs them from the public indexes; CLIENTS_ARGS="--only codex"
	$(BIN)/python -m benchmarks.clients --page docs/clients.md $(CLIENTS_ARGS)

steps: $(TRL_INSTALLED)  ## How fast a step computes, beside TRL: STEPS_ARGS="--turns 8", "--device cuda", ...
	$(TRL)/bin/python -W ignore -m benchmarks.learning.step $(STEPS_ARGS)

beside-trl: $(TRL_INSTALLED)  ## How fast SmolLM2-135M learns a task, beside TRL's GRPOTrainer: most of an hour; BESIDE_TRL_ARGS="--seed 1 --learning-rate 1e-4"
	$(BIN)/python -m benchmarks.beside_trl $(BESIDE_TRL_ARGS)

docs: $(INSTALLED)  ## Write the pages that are made from the code
	$(BIN)/python -m docs.build

site: $(INSTALLED)  ## The documentation as a site, in site/; SITE=FOLDER
	$(BIN)/python docs/make_site.py $(SITE)

install: $(INSTALLED)  ## Only the environment; PYTHON=..., TORCH_INDEX=URL or FOLDER with PyTorch's CPU build

# OR-Tools takes no protobuf as new as vLLM's, Unsloth no transformers; Unsloth 2026.10.9 is the first for CPUs.
lock: $(INSTALLED)  ## All locks, CPU, images and GPU hosts: lock what pyproject.toml asks for; LOCK_ARGS=--upgrade: newest versions; FIND_LINKS: a folder with PyTorch's CPU wheel
	sh requirements/lock.sh $(BIN) $(LOCK) "$(FIND_LINKS)" $(LOCK_ARGS)
	PACKAGES=trl WITHOUT=torch sh requirements/beside.sh $(BIN) $(LOCK) $(TRL_LOCK) "TRL needs" $(LOCK_ARGS)
	PACKAGES="langgraph,langchain-openai,ortools,reasoning-gym" OWN=protobuf \
		sh requirements/beside.sh $(BIN) $(LOCK) $(EXAMPLES_LOCK) "some examples need" $(LOCK_ARGS)
	PACKAGES="unsloth>=2026.10.9 ; sys_platform == 'linux'" OWN="transformers huggingface-hub fsspec certifi" \
		WITHOUT="torch torchvision xformers" \
		sh requirements/beside.sh $(BIN) $(LOCK) $(UNSLOTH_LOCK) "Unsloth needs on a CPU" $(LOCK_ARGS)
	PACKAGES="moto[server],s3fs" OWN="boto3 botocore s3transfer" \
		sh requirements/beside.sh $(BIN) $(LOCK) $(STORE_LOCK) "the check of the adapter store needs" $(LOCK_ARGS)
	PACKAGES="bitsandbytes==0.50.2 ; sys_platform == 'linux'" WITHOUT=torch \
		sh requirements/beside.sh $(BIN) $(LOCK) $(QUANTISED_LOCK) "a quantised base needs" $(LOCK_ARGS)
	PACKAGES="skyrl[tinker]==0.3.0,skyrl[jax]==0.3.0" OWN="transformers peft tokenizers" WITHOUT=torch \
		sh requirements/beside.sh $(BIN) $(LOCK) $(SERVICE_LOCK) "the check of training services needs" $(LOCK_ARGS)
	sh requirements/audit.sh $(BIN) $(AUDIT_LOCK) $(LOCK_ARGS)
	sh requirements/system.sh $(BIN) $(LOCK) $(SYSTEM_LOCK) $(LOCK_ARGS)
	$(BIN)/python requirements/parts.py
	$(BIN)/python requirements/cuda.py $(BIN)/uv $(LOCK_ARGS)

clean:  ## Remove the environments and what demos left
	rm -rf $(VENV) $(GPU) $(GPU_UNSLOTH) $(TRL) $(EXAMPLES) $(UNSLOTH) $(STORE) $(QUANTISED) $(SERVICE) $(AUDIT) $(SYSTEM) data/demo

$(INSTALLED): $(LOCK) pyproject.toml
	@$(INSTALL) $(VENV) $(LOCK) --ours
	@touch $@

$(GPU_INSTALLED): $(GPU_LOCK) pyproject.toml
	@$(INSTALL) $(GPU) $(GPU_LOCK) --ours
	@touch $@

$(GPU_UNSLOTH_INSTALLED): $(GPU_UNSLOTH_LOCK) pyproject.toml
	@$(INSTALL) $(GPU_UNSLOTH) $(GPU_UNSLOTH_LOCK) --ours
	@touch $@

$(TRL_INSTALLED): $(INSTALLED) $(TRL_LOCK) requirements/dppo.lock
	@$(INSTALL) $(TRL) $(TRL_LOCK) --sees $(VENV)
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
		--target $(TRL)/dppo -r requirements/dppo.lock
	@touch $@

$(EXAMPLES_INSTALLED): $(INSTALLED) $(EXAMPLES_LOCK)
	@$(INSTALL) $(EXAMPLES) $(EXAMPLES_LOCK) --sees $(VENV)
	@touch $@

$(STORE_INSTALLED): $(INSTALLED) $(STORE_LOCK)
	@$(INSTALL) $(STORE) $(STORE_LOCK) --sees $(VENV)
	@touch $@

$(QUANTISED_INSTALLED): $(INSTALLED) $(QUANTISED_LOCK)
	@$(INSTALL) $(QUANTISED) $(QUANTISED_LOCK) --sees $(VENV)
	@touch $@

$(UNSLOTH_INSTALLED): $(INSTALLED) $(UNSLOTH_LOCK)
	@$(INSTALL) $(UNSLOTH) $(UNSLOTH_LOCK) --sees $(VENV)
	@touch $@

$(SERVICE_INSTALLED): $(INSTALLED) $(SERVICE_LOCK)
	@$(INSTALL) $(SERVICE) $(SERVICE_LOCK) --sees $(VENV)
	@touch $@

$(AUDIT_INSTALLED): $(AUDIT_LOCK)
	@$(INSTALL) $(AUDIT) $(AUDIT_LOCK)
	@touch $@

$(SYSTEM_INSTALLED): $(INSTALLED) $(SYSTEM_LOCK)
	@$(INSTALL) $(SYSTEM) $(SYSTEM_LOCK) --sees $(VENV)
	@touch $@
