#!/bin/sh
# SPDX-License-Identifier: MIT
# What the compiler made of the tuned kernels, for each architecture that the module is built for:
# everything in registers, by ptxas's report; tensor cores and loads of 16 bytes, by the code for
# sm_90, where cuobjdump and nvdisasm are there (PyPI: nvidia-cuda-cuobjdump,
# nvidia-cuda-nvdisasm).
set -eu

cd "${PUZZLEKV_BUILD:?}/gpu"
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# One line a kernel: its name, the architecture, bytes of stack and of spills, registers.
report() {
    awk '/Compiling entry function/ { split($0, q, "\047"); name = q[2]; arch = q[4] }
         /bytes stack frame/ { stack = $1; spilled = $5 + $9 }
         /Used [0-9]+ registers/ { sub(/.*Used /, ""); print name, arch, stack, spilled, $1 }' "$1"
}

# FILE KERNELS COUNT: that many instances for every architecture, none of which uses memory of its
# own.
check_registers() {
    report "$1" | grep -E "$2" >report.tmp || true
    for arch in ${NVCC_ARCHITECTURES:?}; do
        found=$(awk -v arch="$arch" '$2 == arch' report.tmp | wc -l)
        [ "$found" -eq "$3" ] || fail "$1 has $found kernels $2 for $arch, not $3"
    done
    awk '$3 + $4 > 0' report.tmp >spilled.tmp
    [ ! -s spilled.tmp ] || fail "kernels with a stack or spills (name, architecture, stack, spills," \
        "registers): $(cat spilled.tmp)"
    awk '{ if (most[$2] < $5) most[$2] = $5 }
         END { for (arch in most) print arch ": " most[arch] " registers at most" }' report.tmp | sort
    rm -f report.tmp spilled.tmp
}

check_registers decode.ptxas attend_decode 16
check_registers prefill.ptxas attend_prompt 4
check_registers factorize.ptxas 'tridiagonalise_pages|diagonalise_pages|make_factors' 3

if ! command -v cuobjdump >/dev/null || ! command -v nvdisasm >/dev/null; then
    echo "SKIP: no cuobjdump or nvdisasm: the code itself is not looked at"
elif ! echo "$NVCC_ARCHITECTURES" | grep -qw sm_90; then
    echo "SKIP: not built for sm_90: the code itself is not looked at"
else
    # HMMA, LDG.E.128, LDSM and LDGSTS of 16 bytes, and local memory.
    count() {
        cuobjdump -sass -arch sm_90 "$1" |
            awk '/Function :/ { name = $3 }
                 / HMMA[.]16816[.]F32/ { products[name]++ }
                 / LDG[.]E[.]128/ { loads[name]++ }
                 / LDSM[.]16[.]M(T)?88/ { matrices[name]++ }
                 / LDGSTS[.]E[.]BYPASS[.].*128/ { copies[name]++ }
                 / (LDL|STL)/ { local[name]++ }
                 END { for (name in products) print name, products[name], loads[name] + 0,
                           matrices[name] + 0, copies[name] + 0, local[name] + 0 }' | sort
    }

    # Of K and V of a dense page of d 64 there are 8 + 8 loads, and 4 + 2 and more of factors; two
    # products of each.
    count decode.nvo >kernels.tmp
    cat kernels.tmp
    [ "$(wc -l <kernels.tmp)" -eq 16 ] || fail "not every kernel of decode.cu has HMMA"
    awk '$2 < 32 + 24 || $3 < 16 + 5 || $6 > 0' kernels.tmp >few.tmp
    [ ! -s few.tmp ] || fail "few HMMA or LDG.E.128, or local memory: $(cat few.tmp)"
    # Of a tile of d 64 and its 32 rows 64 products and 24 loads of matrices for new tokens, the
    # same products for a page.
    count prefill.nvo >kernels.tmp
    cat kernels.tmp
    [ "$(wc -l <kernels.tmp)" -eq 4 ] || fail "not every kernel of prefill.cu has HMMA"
    awk '$2 < 128 || $4 < 24 || $5 < 2 || $6 > 0' kernels.tmp >few.tmp
    [ ! -s few.tmp ] || fail "few HMMA, LDSM or LDGSTS, or local memory: $(cat few.tmp)"
    rm -f kernels.tmp few.tmp
fi

echo "$failures failures"
[ $failures -eq 0 ]
