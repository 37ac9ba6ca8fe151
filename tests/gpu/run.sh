#!/usr/bin/env bash
# Builds the native modules for the GPU of this machine and runs every test that needs one; meant to
# take less than three minutes. Needs nvcc, a C++ compiler, torch for CUDA and what building and testing need
# (scikit-build-core, pybind11, cmake, ninja, pytest, pytest-timeout); nothing is downloaded. PYTHON
# names the interpreter; arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CUDA_ARCHITECTURES=native" \
  "$python" -m pip install -q --no-build-isolation --no-deps -e .
"$python" -c "from ds_lightning.ops import native; native.load('_cuda', 'any')"
exec "$python" -m pytest -m gpu tests/gpu "$@"
