# Two commands do everything from a bare clone:
#   make demo    build, install into .venv, train a small language model and generate text
#   make test    all tests: formats, lint, types, C++, Python, sanitizers, mutants
# They install what is missing first (tools/setup.sh). The rest of the targets are their parts.
SHELL := /bin/bash
PYTHON := .venv/bin/python
# Threads that wait for work give up their core soon: with the default, two teams on a busy machine crawl.
export GOMP_SPINCOUNT := 1000
CPP := $(shell git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.c')

# nvcc of the machine, else the one tools/setup.sh put into .venv.
VENV_NVCC = $(wildcard $(CURDIR)/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
CUDA_ENV = $(if $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc)),,$(if $(VENV_NVCC),CUDACXX=$(VENV_NVCC)))

.PHONY: demo test wheel install lint build test-cpp test-python test-asan test-tsan clean

demo: setup-build install
	$(PYTHON) -m examples.demo

test: setup-test lint test-cpp install test-python test-asan test-tsan
	@echo "All tests passed."

setup-%:
	tools/setup.sh $*

# The wheel, rebuilt when a source is newer. Its build tree is kept, so a small change takes seconds.
WHEEL_SOURCES := $(shell git ls-files -co --exclude-standard include src python cmake CMakeLists.txt pyproject.toml LICENSE THIRD_PARTY_NOTICES)
dist/.built: $(WHEEL_SOURCES)
	$(CUDA_ENV) tools/build_wheel.sh && touch $@
wheel: dist/.built

install: dist/.built
	$(PYTHON) -m pip install -q --no-deps --force-reinstall dist/*.whl

lint:
	.venv/bin/clang-format --dry-run -Werror $(CPP)
	.venv/bin/ruff check -q .
	.venv/bin/ruff format -q --check .
	.venv/bin/mypy

build: | build-dir
	$(CUDA_ENV) PATH="$(CURDIR)/.venv/bin:$$PATH" cmake --preset release -DKDA_CUDA=ON \
	  -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) > build/release.log 2>&1 || { cat build/release.log; exit 1; }
	cmake --build --preset release

test-cpp: build
	ctest --preset release -j 2

# Against the installed wheel, from a folder where no source shadows it; a process per core. Then the tests of the GPU,
# on the CPU: most hold there, too, and a mistake in them is found before a GPU is paid for.
PYTEST = ../$(PYTHON) -m pytest -c ../pyproject.toml --rootdir .. -n auto
test-python: export OMP_WAIT_POLICY := passive
test-python:
	cd tests && $(PYTEST) python
	cd tests && KDA_TEST_DEVICE=cpu OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" gpu

test-asan test-tsan: test-%: | build-dir
	cmake --preset $(PRESET_$*) > build/$*.log 2>&1 || { cat build/$*.log; exit 1; }
	cmake --build --preset $(PRESET_$*)
	ctest --preset $(PRESET_$*) -j 2
PRESET_asan := asan-ubsan
PRESET_tsan := tsan

build-dir:
	mkdir -p build

clean:
	rm -rf build dist .venv demo_out
