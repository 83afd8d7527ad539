#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-bench from the command line: refusals, bytes, and the form of what it measures. No time
# is judged.
set -u

tool=puzzlekv-bench
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"

# ---- Help and manual ----------------------------------------------------------------------------

puzzlekv-bench --help > "$work/help" || fail "--help: status $?"
puzzlekv-bench storage --help > "$work/storage_help" || fail "storage --help: status $?"
puzzlekv-bench --version > "$work/version" || fail "--version: status $?"
grep -q '^instruction set: [a-z]' "$work/version" || fail "--version: $(cat "$work/version")"
grep -q -e '--tokens' "$work/storage_help" || fail 'storage --help: no --tokens'
compare_options 8
for command in storage attention factorize model; do
    compare_synopsis $command
done

# ---- What the command line shows to be wrong ----------------------------------------------------

refuse 2 'COMMAND: is missing; there are: storage, attention, factorize, model'
refuse 2 'bogus: unknown command; there are: storage, attention, factorize, model' bogus
refuse 2 'extra: unexpected argument' storage --shape qwen3-8b --tokens 9 extra
refuse 2 'is not one of llama-3.1-8b, qwen3-8b, smollm2-135m' storage --shape gpt-5 --tokens 9
refuse 2 '--shape NAME: is missing' storage --tokens 9
refuse 2 '--tokens N: is missing' storage --shape qwen3-8b
refuse 2 'is not a whole number' storage --shape qwen3-8b --tokens 0
refuse 2 'unknown key "foo"' storage --shape qwen3-8b --tokens 9 --kv puzzle:foo=1
refuse 2 'must be 1 to 64' storage --shape smollm2-135m --tokens 9 --kv puzzle:page=128,rk=65
refuse 2 'give one or the other' storage --shape qwen3-8b --tokens 9 --json --csv
refuse 2 'is not one of bf16, f16, f32' storage --shape qwen3-8b --tokens 9 --dtype int8

# ---- storage ------------------------------------------------------------------------------------

document storage storage --shape llama-3.1-8b --tokens 16384 --kv raw --kv puzzle --kv static --kv puzzle-int4
same 'keys of storage' "$(keys storage)" 'isa cpu threads dtype shape tokens results '
same 'dense bytes' "$(value storage results.0.bytes)" $((32 * 8 * 16384 * 2 * 128 * 2))
same 'dense bytes again' "$(value storage results.1.bytes_raw)" "$(value storage results.0.bytes)"
same 'stored bytes' "$(value storage results.1.bytes)" \
    $((32 * 8 * 2 * (2 * 2 * 32 * 128 + 510 * 30 * 160)))
same 'dense ratio' "$(value storage results.0.kv_ratio)" 1.0
same 'the static buffer' "$(value storage results.2.bytes)" "$(value storage results.0.bytes)"
same ratio "$(value storage results.1.kv_ratio | cut -c 1-7)" 0.58755
same 'ratio of INT4' "$(value storage results.3.kv_ratio | cut -c 1-7)" 0.18678
same 'as typed' "$(value storage results.1.kv)" puzzle
same canonical "$(value storage results.1.kv_canonical)" \
    puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=post
# An incomplete page is counted by tokens.
document tail storage --shape smollm2-135m --tokens 101 --dtype f32 --kv puzzle:ratio=0.586
same 'bytes with a tail' "$(value tail results.0.bytes)" \
    $((30 * 3 * 4 * (2 * 64 * (101 - 32) + 25 * 96)))
puzzlekv-bench storage --shape qwen3-8b --tokens 16384 > "$work/table" || fail "storage: status $?"
grep -q '^puzzle .* 0\.58755$' "$work/table" || fail "storage: $(cat "$work/table")"
puzzlekv-bench storage --shape qwen3-8b --tokens 96 --csv --kv raw:page=32 --kv puzzle:rk=2,rv=1 \
    > "$work/csv" || fail "storage --csv: status $?"
same 'lines of CSV' "$(wc -l < "$work/csv")" 3
same 'names in CSV' "$(head -n 1 "$work/csv")" \
    isa,cpu,threads,dtype,shape,tokens,kv,bytes,bytes_raw,kv_ratio
grep -q ',qwen3-8b,96,"puzzle:rk=2,rv=1",[0-9]*,14155776,0\.[0-9]*$' "$work/csv" ||
    fail "storage --csv: $(cat "$work/csv")"

# ---- attention ----------------------------------------------------------------------------------

refuse 2 'is not a whole number' attention --shape qwen3-8b --tokens 9 --batch 0
refuse 2 'is not a whole number' attention --shape qwen3-8b --tokens 9 --repeats 0
refuse 2 "attention takes the library's own" attention --shape qwen3-8b --tokens 9 --kv static
refuse 2 "attention takes the library's own" attention --shape qwen3-8b --tokens 9 \
    --kv puzzle:rope=pre
