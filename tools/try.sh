#!/bin/sh
# SPDX-License-Identifier: MIT
# From a bare Debian or Ubuntu to an answer: installs what is missing, builds in build/, fetches a
# model of 98 MB and answers one prompt with a dense (raw) and with a factorized (puzzle) KV cache.
#   tools/try.sh [PROMPT]
set -eu
cd "$(dirname "$0")/.."

case ${1-} in
-*)
    echo "usage: tools/try.sh [PROMPT]" >&2
    exit 2
    ;;
esac

# A prompt of several pages: recent ones are kept dense.
prompt=${1:-"$(cat COPYING)

In one sentence: what does this licence let me do?"}

echo "== Packages" >&2
tools/install-deps.sh
echo "== Build, in build/" >&2
tools/build.sh build --with-cuda=no >&2
echo "== Model" >&2
model=$(tools/fetch-model.sh smollm2)

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
for kv in raw puzzle; do
    echo "== Answer with --kv $kv" >&2
    build/puzzlekv-run "$model" -p "$prompt" -n 96 --kv "$kv" --json > "$results/$kv.json"
done

python3 - "$results/raw.json" "$results/puzzle.json" << 'END'
import json
import sys

runs = [json.load(open(path, encoding="utf-8")) for path in sys.argv[1:]]
for run in runs:
    print(f"\n--kv {run['kv']}\n{run['text'].strip()}")
print(f"\n{'':<24}" + "".join(f"{run['kv']:>14}" for run in runs))
for label, key, form in (
    ("prompt tokens", "prompt_tokens", ",d"),
    ("generated tokens", "generated_tokens", ",d"),
    ("KV cache, bytes", "kv_bytes", ",d"),
    ("against dense", "kv_ratio", ".4f"),
    ("decoded tokens per s", "decode_tokens_per_s", ".1f"),
):
    cells = ("-" if run[key] is None else format(run[key], form) for run in runs)
    print(f"{label:<24}" + "".join(f"{cell:>14}" for cell in cells))
END
