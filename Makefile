# `make` alone lists the targets. Everything runs from .venv: `make install`, `make demo` and `make serve` put there what
# runs, and `make setup`, on which all other targets depend, what developers need besides.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Images of containers set it. Each process would then compile torch, and each worker of the tests all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# What .venv holds: what runs, and what developers need besides.
RUNS := .venv/.runtime-stamp
STAMP := .venv/.setup-stamp
CLIENTS := .venv-clients/.stamp
DOCS := .venv-docs/.stamp
BASELINE := proto/baseline.binpb
# Processes the tests run in, two for each core: many of them wait. One file's tests stay in one of them.
JOBS ?= 4
# The first Python of 3.11 or newer on PATH; `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && exit; done; echo python3)

# A command that Ctrl-C ends has printed its line. make prints one more about status 130, but none if a signal ends make.
interruptible = trap : INT; $(1) || { status=$$?; [ $$status -eq 130 ] || exit $$status; kill -INT $$PPID; }

.PHONY: help install setup clients docs demo serve wheels test test-all retest check types rules collect format drawings proto proto-baseline bench bench-plan figures soak chaos chaos-quick chaos-long sim fuzz fuzz-agents fuzz-bodies attack lock sbom licences pictures folders bundle deb image release aarch64

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUNS) ## what runs EdgeShard, in .venv

# Always asks the script, which does nothing where nothing is to be done: a compiler may have come since.
setup: ## all of .venv, for developers (again only when pyproject.toml, the lock or the kernels change)
	@$(call interruptible,$(PYTHON) tools/setup_environment.py)

