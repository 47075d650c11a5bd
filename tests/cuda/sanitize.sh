#!/bin/sh
# compute-sanitizer over every kernel at small shapes: bytes outside of what was taken, and races in
# shared memory. Each tensor is an allocation of its own then, or its neighbours would hide a fault;
# but for whole steps (choices): nothing can be allocated so while one is recorded. Races within
# torch's own kernels are torch's.
# A tool that does not find a planted fault has not looked; a kernel that no test launched under
# it was not looked at. Either is a failure. TOOLS and FILES choose; `every` alone has all kernels.
cd "$(dirname "$0")/../.." || exit 1
out="${OUT:-build/cuda}/sanitize" most="${SECONDS_EACH:-380}"
tools="${TOOLS:-memcheck racecheck}"
names="${FILES:-every recurrent attention decode products sampling choices}"
small="(matches_the_reference or change_no_bit or many_folds or padding or filled_up or every_type \
or parts_of_several or norms_gates or test_experts or types or windows or holes or turned or moved \
or draws or penalties or logprobs or cuts or places or stored_already or fills_a_graph) and not large"
mkdir -p "$out" && rm -f "$out"/*
export PYTHONPATH="$PWD" PYTORCH_NO_CUDA_MEMORY_CACHING=1

check() {  # a tool, a name for its files, a command
    tool="$1" files="$out/$1-$2"
    shift 2
    timeout "$most" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
        --print-limit 100000 "$@" > "$files.log" 2>&1
    echo $? > "$files.exit"
}
tests() {  # a tool, a file of tests
    [ "$2" = choices ] && unset PYTORCH_NO_CUDA_MEMORY_CACHING
    [ "$2" = every ] && chosen="" || chosen="$small"
    check "$1" "$2" python3 -m pytest -q -x -p no:cacheprovider -p tests.cuda.launches \
        --launches "$out/$1-$2.launches" "tests/cuda/test_cuda_$2.py" -k "$chosen"
}
for tool in $tools; do
    [ "$tool" = memcheck ] && fault=outside || fault=race
    check "$tool" planted python3 tests/cuda/planted.py "$fault" &
    for name in $names; do tests "$tool" "$name" & done
done
wait

failed=0
fails() { echo "  FAILED: $1"; failed=1; }
worst() {  # what a log says most often of what went wrong
    grep -E "^(E  |FAILED|ERROR)|Invalid|Race reported|=========     at " "$1" | cut -c1-180 \
        | sort | uniq -c | sort -rn | head -n 8
}
for tool in $tools; do
    [ "$(cat "$out/$tool-planted.exit")" = 9 ] && echo "$tool: finds the planted fault" \
        || fails "$tool does not find the planted fault, see $out/$tool-planted.log"
    for name in $names; do
        log="$out/$tool-$name.log" code="$(cat "$out/$tool-$name.exit")"
        ran="$(grep -E "[0-9]+ (passed|failed|error).* in [0-9.]+s" "$log" | tail -n 1)"
        sums="$(grep -E "(ERROR|RACECHECK) SUMMARY" "$log")"
        echo "$tool $name: ${ran:-no test ended}; $(echo "$sums" | tail -n 1)"
        case "$ran" in
            *failed* | *error* | "") fails "the tests themselves, exit $code, see $log" ;;
        esac
        [ -n "$sums" ] || fails "the tool said nothing"
        if [ "$tool" = memcheck ]; then
            [ "$code" = 0 ] && ! echo "$sums" | grep -qv " 0 errors" || fails "errors, exit $code"
        else
            races="$(grep "Race reported between" "$log" | grep -vc "at::native")"
            [ "$races" = 0 ] || fails "$races races"
            [ "$code" = 0 ] || [ "$code" = 9 ] || fails "exit $code"
        fi
        [ "$code" = 0 ] || worst "$log"
    done
    python3 -m tests.cuda.launches "$out/$tool"-*.launches || fails "kernels that $tool did not see"
done
[ $failed -eq 0 ] && echo "sanitize: clean" || { echo "sanitize: FAILED"; exit 1; }
