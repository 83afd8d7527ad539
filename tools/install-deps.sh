#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs what building, testing and trying PuzzleKV on Debian or Ubuntu takes, and only what is
# missing.
#   tools/install-deps.sh [PACKAGE[?]...]    further packages to install; those with a question mark
#                                            only where the distribution has them
# shellcheck disable=SC2086
set -eu

packages="
    abigail-tools
    autoconf
    automake
    build-essential
    check
    gnuplot-nox
    libedit-dev
    libjansson-dev
    liblapacke-dev
    libopenblas-dev
    libpcre2-dev
    libtool
    libutf8proc-dev
    libxxhash-dev
    mandoc
    pkg-config
    python3
    python3-pip
"

if ! command -v apt-get > /dev/null; then
    echo "install-deps.sh: no apt-get here; install the like of:" $packages "$@" >&2
    exit 1
fi
missing=
for package in $packages "$@"; do
    case $(dpkg-query -W -f='${db:Status-Abbrev}' "${package%\?}" 2> /dev/null || :) in
    ?i*) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo > /dev/null; then
        echo "install-deps.sh: neither root nor sudo; as root: apt-get install$missing" >&2
        exit 1
    fi
    as_root=sudo
fi
{
    $as_root apt-get update -q
    install=
    for package in $missing; do
        case $package in
        *\?) apt-cache show "${package%\?}" > /dev/null 2>&1 || continue ;;
        esac
        install="$install ${package%\?}"
    done
    [ -n "$install" ] || exit 0
    echo "Installing$install"
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends $install
} >&2
