# `make` lists the targets. Everything is installed into .venv, nothing outside of this directory but caches.
#
#   PYTHON=python3.12   makes .venv, where there is none yet (default: the first of python3, python3.13, 3.12, 3.11, 3.10 that fits)
#   ARGS="-k postgres"  handed on to pytest, the demo or the benchmarks
#   JOBS=1              test processes side by side (default: one per 4 GiB of memory, 2 to 5; each has servers of its own, and
#                       mostly waits for them)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-quick coverage soak soak-kills mutants matrix mysql debezium check format docs bench dist clean distclean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
JOBS ?= $(shell $(BIN)/python -c 'import os; print(max(2, min(5, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 32)))')

FITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do "$$p" -c '$(FITS)' 2>/dev/null && echo $$p && exit; done; echo python3)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with this package, editable, and everything it is tested with

$(STAMP): setup.cfg constraints.txt
	@"$(BIN)/python" -c '$(FITS)' 2>/dev/null || { python='$(PYTHON)'; \
		"$$python" -c '$(FITS)' 2>/dev/null || { \
			found=$$("$$python" --version 2>/dev/null || echo "nothing that runs"); \
			echo "$$python is $$found; this project needs Python 3.10 to 3.13. Install one, or name it: make PYTHON=/path/to/python3.12 install" >&2; \
			exit 1; }; \
		"$$python" -m venv --clear $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv \
		&& $(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]' \
		|| { echo "uv could not do it; installing with pip, which takes some minutes" >&2; \
			$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; }
	@touch $@

demo: install ## a real Kafka, PostgreSQL and Airflow: a window, a kill, a retry, and the proof
	@$(BIN)/python -m airflow_kafka_spark.demo $(ARGS)

# Thousands of tests run beside dozens of servers on any machine. At most three of them may run a second time, and the output ends with
# their names and first failures. No test whose records were lost, doubled or changed runs again, and none of tests/faults.
AGAIN := --reruns 1 --max-suite-reruns 3 --rerun-except RecordsDiffer

test: install ## run the tests: each guarantee, and each kill where its mechanism is
	@$(BIN)/python -m pytest -n $(JOBS) --dist load $(AGAIN) $(ARGS)

test-all: install ## run all tests, those with further values, engines and servers for the same guarantees included
	@$(BIN)/python -m pytest -n $(JOBS) --dist load $(AGAIN) --extended $(ARGS)

# The tests of values and pure functions: no server, no JVM.
QUICK := tests/windows tests/formats tests/transforms tests/jobs tests/support

test-quick: install ## run the tests that need no server, in about a minute
	@$(BIN)/python -m pytest -q -n 2 -m "not servers" $(QUICK) $(ARGS)

coverage: install ## run the tests with coverage of lines and branches, subprocesses and Spark's workers included
	@mkdir -p build && COVERAGE_FILE='$(CURDIR)/build/coverage' $(BIN)/python -m pytest -n $(JOBS) --dist load \
		--cov --cov-report=term --cov-report=json:build/coverage.json $(AGAIN) $(ARGS)

SOAK = PYTHONPATH="$$($(BIN)/python -m tests.support.s3):$(CURDIR):$$PYTHONPATH" \
	SOAK_MINUTES=$(or $(MINUTES),10) SOAK_SEED=$(SEED) SOAK_ONLY='$(ONLY)' $(BIN)/python -m pytest -q -s --extended

soak: install ## new random examples, then random kills of pipelines of all kinds (MINUTES=10 SEED=7 ONLY=BetweenTopics): every record is counted; copies of tables that change at random
	@$(BIN)/python -m pytest -q -n 2 -m "not servers" --hypothesis-profile=search $(QUICK)
	@$(SOAK) tests/soak tests/sources/postgres_cdc/test_copies.py tests/sources/mysql_cdc/test_copies.py $(ARGS)

soak-kills: install ## only the random kills of `make soak`; .ci/run calls it for two minutes
	@$(SOAK) tests/soak $(ARGS)

mutants: install ## put deliberate faults into the code and see that the tests find each of them
	@$(BIN)/python -m tests.mutants $(ARGS)

matrix: install ## run a core set of tests with other versions of Python, Spark, Airflow and the clients (ARGS="spark-3.5")
	@$(BIN)/python -m tests.matrix $(ARGS)

# MySQL is not part of the stable distribution of Debian: see CONTRIBUTING.md.
mysql: install ## run the tests of MariaDB on MySQL: MYSQLD=/path/to/mysqld, or the directory of its unpacked packages
	@test -n "$(MYSQLD)" || { echo "MYSQLD is not set: name a server, or the directory of its unpacked packages" >&2; exit 1; }
	@MYSQLD='$(MYSQLD)' $(BIN)/python -m pytest -n $(JOBS) --dist load $(AGAIN) tests/sources/mysql_cdc tests/sources/jdbc/test_mysql.py \
		tests/verification/test_types.py tests/verification/test_verify.py $(ARGS)

debezium: install ## run Debezium's engine on tables of all types, and record what tests compare events with (needs Maven)
	@$(BIN)/python -m tests.support.debezium.record $(ARGS)

check: install ## lint, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install ## put imports and layout in order
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

# Warnings are errors: a link that leads nowhere, an argument that no docstring describes. tests/test_docs.py and
# tests/test_signatures.py check most of it without building, and without Sphinx.
docs: install ## build the documentation into build/docs: the pages, and the reference from docstrings
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Sphinx needs Python 3.11 or later: make PYTHON=python3.12 distclean docs" >&2; exit 1; }
	@$(BIN)/python -c 'import furo, myst_parser, sphinx' 2>/dev/null \
		|| $(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[docs]' \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@AIRFLOW_HOME='$(CURDIR)/build/airflow' $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo build/docs/index.html

bench: install ## run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

dist: install ## build the wheel and the source archive into dist/
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .

clean: ## remove what was built, and the caches of the tools
	@rm -rf build dist provider/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	@rm -rf $(VENV)
