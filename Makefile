# Two commands do everything from a bare clone, and a third what takes long:
#   make demo        build, install into .venv, train a small language model and generate text
#   make test        formats, lint, types, C++ and Python tests, the core of the emulated GPU's
#   make test-all    that, all of the emulated GPU's, plugs, tests of the GPU on the CPU, sanitizers and mutants
# They install what is missing first (tools/setup.sh). The rest of the targets are their parts, each run by tools/part,
# which tells what it does and how long it took.
SHELL := /bin/bash
.NOTPARALLEL:
PART := @tools/part
PYTHON := .venv/bin/python
# Threads that wait for work give up their core soon: with the default, two teams on a busy machine crawl.
export GOMP_SPINCOUNT := 1000
CPP := $(shell git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.c')

# One name for the compiler: ccache tells g++ from c++, and pip would choose another one than CMake does.
ifeq ($(origin CC),default)
export CC := gcc
endif
ifeq ($(origin CXX),default)
export CXX := g++
endif
export PYTHONUNBUFFERED := 1
CORES := $(shell nproc)

# CUDA takes two cores ten minutes to compile. Tests always compile it, the wheel where a GPU can run it. KDA_CUDA=ON or
# OFF, in the environment or after make, decides for the wheel.
GPU := $(wildcard /dev/nvidia0)$(shell nvidia-smi -L 2> /dev/null | grep -o '^GPU 0')
ifneq ($(filter test test-all build test-cpp,$(MAKECMDGOALS)),)
export KDA_CUDA := ON
else
export KDA_CUDA ?= $(if $(GPU),ON,OFF)
endif
# Kernels for all GPUs are compiled for three architectures. To tests, one tells nearly as much: what differs below 9.0
# are three places in headers, which tests/gpu compiles for sm_80, too.
export KDA_CUDA_PORTABLE ?= $(if $(filter test test-all,$(MAKECMDGOALS)),90,80;90;100)

# nvcc of the machine, else the one tools/setup.sh put into .venv.
VENV_NVCC = $(wildcard $(CURDIR)/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
CUDA_ENV = $(if $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc)),,$(if $(VENV_NVCC),CUDACXX=$(VENV_NVCC)))

.PHONY: demo test test-all times wheel install lint build test-cpp test-emulator test-python test-plugs test-mutants test-asan test-tsan \
  build-dir clean

demo: times setup-build install
	$(PART) "demonstration" $(PYTHON) -m examples.demo
	$(PART) --table

QUICK := times setup-test lint test-cpp install test-python
test: $(QUICK)
	$(PART) --table
	@echo "All tests passed, but for those of make test-all."

test-all: $(QUICK) test-emulator test-plugs test-mutants test-asan test-tsan
	$(PART) --table
	@echo "All tests passed."

times:
	@rm -f build/times.txt

setup-%:
	$(PART) "setup" tools/setup.sh $*

# The wheel, rebuilt when a source is newer, or when KDA_CUDA is another than it was built with. Its build tree is kept,
# so a small change takes seconds.
WHEEL_SOURCES := $(shell git ls-files -co --exclude-standard include src python cmake CMakeLists.txt pyproject.toml LICENSE THIRD_PARTY_NOTICES)
WITH_CUDA := build/wheel-cuda-$(KDA_CUDA)-$(subst ;,-,$(KDA_CUDA_PORTABLE))
$(WITH_CUDA): | build-dir
	@rm -f build/wheel-cuda-* && touch $@
dist/.built: $(WHEEL_SOURCES) $(WITH_CUDA) tools/build_wheel.sh
	$(PART) "wheel (KDA_CUDA=$(KDA_CUDA))" env $(CUDA_ENV) tools/build_wheel.sh
	@$(PYTHON) tools/build_report.py build/wheel --wheel dist/*.whl && touch $@
wheel: setup-build dist/.built

install: wheel
	$(PART) "install" $(PYTHON) -m pip install -q --no-deps --force-reinstall dist/*.whl

lint:
	$(PART) "clang-format" .venv/bin/clang-format --dry-run -Werror $(CPP)
	$(PART) "ruff" .venv/bin/ruff check -q .
	$(PART) "ruff format" .venv/bin/ruff format -q --check .
	$(PART) "mypy" .venv/bin/mypy
	$(PART) "rules of the house" $(PYTHON) tools/lint_house.py

build: | build-dir
	$(PART) "configure release" env $(CUDA_ENV) PATH="$(CURDIR)/.venv/bin:$$PATH" cmake --preset release -DKDA_CUDA=$(KDA_CUDA) "-DKDA_CUDA_PORTABLE=$(KDA_CUDA_PORTABLE)" \
	  -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON)
	$(PART) "build release" cmake --build --preset release
	@$(PYTHON) tools/build_report.py build/release

test-cpp: build
	$(PART) "C++ tests" ctest --preset release -j $(CORES) -LE "mutants|full"

test-emulator:
	$(PART) "emulator in full" ctest --preset release -j $(CORES) -L full

test-mutants:
	$(PART) "mutants" ctest --preset release -L mutants -V

# Against the installed wheel, from a folder where no source shadows it; a process per core.
PYTEST = env -C tests ../$(PYTHON) -m pytest -c ../pyproject.toml --rootdir .. -n auto
test-python: export OMP_WAIT_POLICY := passive
test-python:
	$(PART) "Python tests" $(PYTEST) -m "not slow" python

# The tests of the GPU, on the CPU: most hold there, too, and a mistake in them is found before a GPU is paid for.
test-plugs: export OMP_WAIT_POLICY := passive
test-plugs:
	$(PART) "slow Python tests" $(PYTEST) -m slow python
	$(PART) "tests of the GPU, on the CPU" env KDA_TEST_DEVICE=cpu OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" gpu
	$(PART) "plug of FLA 0.6" env OMP_NUM_THREADS=1 $(PYTEST) plugs

test-asan test-tsan: test-%: | build-dir
	$(PART) "configure $*" cmake --preset $(PRESET_$*)
	$(PART) "build $*" cmake --build --preset $(PRESET_$*)
	$(PART) "$* tests" ctest --preset $(PRESET_$*) -j $(CORES)
PRESET_asan := asan-ubsan
PRESET_tsan := tsan

build-dir:
	@mkdir -p build

clean:
	rm -rf build dist .venv demo_out
