#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the library for aarch64 and runs its suites under qemu-user. The other architecture's
# packages are unpacked in a folder of their own; this system's stay as they are.
#   tests/cross-aarch64.sh [FOLDER]    works in FOLDER, build-aarch64 by default, which can be used
#                                      again
# Debian packages: gcc-aarch64-linux-gnu qemu-user. Exits 77 without them.
set -eu
cd "$(dirname "$0")/.."

host=aarch64-linux-gnu
for program in $host-gcc qemu-aarch64 apt-get; do
    command -v "$program" > /dev/null || {
        echo "cross-aarch64.sh: $program: not found" >&2
        exit 77
    }
done
folder=${1:-build-aarch64}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
sysroot=$folder/sysroot

if [ ! -d "$sysroot" ]; then
    state=$folder/apt
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    : > "$state/status"
    cat > "$state/conf" << END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$state";
Dir::State::lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state/cache";
Debug::NoLocking "1";
END
    export APT_CONFIG="$state/conf"
    apt-get update -q
    apt-get install -q -y --download-only --no-install-recommends \
        check libc6-dev libjansson-dev liblapacke-dev libopenblas-pthread-dev libxxhash-dev
    for package in "$state"/cache/archives/*.deb; do
        dpkg --extract "$package" "$sysroot.new"
    done
    mv "$sysroot.new" "$sysroot"
    rm -r "$state"
fi

# What update-alternatives would do for OpenBLAS.
libraries=/usr/lib/$host
blas=$libraries/openblas-pthread

[ -x configure ] || ./bootstrap
source=$PWD
cd "$folder"
PKG_CONFIG_LIBDIR=$sysroot$libraries/pkgconfig:$sysroot$blas/pkgconfig \
    PKG_CONFIG_SYSROOT_DIR=$sysroot \
    "$source/configure" --host=$host --disable-tools --disable-openmp --disable-static --with-cuda=no \
    CC="$host-gcc --sysroot=$sysroot" LDFLAGS="-Wl,-rpath-link,$sysroot$blas"
make -j"$(nproc)"
make -j"$(nproc)" check TESTS=
# Shell tests would run programs by themselves.
suites=$(find tests -type f -name 'check_*' -perm -u=x | sort | tr '\n' ' ')
# Emulated, OpenBLAS's threads wait for each other in loops longer than they work.
OPENBLAS_NUM_THREADS=1 CK_TIMEOUT_MULTIPLIER=10 make -j"$(nproc)" check TESTS="tests/solver_bits $suites" \
    LOG_COMPILER="qemu-aarch64 -L $sysroot -E LD_LIBRARY_PATH=$blas:$libraries"
