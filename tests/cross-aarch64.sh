#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the kernels and the solver for aarch64 and compares the solver's bits under qemu-user. Needs
# neither BLAS nor a test library. Debian packages: gcc-aarch64-linux-gnu libc6-dev-arm64-cross
# qemu-user. Exits 77 where they are missing. Usage: sh tests/cross-aarch64.sh
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
CROSS_CC=${CROSS_CC:-aarch64-linux-gnu-gcc}
QEMU=${QEMU:-qemu-aarch64}

for program in "$CROSS_CC" "$QEMU"; do
    command -v "$program" > /dev/null || {
        echo "cross-aarch64.sh: $program: not found" >&2
        exit 77
    }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo '#define HAVE_NEON_KERNELS 1' > "$work/config.h"
cd "$work"
flags="-std=gnu11 -O3 -Wall -Wextra -Werror -Wno-psabi -iquote $work -iquote $source/cpu -iquote $source/lib"
# shellcheck disable=SC2086
"$CROSS_CC" $flags -ffp-contract=fast -c "$source/cpu/kernels_neon.c"
# shellcheck disable=SC2086
"$CROSS_CC" $flags -ffp-contract=off -c "$source/cpu/kernels_generic.c" \
    "$source/cpu/solver_generic.c" "$source/cpu/solver_neon.c" "$source/cpu/dispatch.c" \
    "$source/lib/message.c" "$source/tests/solver_bits.c"
"$CROSS_CC" -static ./*.o -lm -o solver_bits
"$QEMU" ./solver_bits
