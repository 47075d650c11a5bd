#!/bin/sh
# compute-sanitizer over every kernel at small shapes: bytes outside of what was taken, and races in
# shared memory. Each tensor is an allocation of its own then, or its neighbours would hide a fault;
# but for whole steps (choices): nothing can be allocated so while one is recorded. Races within
# torch's own kernels are torch's.
# Planted faults go first: a tool that does not find them has not looked.
cd "$(dirname "$0")/../.." || exit 1
out="${OUT:-build/cuda}"
mkdir -p "$out"
export PYTHONPATH="$PWD" PYTORCH_NO_CUDA_MEMORY_CACHING=1
check() {  # a tool, a name for the log, a command
    tool="$1" log="$out/$1-$2.log"
    shift 2
    compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all "$@" > "$log" 2>&1
}
failed=0
for pair in "memcheck outside" "racecheck race"; do
    check ${pair% *} planted python3 tests/cuda/planted.py ${pair#* }
    [ $? -eq 9 ] && echo "${pair% *}: finds the planted fault" || {
        echo "${pair% *}: DOES NOT FIND the planted fault"; failed=1
    }
done
small="(matches_the_reference or change_no_bit or many_folds or padding or filled_up or every_type \
or parts_of_several or norms_gates or test_experts or types or windows or holes or turned or moved \
or draws or penalties or logprobs or cuts or places or stored_already or fills_a_graph) and not large"
tools="${TOOLS:-memcheck racecheck}" names="${FILES:-recurrent attention decode products sampling choices}"
for tool in $tools; do
    for name in $names; do
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1
        [ "$name" != choices ] || unset PYTORCH_NO_CUDA_MEMORY_CACHING
        check "$tool" "$name" python3 -m pytest -q -x -p no:cacheprovider \
            "tests/cuda/test_cuda_$name.py" -k "$small" &
    done
done
wait
for tool in $tools; do
    for name in $names; do
        log="$out/$tool-$name.log"
        found=$(grep "ERROR SUMMARY\|RACECHECK SUMMARY" "$log" | tail -n 1)
        echo "$tool $name: $(grep -E "passed|failed|error" "$log" | tail -n 1) ${found#=========}"
        own=$(grep "Race reported between" "$log" | grep -vc "at::native")
        if [ "$tool" = memcheck ]; then own=$(echo "$found" | grep -vc " 0 errors"); fi
        [ "$own" -eq 0 ] && [ -n "$found" ] && grep -q " passed" "$log" || failed=1
    done
done
[ $failed -eq 0 ] && echo "sanitize: clean" || { echo "sanitize: FAILED"; exit 1; }
