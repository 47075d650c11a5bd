#!/bin/sh
# What a GPU has to show, in three calls of less than ten minutes each:
#   sh tests/cuda/show.sh together   soaking, beside suites, then compute-sanitizer over every kernel
#                                    and plans against the driver
#   sh tests/cuda/show.sh alone      timings, and what takes or counts the GPU's memory
#   sh tests/cuda/show.sh ordinary   the ordinary tests: what they load takes the GPU, but for tests
#                                    that are marked as the host's; needs what `.[test]` installs
# The log of each step is in $OUT, or build/show; what each said last is printed at the end. MODELS is
# the folder that soaking takes its models from.
cd "$(dirname "$0")/../.." || exit 1
logs="${OUT:-build/show}" began="$(date +%s)"
mkdir -p "$logs" && rm -f "$logs"/*.log
export OUT=build/cuda PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

step() {  # a name, seconds at most, a command
    name="$1" most="$2" start="$(date +%s)"
    shift 2
    echo "-- $name"
    timeout "$most" "$@" > "$logs/$name.log" 2>&1
    echo "== $name: exit $?, $(($(date +%s) - start)) s" >> "$logs/$name.log"
}
sh tests/cuda/build.sh
case "$1" in
    together)
        step soak 590 python3 bench/soak_cuda.py "${MODELS:-tests/data/models}"/tiny-* &
        step suites 560 sh tests/cuda/run.sh together &
        sleep 230  # all but one or two of them have ended by then
        export SECONDS_EACH=$((570 - $(date +%s) + began))
        step plans "$SECONDS_EACH" python3 bench/placement_bytes.py 4B-Q4_K_M:every hybrid-Q8_0:every --check &
        step sanitize 590 sh tests/cuda/sanitize.sh &
        wait
        ;;
    alone)
        step suites 200 sh tests/cuda/run.sh alone
        step recurrent 60 python3 bench/cuda_recurrent.py
        step cuda 180 python3 bench/cuda.py
        step streaming 60 python3 bench/streaming.py --rounds 2
        step fit 240 python3 bench/fit_cuda.py --seconds 110
        ;;
    ordinary)
        step ordinary 590 python3 -m pytest -q -n 14 --dist loadfile -p no:cacheprovider -m "not slow" \
            --tb=short -rfE tests/models tests/server tests/unit
        ;;
    *) echo "sh tests/cuda/show.sh together|alone|ordinary"; exit 2 ;;
esac
for log in "$logs"/*.log; do grep -av "^{" "$log" | tail -n 60 | cut -c1-220; done
! grep -ah "^== .*: exit [^0]" "$logs"/*.log
