#!/bin/sh
# SPDX-License-Identifier: MIT
# Memory of an 8B model: writes a Llama 3.1 8B with random Q4_0 weights (4.3 GiB, removed afterwards),
# predicts from it and compares the largest resident set with 8 GiB plus the cache. Not a test: it
# takes minutes.
#   tests/bench-8b.sh BUILD-FOLDER [SCRATCH-FOLDER]
set -eu

build=$1
limit=$((8 << 30))
work=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/bench-8b.XXXXXX")
trap 'rm -rf "$work"' EXIT

need_kib=$((5 << 20))
free_kib=$(df -Pk "$work" | awk 'NR == 2 { print $4 }')
if [ "$free_kib" -lt "$need_kib" ]; then
    echo "$work: $free_kib KiB are free, $need_kib are needed" >&2
    exit 1
fi
make -s -C "$build" puzzlekv-eval tests/write_gguf tests/json_get
"$build/tests/write_gguf" "$work/8b.gguf" Q4_0 32 4096 14336 32 8 128256
ls -l "$work/8b.gguf"

# 96 tokens in one step, then three alone.
awk 'BEGIN { for (i = 0; i < 100; i++) printf "%s%d", i ? "," : "[", i * 1237 % 128256; print "]" }' \
    > "$work/tokens.json"
start=$(date +%s)
peak=$(python3 -c '
import resource, subprocess, sys
with open(sys.argv[1], "w") as output:
    subprocess.run(sys.argv[2:], stdout=output, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
' "$work/logits.json" "$build/puzzlekv-eval" logits "$work/8b.gguf" --tokens "$work/tokens.json" \
    --prefill 96 --kv puzzle -o "$work/logits.f32" --json)
seconds=$(($(date +%s) - start))
cache=$("$build/tests/json_get" "$work/logits.json" results.0.kv_bytes)
echo "$seconds s; resident set $peak bytes, limit $limit + $cache of cache"
[ "$peak" -le $((limit + cache)) ]
