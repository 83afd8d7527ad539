#!/bin/sh
# SPDX-License-Identifier: MIT
# The shared library exports the functions that lib/puzzlekv.h declares, and nothing else.
set -eu

library=$PUZZLEKV_BUILD/lib/.libs/libpuzzlekv.so
if [ ! -e "$library" ]; then
    echo "exports.sh: no shared library was built"
    exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Type A is the version node itself.
$NM -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    sort > "$scratch/exported"

# A declaration is what stands between semicolons, is no typedef and has no body.
$CC -E -P "$PUZZLEKV_SOURCE/lib/puzzlekv.h" | tr '\n;' ' \n' | grep -v 'typedef\|{' |
    grep -o 'pkv_[a-z0-9_]* *(' | tr -d ' (' | sort -u > "$scratch/declared"

if [ ! -s "$scratch/declared" ]; then
    echo "exports.sh: found no declaration in puzzlekv.h"
    exit 1
fi
echo "< exported, > declared in puzzlekv.h:"
diff "$scratch/exported" "$scratch/declared"
echo "the same $(wc -l < "$scratch/declared") functions"
