#!/bin/sh
# Everything that a GPU has to show, in one go: each file in a process of its own, since compiling
# kernels takes most of the time. Prints a short summary last.
cd "$(dirname "$0")/../.." || exit 1
out="${OUT:-build/cuda}"
mkdir -p "$out"
python3 -c "import quire.ops._cpu" 2> /dev/null || (
    cmake -S . -B build/cuda -G Ninja -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)" \
        -DPython_EXECUTABLE="$(command -v python3)" && cmake --build build/cuda && cp build/cuda/_cpu*.so quire/ops/
) > "$out/build.log" 2>&1 || tail -n 20 "$out/build.log"
run() {
    python3 -m pytest -q -p no:cacheprovider -rA --tb=short --durations=3 "tests/cuda/$1.py" \
        > "$out/$1.log" 2>&1
    echo "exit $?" >> "$out/$1.log"
}
for name in every products attention decode same_bits recurrent convert missing sampling models steps native \
    sessions memory api choices flying passage smollm2; do run "test_cuda_$name" & done
wait
run test_cuda_device  # these alone: they count the GPU's free bytes, and take them all
run test_cuda_placement
for log in "$out"/test_*.log; do
    echo "== $(basename "$log" .log): $(tail -n 2 "$log" | tr '\n' ' ')"
    grep -E "^E  " "$log" | cut -c1-160 | sort | uniq -c | sort -rn | head -6
    grep -E "^(FAILED|ERROR)" "$log" | cut -c1-150 | head -12
done
grep -h "of the range" "$out"/test_*.log | sort -u
! grep -L "^exit 0" "$out"/test_*.log | grep .
