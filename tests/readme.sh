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
# Of 9 complete pages sink and window stay dense, as do 13 tokens; 2 KV heads, 2 bytes an element.
[ "$output" = "301 tokens, 120064 of 154112 bytes, 7 pages factorized" ]
