#!/usr/bin/env bash
# Collects in a folder what benchmarks/gpu.sh needs and a machine with torch, triton and nvcc may not have: wheels for
# its Python (default 312, Linux x86_64). Run where there is a network; carry the folder; give it as WHEELS.
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER [312]} version=${2:-312}
PYTHON=${PYTHON:-python3}
mkdir -p "$folder"
# pure Python unless its ops are built; its sdist wants torch, which PYTHON has
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "deepspeed>=0.19.8,<0.20"
"$PYTHON" -m pip download --quiet --dest "$folder" --only-binary=:all: --python-version "$version" --implementation cp \
    --abi "cp$version" --abi abi3 --abi none --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform any \
    "pydantic>=2.7" hjson msgpack py-cpuinfo einops psutil tqdm packaging pytest ninja
du -sh "$folder"
