#!/usr/bin/env bash
# Sets up what a fresh Debian machine lacks, once; later runs find it done and take a second.
#   tools/setup.sh build    compiler, CMake, Highway, the Python environment .venv: enough for the wheel and the demo
#   tools/setup.sh test     that, and what the tests need: GoogleTest, clang for ThreadSanitizer, nvcc, files of engines
# With KDA_CUDA=ON, nvcc is installed for the wheel, too. Debian packages are installed where that is permitted (root,
# or sudo without a password); otherwise their names are printed.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-build}

packages=(g++ cmake ninja-build libhwy-dev libgomp1 python3 python3-venv)
if [ "$what" = test ]; then
  packages+=(ccache libgtest-dev clang-14 libomp-14-dev libclang-rt-14-dev binutils pkg-config)
fi

missing=()
for package in "${packages[@]}"; do
  case $package in  # a tool from elsewhere will do
    g++ | cmake | python3) command -v "$package" > /dev/null && continue ;;
    ninja-build) command -v ninja > /dev/null && continue ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2> /dev/null && continue ;;
    binutils) command -v nm > /dev/null && continue ;;
    pkg-config) command -v pkg-config > /dev/null && continue ;;
  esac
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then as_root=(); elif sudo -n true 2> /dev/null; then as_root=(sudo -n); else
    echo "setup: please install these Debian packages, then run this again: ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    > /dev/null
fi

# The environment is complete when the stamp holds the requirements it was made from.
stamp=.venv/kda-requirements.txt
if ! cmp -s tools/requirements.txt "$stamp"; then
  echo "setup: making .venv (torch is the large part)"
  python3 -m venv .venv
  # The lists name each file by its hash, so nothing else gets in. The build of torch for CPUs comes first, where pip
  # is offered it.
  install=(.venv/bin/pip install --no-deps --require-hashes --progress-bar off --disable-pip-version-check)
  "${install[@]}" -r tools/requirements-local.txt || echo "setup: so torch comes from the index, with CUDA"
  "${install[@]}" -r tools/requirements.txt
  # The index's torch needs NVIDIA's libraries, too; with the other build nothing is missing.
  .venv/bin/pip install -q --disable-pip-version-check "$(grep '^torch==' tools/requirements.in)"
  cp tools/requirements.txt "$stamp"
fi

# Every test run compiles the CUDA kernels. If the machine has no nvcc, it comes from PyPI (270 MB). CMake looks for
# lib64 and for a libcudart.so without a number.
if [ "$what" = test ] || [ "${KDA_CUDA:-}" = ON ]; then with_cuda=yes; else with_cuda=; fi
if [ "$with_cuda" ] && ! command -v nvcc > /dev/null && [ -z "${CUDACXX:-}" ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  cuda=$(echo .venv/lib/python3*/site-packages/nvidia/cu13)
  if [ ! -x "$cuda/bin/nvcc" ]; then
    echo "setup: installing nvcc 13.0 into .venv"
    .venv/bin/pip install --no-deps --require-hashes --progress-bar off -r tools/nvcc.txt
    cuda=$(echo .venv/lib/python3*/site-packages/nvidia/cu13)
    ln -sfn lib "$cuda/lib64"
    ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
  fi
fi

# A test reads the machine code of kernels. What disassembles it comes with a toolkit, else from PyPI (7 MB).
disassembler=(.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvdisasm)
if [ "$what" = test ] && ! { command -v cuobjdump && command -v nvdisasm; } > /dev/null && [ ! -x "${disassembler[0]}" ]
then
  .venv/bin/pip install --no-deps --require-hashes --progress-bar off --disable-pip-version-check \
    -r tools/disassembler.txt
fi

# The tests of plugs read other projects' files (300 MB, of which 200 are Triton).
if [ "$what" = test ]; then
  .venv/bin/python tools/fetch_engines.py
fi
