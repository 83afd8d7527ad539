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
