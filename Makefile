# Targets a user needs: demo, test, check. Each makes what it lacks; nothing has to be activated.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# Of what is installed a tenth is ever imported: that is compiled when it is.
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
INPUTS := pyproject.toml constraints.txt

# Processes that share the tests: much of a test is waiting for others. JOBS=0 runs them in one process, in order.
JOBS ?= 3
TOGETHER := -n $(JOBS) --dist worksteal

# The tests start hundreds of interpreters: whatever the environment says, each module is compiled once.
test test-nonumpy test-frameworks test-matrix test-fault test-nodes fuzz mutants mutants-generated: export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test check test-nonumpy test-frameworks test-matrix test-fault test-nodes fuzz mutants mutants-generated wheel-check docs bench bench-quick bench-smoke bench-gpu \
	bench-compare clean

help:
	@echo "make demo          train, kill, resume: the whole path on this machine"
	@echo "make test          all tests"
	@echo "make check         format, lint, types, architecture, contracts"
	@echo "make test-nonumpy  the core tests with nothing but the required packages"
	@echo "make test-frameworks  training frameworks with our adapters, and what other libraries read of what is written here"
	@echo "make test-matrix   every way to save, loaded in every other way; results in tests/fault/results"
	@echo "make test-fault    the fault tests that take minutes, as root; results in tests/fault/results"
	@echo "make test-nodes    workers in network namespaces, as root; results in tests/fault/results"
	@echo "make fuzz          readers of strange bytes, for minutes; FUZZ_SECONDS for each"
	@echo "make mutants       known bugs put in on purpose, and the tests that catch them"
	@echo "make mutants-generated  500 small random changes of the product, and which of them the unit tests notice"
	@echo "make wheel-check   build a wheel and import from it"
	@echo "make docs          the site, in build/site: open its index.html"
	@echo "make bench         the measurements"
	@echo "make bench-smoke   each measurement once at its smallest: that it runs"
	@echo "make bench-quick   the main ratios beside those of the last result file"
	@echo "make bench-compare ours and the peers, side by side"
	@echo "make bench-gpu     the tests and measurements that need a GPU"

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
	.venv-core/bin/$(PIP) -e . pytest pytest-timeout pytest-xdist
	touch $@

demo: .venv/.core
	.venv/bin/asyncckpt demo

# A server that speaks as Azure does, for tests; they are skipped where it cannot be installed.
AZURITE := azurite@3.37.0
.azurite/.stamp: Makefile
	mkdir -p .azurite
	@if ! command -v npm >/dev/null; then \
		echo "no npm: the tests with azurite will be skipped"; \
	elif npm install --prefix .azurite --no-audit --no-fund --ignore-scripts --loglevel=error $(AZURITE); then \
		touch $@; \
	else \
		echo "$(AZURITE) could not be installed: the tests with it will be skipped"; \
	fi

test: .venv/.dev .azurite/.stamp
	.venv/bin/python -m pytest $(TOGETHER)

check: .venv/.dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy -p asyncckpt -p asyncckpt_worker -p benchmarks
	.venv/bin/python docs/check_parity.py
	.venv/bin/python docs/check_formats.py
	.venv/bin/python docs/check_promises.py
	.venv/bin/python docs/check_docs.py
	.venv/bin/python -m pytest -q tests/unit/test_architecture.py $$(find tests/unit -name "test_spec_*.py") tests/unit/protocol/test_protocol_version.py tests/unit/test_parity.py tests/unit/format/test_formats.py tests/unit/test_promises.py tests/unit/test_docs.py tests/unit/test_contributor_pages.py

# Of the unit tests those that import torch: the rooms that do not cannot tell the difference. The measurements want numpy.
test-nonumpy: .venv-core/.stamp
	.venv-core/bin/python -c 'import importlib.util as u; assert not u.find_spec("numpy"), "numpy is installed"'
	.venv-core/bin/python -m pytest $(TOGETHER) \
		$$(grep -rlE --include="test_*.py" '(import|from) (torch|numpy)\b|importorskip\("torch"' tests/unit) \
		tests/unit/test_architecture.py::test_quick_modules_load_without_torch_and_numpy \
		tests/integration/test_ranks_exchange.py tests/integration/test_ranks_async.py

# Of its own, so that nothing else depends on what these bring along.
.venv-frameworks/.stamp: $(INPUTS)
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/$(PIP) -e '.[test,frameworks]'
	touch $@

