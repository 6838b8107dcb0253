# Each target sets up what it needs. Only python3 (3.11 or newer) with pip, and make, must be there; another
# interpreter: make PYTHON=python3.12 …

PYTHON ?= python3
ARGS ?=
SEEDS ?=
SECONDS ?=
FAMILIES ?=
LANES ?=
TENTH ?=
CLIENTS ?=
BENCH ?= gateway

# uv from PATH, or else our own, in a folder of .venv that `uv pip sync` does not look into.
OWN_UV := .venv/tools/bin/uv
UV := $(or $(shell command -v uv 2>/dev/null; true),$(OWN_UV))

INSTALLED := .venv/.installed
BIN := .venv/bin
SMOLLM2 := .venv/models/smollm2

# Tests start hundreds of processes: what they import is compiled once, even where the environment says never.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test busy lint fmt bench fuzz soak zoo exactness conformance browser smollm2 lock formula release
.DELETE_ON_ERROR:

serve: $(INSTALLED)
	@$(BIN)/roundhouse serve $(ARGS)

# All of it on every core; what ARGS names in one process, which starts sooner (ARGS="-n auto …": on every core).
test: $(INSTALLED)
	@$(BIN)/python -m pytest $(or $(ARGS),-n auto)

# No test may depend on the machine's speed: a tenth of them with two busy processes beside them.
busy: $(INSTALLED)
	@$(BIN)/python -m tests.busy $(if $(TENTH),--tenth $(TENTH)) $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >.venv/imports.txt || { cat .venv/imports.txt; exit 1; }

fmt: $(INSTALLED)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

bench: $(INSTALLED) | $(UV)
	@UV=$(UV) $(BIN)/python -m bench.$(BENCH) $(ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python -m tests.protocol.fuzz $(ARGS)

soak: $(INSTALLED)
	@$(BIN)/python -m tests.soak $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(LANES) $(ARGS)

zoo: $(INSTALLED)
	@$(BIN)/python -m tests.zoo $(if $(SEEDS),--seeds $(SEEDS)) $(FAMILIES) $(ARGS)

exactness: $(INSTALLED)
	@$(BIN)/python -m tests.exactness $(ARGS)

conformance: $(INSTALLED) | $(UV)
	@UV=$(UV) $(BIN)/python -m tests.conformance $(if $(CLIENTS),--clients "$(CLIENTS)") $(LANES) $(ARGS)

# For the tests of the page at `/`, which are left out where there is none.
browser: $(INSTALLED)
	@$(BIN)/python -m tests.browser.install

# A small model that talks. A folder of that name is always complete, so it is made once.
smollm2: $(SMOLLM2) $(SMOLLM2)-4bit
	@echo "SmolLM2-135M-Instruct: $(SMOLLM2) (float32), $(SMOLLM2)-4bit"

$(SMOLLM2) $(SMOLLM2)-4bit: | $(INSTALLED) $(UV)
	@UV=$(UV) $(BIN)/python -m recipes.smollm2 $(if $(filter %-4bit,$@),--bits 4) $@

lock: | $(UV)
	@$(UV) pip compile --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-annotate \
		--excludes excludes.txt pyproject.toml --group dev -o requirements.lock -q --custom-compile-command "make lock"
	@$(MAKE) --no-print-directory formula

# The Homebrew formula in deploy/homebrew, with the packages of the lock.
formula: $(INSTALLED) | $(UV)
	@UV=$(UV) $(BIN)/python -m recipes.homebrew

# Wheel, source, notes, constraints, formula and checksums, installed and served with each Python, and signed with
# ARGS="--key ~/.ssh/id_ed25519". Nothing is published.
release: $(INSTALLED) | $(UV)
	@UV=$(UV) $(BIN)/python -m recipes.release $(ARGS)

# --python throughout: an environment that happens to be active must stay as it is. The last step may build
# nothing but this package, with the hatchling that the lock has just brought.
$(INSTALLED): requirements.lock pyproject.toml | $(UV)
	@echo "Setting up .venv (once, and when requirements.lock changes)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=…")'
	@test -x $(BIN)/python || $(UV) venv --quiet --allow-existing --python "$(PYTHON)" .venv
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

$(OWN_UV):
	@PIP_ROOT_USER_ACTION=ignore $(PYTHON) -m pip install --quiet --disable-pip-version-check \
		--no-warn-script-location --target .venv/tools uv
