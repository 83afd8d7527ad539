#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the fuzz targets with clang and runs each for some seconds, as many at a time as there are
# processors; the last line is "N passed, N failed". FOLDER (build-fuzz) keeps what was found for the
# next run: corpus/TARGET, what was worth keeping, and crashes/TARGET, the inputs that failed. To see
# one again: FOLDER/tests/fuzz/fuzz_TARGET FILE.
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
[ $# -gt 0 ] || set -- api chat config gguf index jsonl kv_spec safetensors session text tokenizer
for target in "$@"; do
    if [ ! -f "$root/tests/fuzz/fuzz_$target.c" ]; then
        echo "run.sh: there is no target $target" >&2
        exit 2
    fi
done

# Nothing that is fuzzed runs on several threads.
"$root/tools/build.sh" "$folder" --enable-fuzzing --enable-werror --disable-openmp --with-cuda=no \
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
running=

stop()
{
    for entry in $running; do
        kill "${entry#*:}" 2> /dev/null || :
    done
    rm -rf "$TMPDIR"
}
trap stop EXIT
trap 'exit 130' INT TERM

rm -rf "$folder/seeds"
mkdir -p "$folder/seeds"
"$folder/tests/fuzz/make_seeds" "$folder/seeds"

# What is freed is kept from use for a while, which counts against the limit of memory.
ASAN_OPTIONS=quarantine_size_mb=16:${ASAN_OPTIONS-}
UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS-}
OPENBLAS_NUM_THREADS=1
export ASAN_OPTIONS UBSAN_OPTIONS OPENBLAS_NUM_THREADS

# start TARGET: runs it beside the script.
start()
{
    corpus=$folder/corpus/$1
    crashes=$folder/crashes/$1
    mkdir -p "$corpus" "$crashes"
    set_dict=-dict=$root/tests/fuzz/config.dict
    longest=16384
    case $1 in
    gguf)
        set_dict=-dict=$root/tests/fuzz/gguf.dict
        longest=40960
        ;;
    api)
        # Three bytes make a call, and after each call everything is compared.
        set_dict=
        longest=1024
        ;;
    session | text) set_dict= ;;
    esac
    # A file of 40 KiB must never make for one block of 16 MiB, nor take ten seconds.
    "$folder/tests/fuzz/fuzz_$1" ${set_dict:+"$set_dict"} -max_total_time="$seconds" \
        -max_len="$longest" -timeout=10 -rss_limit_mb=512 -malloc_limit_mb=16 -print_final_stats=1 \
        -artifact_prefix="$crashes/" "$corpus" "$folder/seeds/$1" > "$crashes.log" 2>&1 &
    running="$running $1:$!"
}

# Waits for all that runs, and says how each has ended.
finish()
{
    for entry in $running; do
        target=${entry%:*}
        crashes=$folder/crashes/$target
        if wait "${entry#*:}"; then
            passed=$((passed + 1))
            result=passed
        else
            failed=$((failed + 1))
            result="FAILED, see $crashes.log and $crashes"
            grep -v '^#' "$crashes.log" | tail -n 60
        fi
        running=${running#" $entry"}
        count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$crashes.log")
        echo "fuzz_$target: ${count:-unknown number of} executions, $result"
    done
}

passed=0
failed=0
beside=0
for target in "$@"; do
    start "$target"
    beside=$((beside + 1))
    if [ $((beside % $(nproc))) -eq 0 ]; then
        finish
    fi
done
finish
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