refuse 1 'memory: this takes' attention --shape qwen3-8b --tokens 2000000000
document attention attention --shape smollm2-135m --tokens 101 --batch 2 --repeats 2 -t 1 \
    --kv puzzle --kv raw:page=16
same 'keys of attention' "$(keys attention)" \
    'isa cpu threads dtype shape tokens batch repeats read_gb_per_s results '
same 'threads' "$(value attention threads)" 1
same 'bytes a token and layer' "$(value attention results.0.bytes_per_token_layer) \
$(value attention results.1.bytes_per_token_layer)" \
    "$((3 * 2 * (2 * 64 * (101 - 32) + 30 * 96))) $((3 * 2 * 2 * 64 * 101))"
same 'first speedup' "$(value attention results.0.speedup)" 1.0
for key in read_gb_per_s results.0.ns_per_token_layer results.1.ns_low results.1.ns_high \
    results.1.read_bandwidth_share results.1.speedup; do
    awk "BEGIN { exit !($(value attention $key) > 0) }" ||
        fail "$key: $(value attention $key)"
done
# A step of more tokens than those that fill the caches.
document batch attention --shape smollm2-135m --tokens 1 --batch 4096 --repeats 1 -t 1 \
    --kv raw:page=8
same 'bytes of a large batch' "$(value batch results.0.bytes_per_token_layer)" $((3 * 2 * 2 * 64))

# ---- factorize ----------------------------------------------------------------------------------

refuse 2 '--pages N: is missing' factorize --shape qwen3-8b
refuse 2 'is not one of batched, lapack, ssyevd, ssyevr, cusolver' factorize --shape qwen3-8b --pages 9 --solver ql
refuse 2 '--solver cusolver: takes --backend cuda' factorize --shape qwen3-8b --pages 9 --solver cusolver
refuse 2 '--kv: unknown' factorize --shape qwen3-8b --pages 9 --kv raw
# All caches are open at the same time: two may be too much where one is not.
refuse 1 'memory: this takes' factorize --shape qwen3-8b --pages 2000000000 --solver batched
pages=$(sed -n 's/.*takes \(.*\) GiB; \(.*\) GiB are free$/\2 \1/p' "$work/err" |
    awk '{ printf "%.0f", 0.6 * 2000000000 * $1 / $2 }')
timeout 30 puzzlekv-bench factorize --shape qwen3-8b --pages "$pages" --solver batched \
    --solver lapack > "$work/out" 2> "$work/err"
same 'status of too much memory' $? 1
grep -q 'memory: this takes' "$work/err" || fail "factorize --pages $pages: $(cat "$work/err")"
# OpenBLAS waits for ever for address space that it cannot have.
# shellcheck disable=SC3045 # every shell that is /bin/sh somewhere has ulimit -v
if (ulimit -v 16000000 && puzzlekv-bench --version) > "$work/out" 2>&1; then
    # shellcheck disable=SC3045
    (ulimit -v 1000000 && exec timeout 60 puzzlekv-bench factorize --shape smollm2-135m --pages 1 \
        --solver ssyevd -t 64) > "$work/out" 2> "$work/err"
    same 'status of too little address space' $? 1
    grep -q '^puzzlekv-bench: .*address space' "$work/err" ||
        fail "too little address space: $(cat "$work/err")"
fi
document factorize factorize --shape smollm2-135m --pages 7 --repeats 2 -t 1
same 'keys of factorize' "$(keys factorize)" \
    'isa cpu threads dtype shape pages repeats results '
same 'pages of all heads' "$(value factorize pages)" 12
same 'solvers' "$(value factorize results.0.solver) $(value factorize results.1.solver) \
$(value factorize results.2.solver) $(value factorize results.3.solver)" \
    'batched lapack ssyevd ssyevr'
for i in 0 1 2 3; do
    # Within the bound on every solver.
    awk "BEGIN { e = $(value factorize results.$i.excess_error); exit !(e < 1e-6 && e > -1e-6) }" ||
        fail "excess_error: $(value factorize results.$i.excess_error)"
    awk "BEGIN { exit !($(value factorize results.$i.us_per_page) > 0) }" ||
        fail "us_per_page: $(value factorize results.$i.us_per_page)"
done
same 'only solver' "$(puzzlekv-bench factorize --shape qwen3-8b --pages 1 --solver ssyevr \
    --repeats 1 -t 1 --csv | tail -n 1 | sed 's/.*qwen3-8b,16,1,ssyevr,.*,/ssyevr /')" 'ssyevr 1'

# ---- model --------------------------------------------------------------------------------------

