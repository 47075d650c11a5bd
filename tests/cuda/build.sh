#!/bin/sh
# The CPU's kernels, for a machine that has the sources and no package; nothing where they are built.
cd "$(dirname "$0")/../.." || exit 1
out="${OUT:-build/cuda}"
mkdir -p "$out"
python3 -c "import quire.ops._cpu" 2> /dev/null || (
    cmake -S . -B build/cuda -G Ninja -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)" \
        -DPython_EXECUTABLE="$(command -v python3)" && cmake --build build/cuda && cp build/cuda/_cpu*.so quire/ops/
) > "$out/build.log" 2>&1 || tail -n 20 "$out/build.log"
