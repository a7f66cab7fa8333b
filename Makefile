# `make` without a target lists the targets. Everything runs from .venv. `make install`, `make demo` and `make serve`
# install what runs. All other targets depend on `make setup`, which also installs what developers need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Container images set it. Then each process would compile torch again, and each test worker all tests.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Stamps of the two levels of .venv: the packages to run EdgeShard, and the ones that only developers need.
RUNS := .venv/.runtime-stamp
STAMP := .venv/.setup-stamp
CLIENTS := .venv-clients/.stamp
DOCS := .venv-docs/.stamp
BASELINE := proto/baseline.binpb
# Number of test processes, two for each core, because many tests wait. The tests of one file run in one process.
JOBS ?= 4
# The first Python of 3.11 or newer on PATH; `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && exit; done; echo python3)

# A command that Ctrl-C ends has printed its own line. make would print another one about status 130, but prints none
# if a signal ends make itself.
interruptible = trap : INT; $(1) || { status=$$?; [ $$status -eq 130 ] || exit $$status; kill -INT $$PPID; }

.PHONY: help install setup clients docs demo serve wheels test test-all retest check types rules collect format drawings proto proto-baseline bench bench-plan figures soak chaos chaos-quick chaos-long sim fuzz fuzz-agents fuzz-bodies attack lock sbom licences pictures folders bundle deb image release aarch64

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUNS) ## Install what runs EdgeShard into .venv.

# Always runs the script, because a compiler may have been installed since. It does nothing if nothing is to be done.
setup: ## Install all of .venv, for developers; repeated only if pyproject.toml, the lock or the kernels change.
	@$(call interruptible,$(PYTHON) tools/setup_environment.py)

