#!/bin/sh
# SPDX-License-Identifier: MIT
# The C program in README.md compiles and runs with an installed library that only pkg-config knows
# of; with the static library, too, where that is installed.
#   tests/consumer.sh
set -eu
tests=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/example.sh
. "$tests/example.sh"
CC=${CC:-cc}

# Empty where the loader looks anyway.
folder=$(pkg-config --libs-only-L puzzlekv | sed -e 's/^-L//' -e 's/ .*//')
LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

# shellcheck disable=SC2046,SC2086
shared() {
    $CC ${CFLAGS:-} "$1" $(pkg-config --cflags --libs puzzlekv) -o "$2"
}

# By its name: -lpuzzlekv is the shared library where there are both.
# shellcheck disable=SC2046,SC2086
static() {
    $CC ${CFLAGS:-} "$1" $(pkg-config --static --cflags --libs puzzlekv |
        sed 's/-lpuzzlekv/-l:libpuzzlekv.a/') -o "$2"
}

check_readme_example "$tests/../README.md" shared
libdir=$(pkg-config --variable=libdir puzzlekv)
if [ -e "${folder:-$libdir}/libpuzzlekv.a" ]; then
    check_readme_example "$tests/../README.md" static
fi