tiny=${PUZZLEKV_TEST_DATA:?}/tiny-llama3
refuse 2 'MODEL: is missing' model --prompt-tokens 9 --predict 2
refuse 2 "$tiny: unexpected argument" model "$tiny" --shape qwen3-8b --prompt-tokens 9 --predict 2
refuse 2 'unexpected argument' model "$tiny" other --prompt-tokens 9 --predict 2
refuse 2 '--prompt-tokens N: is missing' model "$tiny" --predict 2
refuse 2 '--predict M: is missing' model "$tiny" --prompt-tokens 9
refuse 1 'No such file' model "$work/none.gguf" --prompt-tokens 9 --predict 2
refuse 1 "the model's context is" model "$tiny" --prompt-tokens 2000000000 --predict 2
refuse 1 "the model's context is 40960" model --shape qwen3-8b --prompt-tokens 2000000000 --predict 2
# shellcheck disable=SC2046 # a thousand caches
refuse 1 'memory: this takes' model --shape qwen3-8b --prompt-tokens 40000 --predict 2 \
    $(yes -- --kv raw | head -n 1000)
# 1000 caches of 131,072 bytes a token, and 7.9 GiB of weights; once more those that are laid out anew.
# shellcheck disable=SC2046
refuse 1 'memory: this takes' model --shape llama-3.1-8b --prompt-tokens 32768 --predict 1 \
    $(yes -- --kv raw | head -n 1000)
most=4009
if grep -q 'define HAVE_AVX512VNNI_KERNELS 1' "$PUZZLEKV_BUILD/config.h" &&
    grep -q avx512_vnni /proc/cpuinfo && grep -q '^instruction set: avx512' "$work/version"; then
    most=4017
fi
same 'GiB of a model' "$(sed -n 's/.*takes \(.*\)\.[0-9]* GiB; .*/\1/p' "$work/err")" $most
mkdir "$work/wide"
sed 's/\("max_position_embeddings": \)[0-9]*/\12000000000/' "$tiny/config.json" \
    > "$work/wide/config.json"
cp "$tiny/model.safetensors" "$work/wide"
refuse 1 'memory: this takes' model "$work/wide" --prompt-tokens 1999999000 --predict 2
document model model "$tiny" --prompt-tokens 150 --predict 11 --repeats 2 -t 1 \
    --kv puzzle --kv raw --kv static
same 'keys of model' "$(keys model)" \
    'isa cpu threads dtype model depth prompt_tokens predict repeats results '
same 'first ratios' "$(value model results.0.ttft_ratio) $(value model results.0.tpot_ratio)" \
    '1.0 1.0'
# The last token is not fed: 160 are 5 pages, of which 3 are factorized.
awk "BEGIN { r = $(value model results.0.kv_ratio) / ((2 * 2 * 32 * 64 + 3 * 30 * 96) / (160 * 128)); \
    exit !(r > 0.999999 && r < 1.000001) }" || fail "kv_ratio: $(value model results.0.kv_ratio)"
same 'dense ratios' "$(value model results.1.kv_ratio) $(value model results.2.kv_ratio)" '1.0 1.0'
for key in results.0.ttft_s results.0.tpot_s results.0.factorize_s results.1.ttft_low \
    results.2.tpot_high results.2.tpot_ratio; do
    awk "BEGIN { exit !($(value model $key) > 0) }" || fail "$key: $(value model $key)"
done
document shape model --shape smollm2-135m --prompt-tokens 8 --predict 1 --repeats 1 --kv raw
same 'keys of model --shape' "$(keys shape)" \
    'isa cpu threads dtype shape depth prompt_tokens predict repeats results '
same 'time of no further token' "$(value shape results.0.tpot_s)" null

# Behind 151 random tokens 5 are fed, then 2: 158 are 4 pages, of which 2 are factorized, and a tail.
document depth model "$tiny" --depth 151 --prompt-tokens 5 --predict 3 --repeats 2 -t 1 --kv puzzle
awk "BEGIN { r = $(value depth results.0.kv_ratio) / (((158 - 64) * 128 + 2 * 30 * 96) / (158 * 128)); \
    exit !(r > 0.999999 && r < 1.000001) }" || fail "kv_ratio: $(value depth results.0.kv_ratio)"
refuse 2 '--depth, --kv static: only raw, puzzle' model "$tiny" --depth 9 --prompt-tokens 9 \
    --predict 2 --kv static
refuse 1 "the model's context is" model "$tiny" --depth 2000000000 --prompt-tokens 9 --predict 2

# ---- Ctrl-C --------------------------------------------------------------------------------------

puzzlekv-bench attention --shape llama-3.1-8b --tokens 1024 --repeats 100000 > "$work/out" \
    2> "$work/err" &
wait_ready $! /nonexistent
kill -INT $!
wait $!
same 'status after Ctrl-C' $? 130
same 'text after Ctrl-C' "$(cat "$work/out" "$work/err")" 'puzzlekv-bench: interrupted'

[ $failures -eq 0 ]
