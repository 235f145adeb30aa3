# Targets a user needs: demo, test, check. Each makes what it lacks; nothing has to be activated.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP := python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help demo test check test-nonumpy test-frameworks test-matrix test-fault test-nodes wheel-check bench clean

help:
	@echo "make demo          train, kill, resume: the whole path on this machine"
	@echo "make test          all tests"
	@echo "make check         format, lint, types, architecture, contracts"
	@echo "make test-nonumpy  the core tests with nothing but the required packages"
	@echo "make test-frameworks  what other libraries read of what is written here"
	@echo "make test-matrix   every way to save, loaded in every other way"
	@echo "make test-fault    the fault tests that take minutes"
	@echo "make test-nodes    workers in network namespaces, as root"
	@echo "make wheel-check   build a wheel and import from it"
	@echo "make bench         the measurements"

# Two levels, so that the demo waits for no tool that it does not use. .dev includes .core.
.venv/.core: $(INPUTS)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/$(PIP) -e '.[demo]'
	touch $@

.venv/.dev: $(INPUTS)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/$(PIP) -e '.[dev,bench]'
	touch .venv/.core $@

# Neither numpy nor hypothesis nor safetensors: what a bare `pip install asyncckpt` gives.
.venv-core/.stamp: $(INPUTS)
	test -x .venv-core/bin/python || $(PYTHON) -m venv .venv-core
	.venv-core/bin/$(PIP) -e . pytest pytest-timeout
	touch $@

demo: .venv/.core
	.venv/bin/asyncckpt demo

test: .venv/.dev
	.venv/bin/python -m pytest

check: .venv/.dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy -p asyncckpt -p asyncckpt_worker -p benchmarks
	.venv/bin/python docs/check_parity.py
	.venv/bin/python docs/check_formats.py
	.venv/bin/python -m pytest -q tests/unit/test_architecture.py tests/unit/test_spec_*.py tests/unit/test_parity.py tests/unit/test_formats.py

test-nonumpy: .venv-core/.stamp
	.venv-core/bin/python -c 'import importlib.util as u; assert not u.find_spec("numpy"), "numpy is installed"'
	.venv-core/bin/python -m pytest tests/unit tests/integration/test_ranks_exchange.py tests/integration/test_ranks_async.py

# Of its own, so that nothing else depends on what these bring along.
.venv-frameworks/.stamp: $(INPUTS)
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/$(PIP) -e '.[test,frameworks]'
	touch $@

test-frameworks: .venv-frameworks/.stamp
	.venv-frameworks/bin/python -c 'import transformers'
	.venv-frameworks/bin/python -m pytest tests/integration/test_stock_tools.py

test-matrix: .venv/.dev
	.venv/bin/python -m pytest -m "matrix or not matrix" tests/integration/test_ranks_matrix.py

test-fault: .venv/.dev
	.venv/bin/python -m pytest -m "fault or soak" tests/fault
	ASYNCCKPT_TEST_SCHEDULES=300 .venv/bin/python -m pytest --timeout 900 tests/unit/test_workers_simulation.py

test-nodes: .venv/.dev
	.venv/bin/python -m pytest -m nodes tests/fault/test_nodes.py

wheel-check: .venv/.dev
	rm -rf build dist
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/wheel dist/asyncckpt-*.whl
	cd build/wheel && PYTHONPATH=. ../../.venv/bin/python ../../tests/wheel_check.py .

bench: .venv/.dev
	.venv/bin/python -m benchmarks

clean:
	rm -rf .venv .venv-core .venv-frameworks build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
