#!/bin/sh
# What a GPU has to show, in three calls of less than ten minutes each:
#   sh tests/cuda/show.sh correct    every suite, then compute-sanitizer over every kernel
#   sh tests/cuda/show.sh alone      timings, and models on a GPU that lost its memory
#   sh tests/cuda/show.sh together   soaking, plans against the driver, a real model
# The log of each step is in $OUT, or build/show; what each said last is printed at the end. MODELS is
# the folder that soaking takes its models from.
cd "$(dirname "$0")/../.." || exit 1
logs="${OUT:-build/show}" began="$(date +%s)"
mkdir -p "$logs" && rm -f "$logs"/*.log
export OUT=build/cuda PYTHONPATH="$PWD" PYTHONUNBUFFERED=1

step() {  # a name, seconds at most, a command
    name="$1" most="$2" start="$(date +%s)"
    shift 2
    echo "-- $name"
    timeout "$most" "$@" > "$logs/$name.log" 2>&1
    echo "== $name: exit $?, $(($(date +%s) - start)) s" >> "$logs/$name.log"
}
case "$1" in
    correct)
        step suites 300 sh tests/cuda/run.sh
        export SECONDS_EACH=$((565 - $(date +%s) + began))
        step sanitize 585 sh tests/cuda/sanitize.sh
        ;;
    alone)
        step recurrent 120 python3 bench/cuda_recurrent.py
        step streaming 150 python3 bench/streaming.py --ways waiting overlapped --rounds 2
        step fit 310 python3 bench/fit_cuda.py --seconds 110
        ;;
    together)
        step soak 585 python3 bench/soak_cuda.py "${MODELS:-tests/data/models}"/tiny-* &
        step plans 560 python3 bench/placement_bytes.py 4B-Q4_K_M:every hybrid-Q8_0:every --check &
        step smollm2 300 python3 -m pytest -q -rs -p no:cacheprovider tests/cuda/test_cuda_smollm2.py &
        wait
        ;;
    *) echo "sh tests/cuda/show.sh correct|alone|together"; exit 2 ;;
esac
for log in "$logs"/*.log; do grep -v "^{" "$log" | tail -n 60 | cut -c1-220; done
! grep -h "^== .*: exit [^0]" "$logs"/*.log
