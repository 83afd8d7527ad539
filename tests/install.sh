#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make install DESTDIR=` installs serves a program that finds it with pkg-config alone, the
# static library has no global symbols but the interface, and `make uninstall` leaves no file.
set -eu

root=$(mktemp -d)
log=$(mktemp)
trap 'rm -rf "$root" "$log"' EXIT

# `make check` may hand its own flags down.
remake() (
    unset MAKEFLAGS MFLAGS
    make -C "${PUZZLEKV_BUILD:?}" "$1" DESTDIR="$root" > "$log" 2>&1 || {
        cat "$log"
        exit 1
    }
)

remake install
installed=$(find "$root" ! -type d | wc -l)
folder=$(find "$root" -name pkgconfig)
PKG_CONFIG_SYSROOT_DIR=$root PKG_CONFIG_PATH=$folder${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH} \
    sh "${PUZZLEKV_SOURCE:?}/tests/consumer.sh"
# shellcheck disable=SC2086
find "$root" -name 'libpuzzlekv.a' -exec $NM -g --defined-only {} + |
    awk 'NF == 3 && $3 !~ /^pkv_/ { print "install.sh: global in libpuzzlekv.a: " $3; found = 1 }
         END { exit found }'
remake uninstall
left=$(find "$root" ! -type d)
if [ -n "$left" ]; then
    echo "install.sh: make uninstall left:"
    echo "$left"
    exit 1
fi
echo "$installed files installed and uninstalled"
