#!/bin/sh
# SPDX-License-Identifier: MIT
# The shared library's ABI on x86_64 with Linux is that of lib/puzzlekv.abi: functions, their versions and
# types, and the layout of every struct. HACKING.md says what a change means for the soname.
#   tests/abi.sh [--update]    --update writes lib/puzzlekv.abi anew; PUZZLEKV_BUILD is the build
set -eu

library=${PUZZLEKV_BUILD:?}/lib/.libs/libpuzzlekv.so
known=${PUZZLEKV_SOURCE:?}/lib/puzzlekv.abi

skip() {
    echo "abi.sh: $*"
    exit 77
}
command -v abidw > /dev/null || skip "abidw is not there (Debian package abigail-tools)"
[ -e "$library" ] || skip "no shared library was built"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What this folder does not have is opaque.
mkdir "$scratch/public"
cp "$PUZZLEKV_SOURCE/lib/puzzlekv.h" "$scratch/public"
abidw --headers-dir "$scratch/public" --drop-private-types --exported-interfaces-only \
    --no-parameter-names --no-corpus-path --no-comp-dir-path --no-elf-needed --no-show-locs \
    "$library" > "$scratch/abi"
grep -q "<var-decl name='page_tokens'" "$scratch/abi" || skip "the library has no debug information"

if [ "${1:-}" = --update ]; then
    # Where a source lay when it was compiled is no part of the ABI.
    sed "s|path='[^']*/\(lib/[a-z_]*\.c\)'|path='\1'|" "$scratch/abi" > "$known"
    exit
fi
abidiff --harmless "$known" "$scratch/abi"
echo "the same $(grep -c '<elf-symbol ' "$known") functions and their types"
