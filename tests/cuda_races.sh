#!/bin/sh
# SPDX-License-Identifier: MIT
# cuda_races.sh BUILD [SEEDS]: the kernels of the CUDA backend under ThreadSanitizer, to which each
# thread of a block is a thread. They run in SEEDS orders (5) of their threads; then each barrier and
# fence is left out in turn, which a test must find. BUILD was configured with --enable-cuda-host
# --enable-sanitizers=thread --disable-openmp. Takes 20 to 30 minutes of a core that has nothing else
# to do, so that it is not in make check.
set -eu

build=$(cd "$1" && pwd)
seeds=${2:-5}
source=$(cd "$(dirname "$0")/.." && pwd)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failures=0
cases="check_cuda:steps check_cuda:walk check_cuda:tensor check_decode:blocks check_decode:shapes
    check_prefill:blocks check_cusolver:faults"
PUZZLEKV_TEST_DATA=$source/tests/data
export PUZZLEKV_TEST_DATA

grep -q fsanitize=thread "$build/Makefile" || {
    echo "cuda_races.sh: $build was configured without --enable-sanitizers=thread" >&2
    exit 1
}
make -C "$build" tests/check_cuda tests/check_decode tests/check_prefill tests/check_cusolver >"$log" 2>&1 || {
    tail "$log"
    exit 1
}

# A case of a suite in one process, which ends with the first race. Loops without calls hear no
# SIGTERM.
run() {
    CK_FORK=no CK_RUN_CASE=${1#*:} TSAN_OPTIONS=halt_on_error=1 \
        timeout -s KILL 1800 "$build/tests/${1%:*}" >"$log" 2>&1
}

for seed in $(seq "$seeds"); do
    for case in $cases; do
        if PUZZLEKV_TEST_SEED=$seed run "$case"; then
            echo "seed $seed, $case: no race"
        else
            echo "FAIL: seed $seed, $case:"
            head -n 40 "$log"
            failures=$((failures + 1))
        fi
    done
done

# What found the last one comes first: kernels lie together.
last=
for barrier in $(cd "$source/gpu" &&
    grep -nE '^[^/*]*__(sync(threads|warp)|threadfence)\(' ./*.cu ./*.h | sed 's|^\./||' |
    cut -d : -f 1,2); do
    found=
    for case in $last $cases; do
        [ "$found" ] || PUZZLEKV_TEST_LEAVE_OUT=$barrier run "$case" || found=$case
    done
    if [ "$found" ]; then
        echo "without $barrier: found by $found"
        last=$found
    else
        echo "FAIL: without $barrier: nothing found"
        failures=$((failures + 1))
    fi
done

echo "$failures failures"
[ $failures -eq 0 ]
