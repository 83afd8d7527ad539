#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs the library's suites, or those named, under valgrind, which has no AVX-512; the last line is
# "N passed, N failed". It takes many minutes, and so is no part of make check.
#   tests/valgrind.sh FOLDER [SUITE...]
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
shift
[ $# -gt 0 ] || set -- cache faults session slots step threads walk
passed=0
failed=0

for suite in "$@"; do
    make -s -C "$folder" "check_PROGRAMS=tests/check_$suite" "tests/check_$suite"
done
PUZZLEKV_TEST_DATA=$source/tests/data
PUZZLEKV_SOURCE=$source
PUZZLEKV_ISA=avx2
OPENBLAS_NUM_THREADS=1
OMP_NUM_THREADS=2
# A crash of one test would end the suite, but leaks of forked ones are told too late.
CK_FORK=no
export PUZZLEKV_TEST_DATA PUZZLEKV_SOURCE PUZZLEKV_ISA OPENBLAS_NUM_THREADS OMP_NUM_THREADS CK_FORK
for suite in "$@"; do
    echo "=== check_$suite"
    # What OpenMP's threads hold at the end is reachable.
    if "$folder/libtool" --mode=execute valgrind --quiet --error-exitcode=99 --leak-check=full \
        --show-leak-kinds=definite --errors-for-leak-kinds=definite "$folder/tests/check_$suite"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