$(RUNS) $(STAMP): pyproject.toml constraints.lock tools/setup_environment.py hatch_build.py $(wildcard agent/edgeshard_agent/ops/kernels/*)
	@$(call interruptible,$(PYTHON) tools/setup_environment.py $(if $(filter $(RUNS),$@),runtime))

clients: $(CLIENTS) ## Install clients that tests try the HTTP gateway with, axe-core and chat templates (.venv-clients).

$(CLIENTS): $(addprefix tests/clients/,requirements.txt templates.txt package-lock.json) tools/setup_clients.py $(STAMP)
	@$(BIN)/python -m tools.setup_clients
	@touch $@

docs: $(DOCS) ## Build the documents as a site with search in dist/docs; needs no network.
	@$(BIN)/python -m tools.build_docs

$(DOCS): tools/docs.txt $(STAMP)
	@$(BIN)/python -m tools.build_docs --set-up
	@touch $@

demo: $(RUNS) ## Run a coordinator and three agents, and generate text; ARGS="--seed 3" passes options.
	@$(call interruptible,$(BIN)/edgectl demo $(ARGS))

serve: $(RUNS) ## Serve the demo model over HTTP until Ctrl-C; ARGS="./my-model" serves another.
	@$(call interruptible,$(BIN)/edgectl serve $(or $(ARGS),demo))

wheels: $(STAMP) ## Build wheels with compiled kernels for x86-64 and aarch64 in dist/wheels (some minutes).
	@$(BIN)/python -m tools.build_wheels

test: $(STAMP) ## Run the tests without long forms (13 minutes on two cores); ARGS="tests/storage -x" selects.
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

test-all: $(STAMP) ## Run all tests, with long forms (about an hour).
	@$(MAKE) test ARGS="--long $(ARGS)"

retest: $(STAMP) ## Run up to 6 failed tests of processes or clocks once more, by themselves.
	@$(BIN)/python tools/retest.py

aarch64: $(STAMP) ## Run the tests of the kernels on an emulated aarch64; ARGS="tests/agent/ops/test_linear.py -k int4" selects.
	@$(BIN)/python -m tools.emulate_aarch64 $(or $(ARGS),$(wildcard tests/agent/ops/test_[afklrs]*.py) tests/agent/model/test_bits.py tests/agent/model/test_common_tokens.py)

check: $(STAMP) ## Check lint, format, types, import rules, unused code, protocol, generated code, drawings, lock and licences.
	@$(MAKE) -j 2 --output-sync=target types rules

types: $(STAMP)
	$(BIN)/mypy

rules: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_forbidden.py
	$(BIN)/python tools/lint_families.py
	$(BIN)/python tools/lint_names.py
	$(BIN)/python tools/lint_shape.py
	$(BIN)/python tools/lint_words.py
	$(BIN)/python tools/lint_commits.py
	$(BIN)/python tools/find_unused.py
	$(BIN)/python tools/lint_wire.py
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(BASELINE)
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python tools/generate_native.py --check
	$(BIN)/python tools/draw_architecture.py --check
	$(BIN)/python -m tools.lock --check
	$(BIN)/python -m tools.inventory check
	$(BIN)/lint-imports

# Each of the JOBS processes compiles the tests at their first import, which takes a minute of processor time.
collect: $(STAMP) ## Import all tests, as their first run would.
	@$(BIN)/python -m pytest --long --collect-only -q -q -p no:xdist >/dev/null

format: $(STAMP) ## Format, and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

drawings: $(STAMP) ## Write the parts of documents that are drawn from code: phases, imports, keys, fields, published models.
	$(BIN)/python tools/draw_architecture.py

proto: $(STAMP) ## Generate edgeshard/proto from proto/.
	$(BIN)/python tools/generate_proto.py

proto-baseline: $(STAMP) ## Accept the protocol as it is for `buf breaking`; needed only after a deliberate incompatible change.
	$(BIN)/buf build -o $(BASELINE)

lock: ## Write constraints.lock for a changed pyproject.toml; ARGS=--upgrade takes newer versions.
	@$(BIN)/python -m tools.lock $(ARGS)

sbom: $(STAMP) ## Write the bill of materials of .venv (CycloneDX): dist/sbom.cdx.json.
	@$(BIN)/python -m tools.inventory sbom

licences: $(STAMP) ## Write docs/licences.md for the lock.
	@$(BIN)/python -m tools.inventory licences

folders: wheels ## Build folders of wheels for one kind of machine in dist/folders; ARGS="--target aarch64-py313-cuda" selects it.
	@$(BIN)/python -m tools.release.wheel_folder $(ARGS)

bundle: wheels ## Build an archive of such a folder, which installs without a network.
	@$(BIN)/python -m tools.release.bundle $(ARGS)

deb: wheels ## Build a Debian or Ubuntu package of such a folder; py311 is Debian 12, py312 Ubuntu 24.04, py313 Debian 13.
	@$(BIN)/python -m tools.release.deb $(ARGS)

image: wheels ## Build a container image of such a folder on a Debian root; ARGS="--base root.tar".
	@$(BIN)/python -m tools.release.image $(ARGS)

release: wheels ## Build all files of a version: wheels, bundles, packages, bills of materials, checksums, notes.
	@$(BIN)/python -m tools.release.release $(ARGS)

bench: $(STAMP) ## Measure engine, hop and planner; JSON in .benchmarks (more than 20 minutes); LLAMA_CPP=DIR adds llama.cpp.
	@mkdir -p .benchmarks
	$(BIN)/python -m bench.engine --quick $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) -o .benchmarks/engine.json
	$(BIN)/python -m bench.hop | tee .benchmarks/hop.json
	$(BIN)/python -m pytest -n $(JOBS) bench/test_planner_exact.py bench/test_planner_plans.py
	$(BIN)/python -m pytest bench/test_planner_speed.py --benchmark-json=.benchmarks/planner.json

bench-plan: $(STAMP) ## Measure the accuracy of plans: the lab, the row of the paper, two real nodes (half an hour).
	$(BIN)/python -m bench.lab
	$(BIN)/python -m bench.edgeshard_paper --lab
	$(BIN)/python -m bench.promises

pictures: $(STAMP) ## Record the pictures of README.md and docs/dashboard.md in Chromium (3 minutes).
	@$(BIN)/python -m tools.pictures

figures: $(STAMP) ## List measured figures whose code has changed; ARGS="--stamp FILE:LINE" stamps one after a new measurement.
	@$(BIN)/python -m tools.figures $(ARGS)

soak: $(STAMP) ## Load a site for half an hour, and fail if its memory grows; ARGS="--minutes 60".
	@mkdir -p .benchmarks
	$(BIN)/python -m bench.soak -o .benchmarks/soak.json $(ARGS)

chaos: $(STAMP) ## Kill a node in every step of an answer, and fail if a token changes (30 minutes).
	@$(BIN)/python -m tests.chaos.run --cases full $(ARGS)

chaos-long: $(STAMP) ## Kill the coordinator at each write, restart and stall nodes, disconnect clients (15 minutes).
	@$(BIN)/python -m tests.chaos.writes
	@$(BIN)/python -m tests.chaos.standstill
	@$(BIN)/python -m tests.chaos.replica_kills
	@EDGESHARD_CHAOS_RESTARTS=100 EDGESHARD_CHAOS_DISCONNECTS=1000 \
		$(BIN)/python -m pytest -q tests/chaos/test_restarts.py tests/chaos/test_disconnects.py $(ARGS)

sim: $(STAMP) ## Run 10,000 seeds of the system with faults in simulated time (20 minutes); ARGS="--first 7".
	@$(BIN)/python -m tests.simulator.run --seeds 10000 --jobs $(JOBS) --coverage $(ARGS)

fuzz: $(STAMP) ## Mutate the input of each reader of untrusted bytes, 6 minutes each (1 hour); ARGS="--target config".
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.fuzz.run --seconds 360 $(ARGS)

fuzz-agents: $(STAMP) ## Send a coordinator random messages of agents (10 minutes); ARGS="--seconds 60 --seed 7".
	@$(BIN)/python -m tests.fuzz.agents $(ARGS)

fuzz-bodies: $(STAMP) ## Send random bodies to all HTTP routes (10 minutes); ARGS="--seconds 60 --seed 7".
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.fuzz.bodies --seconds 600 $(ARGS)

attack: $(STAMP) ## Run each attack on a live site for 30 s, and measure other clients (40 minutes); ARGS="--attack joining".
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.attack.run -o .benchmarks/attack.json $(ARGS)

chaos-quick: $(STAMP) ## Run some cases of `make chaos`, selected by a seed; ARGS="--seed 7".
	@$(BIN)/python -m tests.chaos.run --cases quick $(ARGS)
