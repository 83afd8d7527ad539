#!/bin/sh
# SPDX-License-Identifier: MIT
# The Debian packages in FOLDER, which tests/debian.sh has built, install into a fresh Debian, serve
# a user and a developer there, and leave nothing when they are purged. As root, with network.
#   tests/chroot.sh FOLDER [MIRROR]
# Debian package: debootstrap.
set -eu

folder=$1
mirror=${2:-http://deb.debian.org/debian}
tests=$(cd "$(dirname "$0")" && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

inside() {
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C \
        DEBIAN_FRONTEND=noninteractive "$@"
}

suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
debootstrap --variant=minbase "$suite" "$root" "$mirror"
mkdir -p "$root/srv/tests"
cp "$folder"/*.deb "$tests/../README.md" "$root/srv"
cp "$tests/consumer.sh" "$tests/example.sh" "$root/srv/tests"

# A user has the programs alone.
inside sh -c 'apt-get -qy install --no-install-recommends /srv/puzzlekv_*.deb /srv/libpuzzlekv0_*.deb'
for program in puzzlekv-bench puzzlekv-eval puzzlekv-run; do
    inside $program --version
done
inside puzzlekv-bench storage --shape llama-3.1-8b --tokens 16384 --kv raw --kv puzzle

# A developer has the library, a compiler and pkg-config.
inside sh -c 'apt-get -qy install --no-install-recommends gcc libc6-dev pkg-config \
    /srv/libpuzzlekv-dev_*.deb'
inside sh /srv/tests/consumer.sh

inside apt-get -qy purge puzzlekv libpuzzlekv-dev libpuzzlekv0
left=$(find "$root" -xdev -path "$root/srv" -prune -o -path "$root/var/lib/apt" -prune -o \
    -path "$root/var/cache" -prune -o -iname '*puzzlekv*' -print)
if [ -n "$left" ] || inside dpkg-query -W 'puzzlekv*' 'libpuzzlekv*' 2> /dev/null; then
    echo "chroot.sh: left behind: $left"
    exit 1
fi
echo "installed, used and purged"
