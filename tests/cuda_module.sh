#!/bin/sh
# SPDX-License-Identifier: MIT
# The CUDA backend's module brings the runtime along and exports one name. Its code that factorizes
# rounds every operation as IEEE 754 does.
set -eu

cd "${PUZZLEKV_BUILD:?}/gpu"
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

libraries=$(readelf -d puzzlekv-cuda.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
case $libraries in
'') fail "readelf names no library" ;;
*cuda* | *cublas* | *cusolver*) fail "the module needs" "$libraries" ;;
esac
exported=$($NM -D --defined-only puzzlekv-cuda.so | awk '$2 != "A" { print $3 }')
[ "$exported" = puzzlekv_module ] || fail "the module exports" "$exported"

# What runs models needs cuBLAS too.
if [ -e puzzlekv-runner-cuda.so ]; then
    libraries=$(readelf -d puzzlekv-runner-cuda.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -E 'cuda|cublas|cusolver' | tr '\n' ' ')
    case $libraries in
    libcublas.so.*' ') ;;
    *) fail "the runner's module needs of CUDA:" "$libraries" ;;
    esac
    exported=$($NM -D --defined-only puzzlekv-runner-cuda.so | awk '$2 != "A" { print $3 }')
    [ "$exported" = puzzlekv_runner_module ] || fail "the runner's module exports" "$exported"
fi

operations=$(grep -oE '^[[:space:]]*(add|sub|mul|div|sqrt|rcp|fma|mad)[.][a-z0-9.]*f(32|64)' \
    factorize.ptx | tr -d ' \t' | sort | uniq -c)
echo "$operations"
echo "$operations" | grep -q 'fma[.]rn[.]f32' || fail "found no fma in the PTX"
if echo "$operations" | grep -v '[.]rn[.]'; then
    fail "operations without .rn"
fi
if grep -nE '[.]ftz|[.]approx|mma[.]' factorize.ptx; then
    fail "flush to zero, approximations or tensor cores"
fi

echo "$failures failures"
[ $failures -eq 0 ]
