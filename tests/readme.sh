#!/bin/sh
# SPDX-License-Identifier: MIT
# The C program in README.md compiles against the library as built, and runs.
set -eu
# shellcheck source=tests/example.sh
. "${PUZZLEKV_SOURCE:?}/tests/example.sh"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$PUZZLEKV_SOURCE/README.md" \
    > "$folder/example.c"
build_example "$folder/example.c" "$folder/example"
output=$("$folder/example")
echo "$output"
# A dense page takes 32768 bytes, a factorized one 23040, a token in a dense one 1024. The prompt's
# sink and 7 of its factorized pages are shared; its window page each text has factorized for
# itself, and has a window page and 20 tokens of its own.
[ "$output" = "1020 tokens in $((32768 + 7 * 23040 + 3 * (23040 + 32768 + 20 * 1024))) bytes; \
dense and without sharing in $((1020 * 1024))" ]
