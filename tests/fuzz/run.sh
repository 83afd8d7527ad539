#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the fuzz targets with clang and runs each for some seconds; the last line is "N passed, N
# failed". FOLDER (build-fuzz) keeps what was found for the next run: corpus/TARGET, what was worth
# keeping, and crashes/TARGET, the inputs that failed. To see one again: FOLDER/tests/fuzz/fuzz_TARGET
# FILE.
#   tests/fuzz/run.sh [--build FOLDER] SECONDS [TARGET...]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$root/build-fuzz

usage()
{
    echo "usage: tests/fuzz/run.sh [--build FOLDER] SECONDS [TARGET...]" >&2
    exit 2
}

if [ "${1-}" = --build ]; then
    [ $# -ge 2 ] || usage
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
    shift 2
fi
case ${1-} in
'' | *[!0-9]*) usage ;;
esac
seconds=$1
shift
[ $# -gt 0 ] || set -- chat config gguf index kv_spec safetensors text tokenizer
for target in "$@"; do
    if [ ! -f "$root/tests/fuzz/fuzz_$target.c" ]; then
        echo "run.sh: there is no target $target" >&2
        exit 2
    fi
done

# Nothing that is fuzzed runs on several threads.
"$root/tools/build.sh" "$folder" --enable-fuzzing --enable-werror --disable-openmp \
    CC="${CC:-clang}" || {
    echo "0 passed, $# failed"
    exit 1
}

# Each input is written to files: best in memory.
if [ -z "${TMPDIR-}" ] && [ -w /dev/shm ]; then
    TMPDIR=/dev/shm
fi
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/puzzlekv-fuzz.XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
trap 'exit 130' INT TERM

rm -rf "$folder/seeds"
mkdir -p "$folder/seeds"
"$folder/tests/fuzz/make_seeds" "$folder/seeds"

# What is freed is kept from use for a while, which counts against the limit of memory.
ASAN_OPTIONS=quarantine_size_mb=16:${ASAN_OPTIONS-}
UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS-}
OPENBLAS_NUM_THREADS=1
export ASAN_OPTIONS UBSAN_OPTIONS OPENBLAS_NUM_THREADS

passed=0
failed=0
for target in "$@"; do
    corpus=$folder/corpus/$target
    crashes=$folder/crashes/$target
    log=$folder/crashes/$target.log
    mkdir -p "$corpus" "$crashes"
    # A file of 16 KiB must never make for one block of 16 MiB, nor take ten seconds.
    set_dict=-dict=$root/tests/fuzz/config.dict
    case $target in
    gguf) set_dict=-dict=$root/tests/fuzz/gguf.dict ;;
    text) set_dict= ;;
    esac
    if "$folder/tests/fuzz/fuzz_$target" ${set_dict:+"$set_dict"} -max_total_time="$seconds" \
        -max_len=16384 -timeout=10 -rss_limit_mb=512 -malloc_limit_mb=16 -print_final_stats=1 \
        -artifact_prefix="$crashes/" "$corpus" "$folder/seeds/$target" > "$log" 2>&1; then
        passed=$((passed + 1))
        result=passed
    else
        failed=$((failed + 1))
        result="FAILED, see $log and $crashes"
        grep -v '^#' "$log" | tail -n 60
    fi
    count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "fuzz_$target: ${count:-unknown number of} executions, $result"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
