#!/usr/bin/env bash
# Builds dist/libkda-*.whl for every Linux whose glibc and libstdc++ are as new as this machine's compiler requires.
# The build tree is kept, so a small change takes seconds. KDA_CUDA and CUDACXX are as for CMake.
#
# auditwheel would put a copy of libgomp into the wheel, under its own name: next to torch's it would be a second
# OpenMP runtime in the process. So it is left out. torch and libkda both need libgomp.so.1. The one that is loaded
# first, torch's where torch is installed, serves both. libtvm_ffi is that of the package apache-tvm-ffi.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
raw=build/wheel-raw

rm -rf dist "$raw"
python -m pip wheel -v --no-deps --no-build-isolation -w "$raw" -C build-dir=build/wheel .
python -m auditwheel repair --exclude libgomp.so.1 --exclude libtvm_ffi.so -w dist "$raw"/*.whl 2> "$raw/log" ||
  { cat "$raw/log" >&2; exit 1; }
case $(echo dist/*) in
  dist/libkda-*-py3-none-manylinux*.whl) ;;
  *) echo "build_wheel: expected one wheel for manylinux, got $(echo dist/*)" >&2; exit 1 ;;
esac
python -m twine check --strict dist/*.whl
