#!/bin/sh
# SPDX-License-Identifier: MIT
# What gpu-check.sh writes, from a run that needs no GPU, and from one that fails.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder="$work/a folder"
json_get=${PUZZLEKV_BUILD:?}/tests/json_get
script=${PUZZLEKV_SOURCE:?}/tests/gpu-check.sh
PUZZLEKV_GPU_CHECK=host
export PUZZLEKV_GPU_CHECK

same() {
    value=$("$json_get" "$folder/$1" "$2")
    [ "$value" = "$3" ] || {
        echo "FAIL: $1: $2 is $value, not $3"
        exit 1
    }
}

"$script" "$folder" test >"$work/out"
cmp "$work/out" "$folder/test.json"
same test.json graph.tokens 60
same test.json model.graph_tokens 40
same test.json memcheck 'not run'
[ ! -e "$folder/gpu-check.json" ]

"$script" "$folder" measure >"$work/out"
for i in 0 1 2 3 4 5; do
    same measure.json "decode.$i.batch" $((1 + i / 3))
done
same measure.json decode.5.kv puzzle-int4
same measure.json factorize.pages 16
same measure.json model.decode.1.depth 200
same gpu-check.json test.graph.tokens 60
same gpu-check.json measure.model.shape small

# Instead of what came out before.
mkdir "$work/bin"
printf '#!/bin/sh\necho begun\necho "no \\"device\\"" >&2\nexit 3\n' >"$work/bin/timeout"
chmod +x "$work/bin/timeout"
if PATH=$work/bin:$PATH "$script" "$folder" measure >"$work/out" 2>&1; then
    echo 'FAIL: what fails is no failure'
    exit 1
fi
same measure.json failed 'no device'
[ "$(cat "$folder/measure.partial")" = begun ]
[ ! -e "$folder/gpu-check.json" ]
