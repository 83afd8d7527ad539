# shellcheck shell=sh
# SPDX-License-Identifier: MIT
# What the tests of example programs share.

# build_example SOURCE PROGRAM: compiles a C program as strictly as a reader might, against the
# library as built.
build_example() {
    # shellcheck disable=SC2086
    "${PUZZLEKV_BUILD:?}/libtool" --silent --tag=CC --mode=link $CC $CFLAGS -std=c11 -Wall -Wextra \
        -Werror -I "${PUZZLEKV_SOURCE:?}/lib" "$1" "$PUZZLEKV_BUILD/lib/libpuzzlekv.la" -o "$2"
}

# check_readme_example README BUILD: the C program in README.md, compiled by BUILD SOURCE PROGRAM,
# prints what it should.
check_readme_example() (
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1" > "$folder/example.c"
    "$2" "$folder/example.c" "$folder/example"
    output=$("$folder/example")
    echo "$output"
    # A dense page takes 32768 bytes, a factorized one 23040, a token in a dense one 1024. The
    # prompt's sink and 7 of its factorized pages are shared; its window page each text has
    # factorized for itself, and has a window page and 20 tokens of its own.
    bytes=$((32768 + 7 * 23040 + 3 * (23040 + 32768 + 20 * 1024)))
    [ "$output" = "1020 tokens in $bytes bytes; dense and without sharing in $((1020 * 1024))" ]
)
