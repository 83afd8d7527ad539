#!/bin/sh
# SPDX-License-Identifier: MIT
# The library and the programs need no library of CUDA, whatever was there when they were built.
set -eu

cd "${PUZZLEKV_BUILD:?}"
checked=0
for file in lib/.libs/libpuzzlekv.so .libs/puzzlekv-run .libs/puzzlekv-eval .libs/puzzlekv-bench; do
    [ -f "$file" ] || continue
    checked=$((checked + 1))
    libraries=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    case $libraries in
    '')
        echo "readelf names no library that $file needs"
        exit 1
        ;;
    *cuda* | *cublas* | *cusolver*)
        echo "$file needs" "$libraries"
        exit 1
        ;;
    esac
done
if [ $checked -eq 0 ]; then
    echo "no_cuda.sh: nothing was built to be shared"
    exit 77
fi
echo "$checked files need no library of CUDA"
