#!/bin/sh
# Every suite, each file in a process of its own, since compiling kernels takes most of the time.
# `run.sh together` runs those that may run beside others, `run.sh alone` those that count the GPU's
# free bytes, and take them all. Prints a short summary last.
cd "$(dirname "$0")/../.." || exit 1
out="${OUT:-build/cuda}"
mkdir -p "$out"
sh tests/cuda/build.sh
run() {
    python3 -m pytest -q -p no:cacheprovider -rA --tb=short --durations=3 "tests/cuda/$1.py" \
        > "$out/$1.log" 2>&1
    echo "exit $?" >> "$out/$1.log"
}
rm -f "$out"/test_*.log
if [ "$1" != alone ]; then
    for name in every products attention decode same_bits recurrent convert missing sampling models steps native \
        sessions memory api choices beside flying passage smollm2; do run "test_cuda_$name" & done
    wait
fi
if [ "$1" != together ]; then
    for name in device placement; do run "test_cuda_$name"; done
fi
for log in "$out"/test_*.log; do
    echo "== $(basename "$log" .log): $(tail -n 2 "$log" | tr '\n' ' ')"
    grep -E "^E  " "$log" | cut -c1-160 | sort | uniq -c | sort -rn | head -6
    grep -E "^(FAILED|ERROR)" "$log" | cut -c1-150 | head -12
done
grep -h "of the range" "$out"/test_*.log | sort -u
! grep -L "^exit 0" "$out"/test_*.log | grep .
