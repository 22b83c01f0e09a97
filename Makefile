# What a person types; `make` alone lists it. Needs GNU make 3.81 or newer and Python 3.11 or newer, and nothing else
# where the help does not say so: everything is installed into $(VENV) here, again whenever what it is made from changes.
#
#   make test PYTHON=python3.13 VENV=.venv313      another Python, beside the usual environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Byte code is kept, whatever the environment says: a demo starts a dozen processes of ours, a test run hundreds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo up test check bench soak models images manifests lock compose-up compose-smoke compose-down kind-up kind-smoke kind-down

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Watch a job, a run and a turn, each while its process is killed; then stays up until Ctrl-C
	@$(BIN)/towline demo

up: $(INSTALLED) ## Run the whole product on this machine until Ctrl-C
	@$(BIN)/towline up

test: check ## Everything that a change must pass: the checks, then every test
	@echo '== pytest'
	@$(BIN)/python -m pytest -n 6 --dist loadfile

check: $(INSTALLED) ## Only what needs no process: lint, format, types, who imports whom
	@echo '== ruff check'
	@$(BIN)/ruff check
	@echo '== ruff format --check'
	@$(BIN)/ruff format --check
	@echo '== mypy'
	@$(BIN)/mypy
	@echo '== lint-imports'
	@$(BIN)/lint-imports

bench: $(INSTALLED) ## Measure jobs, events and turns beside simpler systems in the same run
	@$(BIN)/towline bench

soak: $(INSTALLED) ## Random load and faults, checked against the promises: make soak MINUTES=10 SEED=7
	@$(BIN)/towline soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

models: ## Explore the protocol models to their end: about half an hour, up to 12 GB, needs g++
	@docs/protocol/models/run.sh

images: ## Build the images, with docker, podman or buildah (scripts/images: only some, another tag, another base)
	@scripts/images

compose-up: ## Run it in Docker on this machine: two of each service, stores, a proxy, Prometheus; prints what to export
	@scripts/compose-up

compose-smoke: ## Try that out: a job, a run and a turn through the proxy
	@scripts/compose-smoke

compose-down: ## Stop it; what it keeps stays
	@scripts/compose-down

kind-up: ## Run it on a Kubernetes of three nodes on this machine: images, cluster, deployment, smoke
	@scripts/kind-up

kind-smoke: ## Try that deployment out: a replay, a change of scale, a worker deleted in mid-job, gateways replaced
	@scripts/kind-smoke

kind-down: ## Remove that cluster
	@scripts/kind-down

manifests: $(INSTALLED) ## Render deploy/kustomize into deploy/kind.yaml, and check what was rendered (needs kubectl)
	@scripts/manifests
	@$(BIN)/python -m pytest -q tests/contract/test_manifests*.py

lock: ## Pin the dependencies anew after a change of pyproject.toml (scripts/lock --upgrade: newest releases)
	@PYTHON='$(PYTHON)' scripts/lock

# The stamp comes last, so an interrupted installation is taken up again.
$(INSTALLED): requirements/dev.txt pyproject.toml libs/towline/pyproject.toml
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Towline needs Python 3.11 or newer, and "$(PYTHON)" is not that. Name one: make PYTHON=python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '"$(PYTHON)" comes without venv. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo '== making $(VENV)'; '$(PYTHON)' -m venv --clear $(VENV); }
	@echo '== installing the pinned dependencies (the first time: about 110 MB, a minute or so)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@echo '== installing this checkout'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  -e libs/towline -e .
	@touch $@
