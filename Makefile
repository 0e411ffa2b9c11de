# Everything a person or CI does here, from a machine that has make, a C++ compiler and Python.
#
#   JOBS=N        processes for building and testing (all cores)
#   PYTHON=...    the interpreter to make .venv with (python3)
#   PYTEST=..., CTEST=...   further arguments for those two

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:

JOBS ?= $(shell nproc)
PYTHON ?= python3
PYTEST ?=
CTEST ?=
export PYTHON
export PATH := $(CURDIR)/.venv/bin:$(PATH)

RELEASE := build/release
VENV_PYTHON := $(CURDIR)/.venv/bin/python
BENCHES := copy digest plan session one_host

# What the release tree is configured with beyond its preset. pip builds in the same tree (see
# install), so it is told the same and nothing is compiled twice.
DEFINES := BASCULE_BUILD_TESTS=ON BASCULE_BUILD_BENCH=ON BASCULE_BUILD_PYTHON=ON

CXX_FOLDERS := $(wildcard include src tests bench python examples fuzz)
CXX_FILES = $(shell find $(CXX_FOLDERS) -name '*.cc' -o -name '*.h')
TIDY_FILES = $(shell find src -name '*.cc')
PYTHON_FOLDERS = $(wildcard python tests/python examples bench tools/lock tools/soak tools/docs tools/package tools/package/check_wheel tools/package/notices)

# The kernel may place a program where the thread sanitizers of gcc 12-13 and clang 14 have their
# shadow memory; setarch -R keeps it from doing so, where the container lets it.
NO_RANDOM_LAYOUT := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

export ASAN_OPTIONS := detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS := print_stacktrace=1
export TSAN_OPTIONS := suppressions=$(CURDIR)/cmake/tsan.supp:second_deadlock_stack=1
export LSAN_OPTIONS := suppressions=$(CURDIR)/cmake/lsan.supp:print_suppressions=0

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1#\2/p' $(MAKEFILE_LIST) | awk -F'#' '{printf "%-16s %s\n", $$1, $$2}'

.PHONY: demo
demo: ## Move a real model's weights from trainers to rollout engines, and watch it
	@tools/setup build torch demo
	@$(MAKE) install
	@.venv/bin/bascule demo

.PHONY: test
test: ## Run the C++ and the Python tests
	@tools/setup build torch test demo
	@$(MAKE) build install
	ctest --preset release -j $(JOBS) $(CTEST)
	@if [ -d tests/python ]; then set -x; .venv/bin/python -m pytest $(PYTEST); fi

.PHONY: lint
lint: ## Check formatting, clang-tidy, ruff and mypy --strict
	@tools/setup build torch test demo lint
	@$(MAKE) build
	@failed=; run() { echo "==> $$1"; "$${@:2}" || failed+=" $$1,"; }; \
	run clang-format clang-format --dry-run -Werror $(CXX_FILES); \
	run clang-tidy xargs -a <(printf '%s\n' $(TIDY_FILES)) -n 1 -P $(JOBS) clang-tidy -p $(RELEASE) --quiet; \
	run 'ruff check' ruff check $(PYTHON_FOLDERS); \
	run 'ruff format' ruff format --check $(PYTHON_FOLDERS); \
	run mypy mypy; \
	[ -z "$$failed" ] || { echo "lint found something in:$${failed%,}"; exit 1; }

.PHONY: format
format: ## Rewrite the sources as lint wants them
	@tools/setup build lint
	clang-format -i $(CXX_FILES)
	ruff check --fix-only $(PYTHON_FOLDERS)
	ruff format $(PYTHON_FOLDERS)

.PHONY: docs
docs: ## Build the API reference into build/docs
	@tools/setup build torch docs
	@$(MAKE) install
	@.venv/bin/python tools/docs build/docs

# FUZZ_SECONDS for each fuzzer, JOBS at a time, from the seeds and what earlier runs found.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: ## Fuzz every parser of outside bytes for a minute each
	@tools/setup build fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	build/fuzz/fuzz/fuzz_seeds build/fuzz/corpus
	cd build/fuzz && ls fuzz/fuzz_* | grep -v fuzz_seeds | xargs -P $(JOBS) -I{} \
	  ../../fuzz/run {} $(FUZZ_SECONDS)

.PHONY: sanitize
sanitize: asan tsan ## Run the C++ tests under the address, undefined and thread sanitizers

.PHONY: asan
asan: ## ... under the address and undefined-behaviour sanitizers alone
	@tools/setup build
	cmake --preset asan --log-level=WARNING
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS) $(CTEST)

.PHONY: tsan
tsan: ## ... under the thread sanitizer alone (the layers that have threads)
	@tools/setup build
	cmake --preset tsan --log-level=WARNING
	$(NO_RANDOM_LAYOUT) cmake --build --preset tsan -j $(JOBS)
	$(NO_RANDOM_LAYOUT) ctest --preset tsan -j $(JOBS) $(CTEST)

.PHONY: bench
bench: ## Measure: every number beside the bound of this machine
	@tools/setup build
	@$(MAKE) build
	@missed=; for bench in $(BENCHES); do \
	  echo "==> $(RELEASE)/bench/$$bench"; $(RELEASE)/bench/$$bench || missed+=" $$bench"; \
	done; \
	[ -z "$$missed" ] || { echo "failed, or missed a target:$$missed"; exit 1; }

.PHONY: configure
configure:
	@tools/setup build
	@cmake --preset release --log-level=WARNING -DPython_EXECUTABLE=$(VENV_PYTHON) $(DEFINES:%=-D%)

.PHONY: build
build: configure ## Build the library, tests, benchmarks and Python extension into build/release
	cmake --build --preset release -j $(JOBS)

# What the Python package is made of, and nothing else: the demo needs no tests.
.PHONY: extension
extension: configure
	cmake --build --preset release -j $(JOBS) --target _bascule

# pip is asked only when something that goes into the package is newer than what it installed.
.PHONY: install
install: extension ## Install the Python package into .venv
	@stamp=.venv/.installed-bascule; \
	if [ ! -e $$stamp ] || [ -n "$$(find pyproject.toml README.md python $(RELEASE) -newer $$stamp -type f \
	    \( -not -path '$(RELEASE)/*' -not -name '*.pyc' -o -name '*.so' \) -print -quit)" ]; then \
	  echo "==> Installing the Python package into .venv"; \
	  touch $$stamp.new; \
	  .venv/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps \
	    --no-index --force-reinstall --config-settings build-dir=$(RELEASE) \
	    --config-settings cmake.build-type=Release \
	    $(DEFINES:%=--config-settings cmake.define.%) .; \
	  mv $$stamp.new $$stamp; \
	fi

# PYTHONS are the interpreters to make wheels for ("python3.11 python3.12" for all that there are);
# CHECK_WHEEL has options of tools/package/check_wheel.
PYTHONS ?= $(PYTHON)
CHECK_WHEEL ?=
.PHONY: wheel
wheel: ## Build a wheel with every foreign library in it, into dist/
	JOBS=$(JOBS) tools/package/wheel $(PYTHONS)

.PHONY: check-wheel
check-wheel: wheel ## Install the wheel where nothing else is, and use it beside torch too
	@for python in $(PYTHONS); do $$python tools/package/check_wheel $(CHECK_WHEEL) dist/*.whl; done

.PHONY: lock
lock: ## Pin the newest Python packages that requirements/*.in allow
	@tools/setup build
	.venv/bin/python tools/lock

.PHONY: clean
clean: ## Remove what was built (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
