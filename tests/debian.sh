#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the Debian packages of the files that git knows of, without network where it may cut that
# off, and lets lintian look at them. Without --check the package's own tests do not run.
#   tests/debian.sh [--check] [--twice] FOLDER    the packages go to FOLDER; with --twice they are
#                                                 built again elsewhere and must be the same bytes
# Debian packages: those of debian/control, debhelper, dpkg-dev, lintian.
set -eu

options=nocheck
twice=0
while [ $# -gt 1 ]; do
    case $1 in
    --check) options= ;;
    --twice) twice=1 ;;
    *) break ;;
    esac
    shift
done
[ $# -eq 1 ] || {
    echo "usage: tests/debian.sh [--check] [--twice] FOLDER" >&2
    exit 2
}
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

offline=
if unshare -n true 2> /dev/null; then
    offline="unshare -n"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git ls-files -z | tar --create --null --files-from=- --file="$scratch/source.tar"

# build FOLDER: the packages come to lie in it.
build() {
    rm -rf "$1/puzzlekv"
    mkdir -p "$1/puzzlekv"
    tar --extract --file="$scratch/source.tar" --directory="$1/puzzlekv"
    # shellcheck disable=SC2086
    (cd "$1/puzzlekv" && DEB_BUILD_OPTIONS="$options parallel=$(nproc)" \
        $offline dpkg-buildpackage -us -uc) > "$1/log" 2>&1 || {
        tail -n 50 "$1/log"
        exit 1
    }
    rm -r "$1/puzzlekv"
}

build "$folder"
lintian --display-info --pedantic --fail-on error,warning,info,pedantic "$folder"/*.changes
[ $twice -eq 1 ] || exit 0

mkdir "$scratch/again"
export LC_ALL=C TZ=Pacific/Kiritimati
build "$scratch/again"
for package in "$folder"/*.deb; do
    cmp "$package" "$scratch/again/$(basename "$package")"
done
echo "$(find "$folder" -name '*.deb' | wc -l) packages, the same when built twice"
