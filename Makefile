# make demo and make test are the two to know. Each target makes the environment that it needs.

# The interpreter of the environment, the environment, and the PyTorch in it as pip names it
# (TORCH="torch==2.13.0"). Without TORCH the PyTorch that is there stays; where none is, the
# newest is installed.
PYTHON ?= python3
VENV ?= .venv
TORCH ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
# A name that says which TORCH was asked for, so that another one is installed and built against.
TORCH_NAME := $(if $(TORCH),$(firstword $(shell printf %s '$(TORCH)' | cksum)),any)
TORCH_STAMP := $(VENV)/.torch-$(TORCH_NAME)
ifeq ($(TORCH),)
TORCH_STAMP := $(firstword $(wildcard $(VENV)/.torch-*) $(TORCH_STAMP))
endif
# The package is installed; with every CPU library.
INSTALLED := $(VENV)/.installed
INSTALLED_ALL := $(VENV)/.installed-all
# And what has changed of the sources since is compiled.
COMPILED := $(VENV)/.compiled
CPP_SOURCES := $(wildcard $(foreach folder,csrc csrc/* csrc/*/*,$(addprefix $(folder)/*.,cpp h cu cuh)))
BUILT_BY := $(TORCH_STAMP) setup.py pyproject.toml pkg/version.py pkg/_build_flags.py
BUILT_FROM := $(BUILT_BY) $(CPP_SOURCES)
# Quoted as the shell needs them; the list stands on one line there.
BUILD_REQUIREMENTS := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ',')

# As many test processes as there are cores, which GPUs and memory limit too.
PYTEST_ARGUMENTS ?= -n auto --maxprocesses 8 --dist worksteal
# make test WHOLE=1: every sample of every operator, and what takes long too, as CI does.
WHOLE ?=
PART := $(if $(WHOLE),,PKG_TEST_EVERY=$${PKG_TEST_EVERY-8})
PYTEST_PART := $(if $(WHOLE),,-m 'not long')
# What the CPU libraries other than the best one have to pass too.
CAPABILITY_TESTS := tests/ops tests/test_c_functions.py

# A wheel carries the date of the commit, not of the build.
export SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2> /dev/null),315619200)
# What `make wheel` tests in the environment that it installs the wheel into.
WHEEL_TESTS ?= tests
WHEEL_TORCH ?= $(or $(TORCH),torch)
# Or WHEEL_ENVIRONMENT="--python PATH": that of an environment that is there.
WHEEL_ENVIRONMENT ?= --torch $(WHEEL_TORCH)
# WHEEL_ARGUMENTS="--every 7": then the lesser CPU libraries too, with one of so many samples.
WHEEL_ARGUMENTS ?=
# CHECK_WHEEL_ARGUMENTS=--needs-cuda where nvcc must have been found.
CHECK_WHEEL_ARGUMENTS ?=
MATRIX ?= torch==2.10.0 torch==2.11.0 torch==2.13.0 torch==2.15.0

.PHONY: help demo test test-all bench debug generate format lint clean wheel test-matrix test-processors cuda-report
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train a small GPT with these operators beside PyTorch'"'"'s, and let it write'
	@echo 'make test    run the tests with the CPU library of this processor, and CUDA where a GPU is:'
	@echo '             of each check one of 8 samples. WHOLE=1: all of them, and what takes long'
	@echo 'make test-all   all of them, then the operators'"'"' on every CPU library that this processor runs'
	@echo 'make bench   time the operators beside PyTorch'"'"'s (OPERATORS="matmul mul" for some)'
	@echo 'make debug   describe this machine, its compilers, its PyTorch and what was built'
	@echo 'make generate  write the lists that name every operator'
	@echo 'make format  format and mend the sources;  make lint: check them'
	@echo 'make wheel   build, repair, check, install and test a wheel for this platform, in dist/'
	@echo 'make test-matrix   test that wheel with every PyTorch of MATRIX'
	@echo 'make test-processors   test as processors of 2008 and 2013 (by qemu-user), and as this one'
	@echo 'make cuda-report   compile the CUDA kernels, check what became of them, write docs/cuda_kernels.md'
	@echo 'make clean   remove what was built'
	@echo 'PYTHON=python3.12 TORCH="torch==2.13.0" VENV=.venv choose the environment'

demo: $(COMPILED)
	$(RUN) examples/gpt.py $(DEMO_ARGUMENTS)

test: $(COMPILED)
	$(PART) $(RUN) -m pytest $(PYTEST_PART) $(PYTEST_ARGUMENTS)

test-all: $(INSTALLED_ALL)
	$(RUN) -m pytest $(PYTEST_ARGUMENTS)
	@set -e; for capability in $$($(RUN) -m pkg env --capabilities | tail -n +2); do \
	    echo "CPU library $$capability:"; \
	    PKG_CPU_CAPABILITY=$$capability $(RUN) -m pytest -q -m "not tracing" $(CAPABILITY_TESTS) $(PYTEST_ARGUMENTS); \
	done

bench: $(COMPILED)
	$(RUN) -m pkg bench $(OPERATORS) $(BENCH_ARGUMENTS)

# It must work where nothing else does.
debug:
	@$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) pkg/environment.py

# Imports nothing that has to be built.
generate: | $(RUN)
	$(RUN) tools/generate.py

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_SOURCES)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)

wheel: dist/wheel
	$(RUN) tools/test_wheel.py dist/*.whl $(WHEEL_ENVIRONMENT) --tests $(WHEEL_TESTS) --pytest='-q $(PYTEST_ARGUMENTS)' $(WHEEL_ARGUMENTS)

test-matrix: dist/wheel
	$(RUN) tools/test_wheel.py dist/*.whl --torch $(MATRIX) --tests $(WHEEL_TESTS) --pytest='-q $(PYTEST_ARGUMENTS)'

# PROCESSORS="Nehalem Haswell native" for some of them; PROCESSORS_ARGUMENTS="--every 60" for less.
test-processors: $(COMPILED)
	$(RUN) tools/test_processors.py $(PROCESSORS) $(PROCESSORS_ARGUMENTS)

# CUDA_REPORT_ARGUMENTS="--jobs 8" where there are more cores; or a library, or a wheel.
CUDA_REPORT_ARGUMENTS ?=
cuda-report: $(TORCH_STAMP)
	$(PIP) install --quiet --no-deps nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(RUN) tools/cuda_report.py --check --write docs/cuda_kernels.md $(CUDA_REPORT_ARGUMENTS)

# By way of the source distribution, so that it is whole too.
dist/wheel: $(BUILT_FROM) $(wildcard pkg/*.py pkg/*/*.py tools/*.py)
	$(PIP) install --quiet -r tools/requirements.txt
	rm -rf dist
	$(RUN) -m validate_pyproject pyproject.toml
	$(RUN) -m build --no-isolation --outdir dist/unrepaired
	mv dist/unrepaired/*.tar.gz dist/
	$(RUN) tools/repair_wheel.py dist/unrepaired/*.whl dist
	$(RUN) tools/check_wheel.py dist/*.whl $(CHECK_WHEEL_ARGUMENTS)
	$(VENV)/bin/check-wheel-contents dist/*.whl
	$(RUN) -m twine check --strict dist/*.whl dist/*.tar.gz
	@touch $@

clean:
	rm -rf build dist *.egg-info pkg/*.so $(VENV)/.installed* $(COMPILED)

$(RUN):
	@command -v '$(PYTHON)' > /dev/null || { echo '$(PYTHON) is not there: install Python 3.10 or newer, or say PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo '$(PYTHON) is older than 3.10: say PYTHON=/path/to/a/newer/python'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo '$(PYTHON) cannot make virtual environments. Debian, Ubuntu: apt-get install python3-venv'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo '$(PYTHON) has no Python.h to compile with. Debian, Ubuntu: apt-get install python3-dev'; exit 1; }
	@command -v $${CXX:-c++} > /dev/null || { echo "There is no C++ compiler ($${CXX:-c++}). Debian, Ubuntu: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(TORCH_STAMP): | $(RUN)
	$(PIP) install '$(or $(TORCH),torch>=2.10)'
	@rm -f $(VENV)/.torch-*
	@touch $@

# Without build isolation: compiled against this very PyTorch, and only what has changed. The
# libraries of an earlier choice go first; they would grow old beside the new ones.
define install
	$(PIP) install $(BUILD_REQUIREMENTS)
	@rm -f pkg/_cpu_*.so pkg/_cuda.*so $(VENV)/.installed*
	$(BUILT) $(RUN) tools/show_build.py $(PIP) install -v --no-build-isolation -e '.[test,dev,bench,examples]'
endef

# What this machine runs, unless these variables say something else.
$(INSTALLED): BUILT = PKG_CPU_LEVELS="$${PKG_CPU_LEVELS-native}" PKG_BUILD_CUDA="$${PKG_BUILD_CUDA-native}"
$(INSTALLED): $(BUILT_BY)
	@echo 'Compiling the libraries that this machine runs; the first time takes minutes.'
	$(install)
	@touch $(COMPILED) $@

# Without pip, which takes longer than most changes; and nothing where it was just installed.
$(COMPILED): BUILT = PKG_CPU_LEVELS="$${PKG_CPU_LEVELS-$$(test -e $(INSTALLED_ALL) || echo native)}" PKG_BUILD_CUDA="$${PKG_BUILD_CUDA-native}"
$(COMPILED): $(CPP_SOURCES) | $(INSTALLED)
	@test -e $@ && test -z "$$(find $(CPP_SOURCES) -newer $@)" || \
	    $(BUILT) $(RUN) tools/show_build.py $(RUN) setup.py --quiet build_ext --inplace
	@touch $@

$(INSTALLED_ALL): BUILT = PKG_CPU_LEVELS= PKG_BUILD_CUDA="$${PKG_BUILD_CUDA-native}"
$(INSTALLED_ALL): $(BUILT_FROM)
	@echo 'Compiling every CPU library; the first time takes minutes.'
	$(install)
	@touch $(INSTALLED) $(COMPILED) $@