$(RUNS) $(STAMP): pyproject.toml constraints.lock tools/setup_environment.py hatch_build.py $(wildcard agent/edgeshard_agent/ops/kernels/*)
	@$(call interruptible,$(PYTHON) tools/setup_environment.py $(if $(filter $(RUNS),$@),runtime))

clients: $(CLIENTS) ## build .venv-clients: the openai client and others that tests try the HTTP gateway with, and chat templates

$(CLIENTS): $(addprefix tests/clients/,requirements.txt templates.txt package-lock.json) tools/setup_clients.py $(STAMP)
	@$(BIN)/python -m tools.setup_clients
	@touch $@

docs: $(DOCS) ## build the documents as a site with search, in dist/docs; needs no network
	@$(BIN)/python -m tools.build_docs

$(DOCS): tools/docs.txt $(STAMP)
	@$(BIN)/python -m tools.build_docs --set-up
	@touch $@

demo: $(RUNS) ## a coordinator and three agents tell a story
	@$(call interruptible,$(BIN)/edgectl demo $(ARGS))

serve: $(RUNS) ## the demo's model over HTTP; ARGS="./my-model" serves another
	@$(call interruptible,$(BIN)/edgectl serve $(or $(ARGS),demo))

wheels: $(STAMP) ## what operators install, kernels compiled, for x86-64 and aarch64: dist/wheels (some minutes, once)
	@$(BIN)/python -m tools.build_wheels

test: $(STAMP) ## the tests but for long forms (9 minutes on two cores); ARGS="tests/storage -x" narrows it
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

test-all: $(STAMP) ## all tests, long forms too (27 minutes)
	@$(MAKE) test ARGS="--long $(ARGS)"

retest: $(STAMP) ## what failed in the last run once more, alone: up to 3 tests of processes or clocks
	@$(BIN)/python tools/retest.py

aarch64: $(STAMP) ## tests of the kernels on an emulated aarch64; ARGS="tests/agent/ops/test_linear.py -k int4" chooses
	@$(BIN)/python -m tools.emulate_aarch64 $(or $(ARGS),$(wildcard tests/agent/ops/test_[afklrs]*.py) tests/agent/model/test_bits.py tests/agent/model/test_common_tokens.py)

check: $(STAMP) ## lint, format, types, import rules, unused code, protocol, generated code and pictures
	@$(MAKE) -j 2 --output-sync=target types rules

types: $(STAMP)
	$(BIN)/mypy

rules: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_forbidden.py
	$(BIN)/python tools/lint_families.py
	$(BIN)/python tools/lint_names.py
	$(BIN)/python tools/find_unused.py
	$(BIN)/python tools/lint_wire.py
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(BASELINE)
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python tools/draw_architecture.py --check
	$(BIN)/python -m tools.lock --check
	$(BIN)/python -m tools.inventory check
	$(BIN)/lint-imports

# Tests are compiled when they are first imported, by each of the JOBS processes, which takes a minute of the processor.
collect: $(STAMP) ## import all tests, as the first run of them would
	@$(BIN)/python -m pytest --long --collect-only -q -q -p no:xdist >/dev/null

format: $(STAMP) ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

drawings: $(STAMP) ## draw into documents what they take from code: phases, imports, keys, published models that run
	$(BIN)/python tools/draw_architecture.py

proto: $(STAMP) ## generate edgeshard/proto from proto/
	$(BIN)/python tools/generate_proto.py

proto-baseline: $(STAMP) ## accept the protocol as it is: what `buf breaking` compares with
	$(BIN)/buf build -o $(BASELINE)

lock: ## write constraints.lock, what `make setup` installs, for a changed pyproject.toml; ARGS=--upgrade for newer versions
	@$(BIN)/python -m tools.lock $(ARGS)

sbom: $(STAMP) ## what .venv holds, as a CycloneDX document: dist/sbom.cdx.json
	@$(BIN)/python -m tools.inventory sbom

licences: $(STAMP) ## write docs/licences.md for the lock
	@$(BIN)/python -m tools.inventory licences

folders: wheels ## wheels of one kind of machine, in dist/folders; ARGS="--target aarch64-py313-cuda" names another kind
	@$(BIN)/python -m tools.release.wheel_folder $(ARGS)

bundle: wheels ## such a folder as an archive in dist, which installs without a network
	@$(BIN)/python -m tools.release.bundle $(ARGS)

deb: wheels ## such a folder as a package of Debian or Ubuntu in dist; py311 is Debian 12, py312 Ubuntu 24.04, py313 Debian 13
	@$(BIN)/python -m tools.release.deb $(ARGS)

image: wheels ## such a folder on a root of Debian as an image of containers; ARGS="--base root.tar"
	@$(BIN)/python -m tools.release.image $(ARGS)

release: wheels ## all that is handed out of a version: wheels, bundles, packages, bills of materials, checksums, notes
	@$(BIN)/python -m tools.release.release $(ARGS)

bench: $(STAMP) ## the engine, what a hop costs, how right and quick the planner is: JSON in .benchmarks (more than 20 minutes)
	@mkdir -p .benchmarks
	$(BIN)/python -m bench.engine --quick $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) -o .benchmarks/engine.json
	$(BIN)/python -m bench.hop | tee .benchmarks/hop.json
	$(BIN)/python -m pytest -n $(JOBS) bench/test_planner_exact.py bench/test_planner_plans.py
	$(BIN)/python -m pytest bench/test_planner_speed.py --benchmark-json=.benchmarks/planner.json

bench-plan: $(STAMP) ## how true plans are: the lab, the paper's row by the lab, two real nodes (half an hour)
	$(BIN)/python -m bench.lab
	$(BIN)/python -m bench.edgeshard_paper --lab
	$(BIN)/python -m bench.promises

pictures: $(STAMP) ## the pictures of README.md and docs/dashboard.md, of a real run in Chromium: docs/pictures (3 minutes)
	@$(BIN)/python -m tools.pictures

figures: $(STAMP) ## figures of the documents, and which were measured on code that has changed since; ARGS="--stamp FILE:LINE" after measuring again
	@$(BIN)/python -m tools.figures $(ARGS)

soak: $(STAMP) ## a site under load for half an hour: whether its memory stays flat; ARGS="--minutes 60"
	@mkdir -p .benchmarks
	$(BIN)/python -m bench.soak -o .benchmarks/soak.json $(ARGS)

chaos: $(STAMP) ## a node is killed in every step of an answer, and more: no token may change (30 minutes)
	@$(BIN)/python -m tests.chaos.run --cases full $(ARGS)

chaos-long: $(STAMP) ## the coordinator is killed around each write, nodes restart and stand still, clients leave (15 minutes)
	@$(BIN)/python -m tests.chaos.writes
	@$(BIN)/python -m tests.chaos.standstill
	@$(BIN)/python -m tests.chaos.replica_kills
	@EDGESHARD_CHAOS_RESTARTS=100 EDGESHARD_CHAOS_DISCONNECTS=1000 \
		$(BIN)/python -m pytest -q tests/chaos/test_restarts.py tests/chaos/test_disconnects.py $(ARGS)

sim: $(STAMP) ## 10,000 seeds of the whole system in simulated time, with all that can go wrong (20 minutes); ARGS="--first 7"
	@$(BIN)/python -m tests.simulator.run --seeds 10000 --jobs $(JOBS) --coverage $(ARGS)

fuzz: $(STAMP) ## what reads strangers' bytes, with mutated inputs, 6 minutes for each reader (1 hour); ARGS="--target config"
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.fuzz.run --seconds 360 $(ARGS)

fuzz-agents: $(STAMP) ## all messages of agents with any values, for a coordinator (10 minutes); ARGS="--seconds 60 --seed 7"
	@$(BIN)/python -m tests.fuzz.agents $(ARGS)

fuzz-bodies: $(STAMP) ## bodies for all HTTP routes, made of their forms (10 minutes); ARGS="--seconds 60 --seed 7"
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.fuzz.bodies --seconds 600 $(ARGS)

attack: $(STAMP) ## each attack on a live site for 30 s, and what others meet meanwhile (40 minutes); ARGS="--attack joining"
	@mkdir -p .benchmarks
	@$(BIN)/python -m tests.attack.run -o .benchmarks/attack.json $(ARGS)

chaos-quick: $(STAMP) ## some of those kills, chosen by a seed; ARGS="--seed 7"
	@$(BIN)/python -m tests.chaos.run --cases quick $(ARGS)