test-frameworks: .venv-frameworks/.stamp
	.venv-frameworks/bin/python -c 'import accelerate, bitsandbytes, lightning, ray, torchao, torchdata, transformers'
	.venv-frameworks/bin/python -c 'import torch; assert torch.version.cuda is None or torch.cuda.is_available(), torch.__version__'
	.venv-frameworks/bin/python -m pytest $(TOGETHER) tests/frameworks tests/integration/test_stock_tools.py tests/integration/test_docs_code.py

test-matrix: .venv/.dev
	ASYNCCKPT_TEST_RESULTS=tests/fault/results ASYNCCKPT_TEST_RESULTS_NAME=matrix \
		.venv/bin/python -m pytest -m "matrix or not matrix" tests/integration/test_ranks_matrix.py \
		tests/integration/test_ranks_random_cuts.py

test-fault: export ASYNCCKPT_TEST_RESULTS = tests/fault/results
test-fault: .venv/.dev .azurite/.stamp
	@test "$$(id -u)" = 0 || echo "not root: what needs mounts, tracing or limits will be skipped"
	ASYNCCKPT_TEST_KILLS=500 ASYNCCKPT_TEST_STREAMED_KILLS=100 ASYNCCKPT_TEST_CUTS=100 ASYNCCKPT_TEST_SHARE=1 ASYNCCKPT_TEST_EXITS=20 \
		.venv/bin/python -m pytest -n 2 --dist worksteal --timeout 900 -m "not matrix and not nodes and not gpu" tests/fault tests/unit/dcp/test_layout_dcp.py \
		tests/integration/test_worker_resubmission.py tests/integration/test_ranks_worker_loss.py tests/integration/test_stream_lost.py \
		tests/integration/test_exit_codes.py
	ASYNCCKPT_TEST_RESULTS_NAME=simulations ASYNCCKPT_TEST_CASES=200 ASYNCCKPT_TEST_EXAMPLES=1000 ASYNCCKPT_TEST_ORDERS=300 ASYNCCKPT_TEST_SCHEDULES=300 ASYNCCKPT_TEST_LOADS=2000 ASYNCCKPT_TEST_MUTATIONS=5000 ASYNCCKPT_TEST_MESSAGES=100000 \
		.venv/bin/python -m pytest -n 2 --dist worksteal --timeout 900 -m "not matrix and not nodes and not gpu" \
		$$(find tests/unit -name "test_*simulation.py") $$(find tests/unit -name "test_*_properties.py") tests/unit/test_fuzzing.py tests/integration/test_worker_fuzzing.py \
		tests/integration/test_overlap.py

test-nodes: .venv/.dev
	@test "$$(id -u)" = 0 || echo "not root: all of it will be skipped"
	ASYNCCKPT_TEST_RESULTS=tests/fault/results ASYNCCKPT_TEST_RESULTS_NAME=nodes \
		.venv/bin/python -m pytest -m nodes tests/fault/test_nodes.py

# atheris has no wheels for some Pythons; without it a mutator that sees no coverage does the work.
FUZZ_SECONDS ?= 15
fuzz: .venv/.dev
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --target build/atheris atheris || true
	PYTHONPATH=build/atheris:.:.typing .venv/bin/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

mutants: .venv/.dev
	.venv/bin/python -m tests.mutants.run

mutants-generated: .venv/.dev
	.venv/bin/python -m tests.mutants.generated --write tests/mutants/GENERATED.md

wheel-check: .venv/.dev
	rm -rf build dist
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/wheel dist/asyncckpt-*.whl
	cd build/wheel && PYTHONPATH=. ../../.venv/bin/python ../../tests/wheel_check.py .

# Reads the sources and imports nothing of them, so it needs no torch: only the requirements of the extra.
.venv-docs/.stamp: $(INPUTS)
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(PIP) $$(sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml)
	touch $@

docs: .venv-docs/.stamp
	PATH="$$PWD/.venv-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	.venv-docs/bin/python docs/check_docs.py build/site

bench: .venv/.dev
	.venv/bin/python -m benchmarks

bench-smoke: .venv/.dev
	.venv/bin/python -m benchmarks --smoke

bench-quick: .venv/.dev
	.venv/bin/python -m benchmarks save_load --quick

bench-compare: .venv/.dev
	.venv/bin/$(PIP) -e '.[dev,peers]'
	for state in gpt small large; do .venv/bin/python -m benchmarks compare --state $$state; done
	.venv/bin/python -m benchmarks.report

bench-gpu: .venv/.dev
	code=0; .venv/bin/python -m pytest -m "gpu or not gpu" tests/gpu || code=$$?; .venv/bin/python -m benchmarks gpu && exit $$code

clean:
	rm -rf .venv .venv-core .venv-frameworks .venv-docs .azurite build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
