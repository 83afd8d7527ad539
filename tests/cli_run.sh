#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-run from the command line: refusals without a model, then answers with the real one.
set -u

tool=puzzlekv-run
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"

# answer NAME ARGUMENT...: the model's answer as a document.
answer() {
    name=$1
    shift
    document "$name" "$model" "$@"
}

# ---- Help and manual ----------------------------------------------------------------------------

puzzlekv-run --help > "$work/help" || fail "--help: status $?"
puzzlekv-run --version > "$work/version" || fail "--version: status $?"
for line in 'puzzlekv-run [0-9]' 'instruction set: [a-z]' 'backends: cpu' 'BLAS: OpenBLAS'; do
    grep -q "^$line" "$work/version" || fail "--version: no line \"$line\""
done
compare_options 20
compare_synopsis ''

# Where OpenBLAS takes the processor for an old one, as it does here when told, it says what to set.
if grep -qw avx2 /proc/cpuinfo && grep -q '^BLAS: .* DYNAMIC_ARCH' "$work/version"; then
    OPENBLAS_CORETYPE=Nehalem puzzlekv-run --version > "$work/old" || fail "--version: status $?"
    core_type=$(sed -n 's/^hint: .* Nehalem; set OPENBLAS_CORETYPE=//p' "$work/old")
    [ -n "$core_type" ] || fail "--version: no hint: $(cat "$work/old")"
    OPENBLAS_CORETYPE=$core_type puzzlekv-run --version > "$work/new" || fail "--version: status $?"
    grep -q "^BLAS: .* $core_type " "$work/new" || fail "--version: BLAS is not $core_type"
    ! grep '^hint: ' "$work/new" || fail "--version: a hint with $core_type"
fi

# Every policy and every key is in the manual, and nothing else.
sed -n '/^Policies/,$p' "$work/help" | sed 1,2d > "$work/help_policies"
{
    sed -nE 's/^  ([a-z0-9-]+) .*/\1/p' "$work/help_policies"
    sed -nE 's/^    //p' "$work/help_policies" | tr ',' '\n' | sed -nE 's/^ *([a-z]+)=.*/\1/p'
} | sort -u > "$work/help_names"
sed -n '/^\.Sh CACHE POLICIES/,/^\.Sh JSON/p' "$source/man/puzzlekv-run.1" |
    sed -n 's/^\.It Cm //p' | sed 's/ , Cm /\n/g' | sed 's/ .*//' | sort -u > "$work/man_names"
grep -q '^static$' "$work/help_names" || fail '--help: no policy static'
diff "$work/help_names" "$work/man_names" || fail '--help and the manual list other policies'

# ---- What the command line shows to be wrong ----------------------------------------------------

refuse 2 'MODEL: is missing'
refuse 2 'the prompt is missing' model.gguf
refuse 2 'give one or the other' model.gguf -p text -f file
refuse 2 '-i, --json: a chat is not one JSON document' model.gguf -i --json
refuse 2 '-i, -f -: both would read standard input' model.gguf -i -f -
refuse 2 '-p: the prompt is empty' model.gguf -p ''
refuse 2 '-p: not valid UTF-8 at byte offset 3' model.gguf -p "abc$(printf '\377')d"
refuse 2 '--system: not valid UTF-8' model.gguf -p x --system "$(printf '\300\200')"
refuse 2 '--stop: not valid UTF-8' model.gguf -p x --stop "$(printf '\355\240\200')"
refuse 2 'MODEL: the name is empty' '' -p x
refuse 2 '--file: the name is empty' model.gguf -f ''
refuse 2 'unexpected argument' model.gguf other.gguf -p x
refuse 2 '--bogus: unknown' model.gguf -p x --bogus
refuse 2 '-x: unknown option' model.gguf -p x -x
refuse 2 '--kv: SPEC is missing' model.gguf -p x --kv
refuse 2 '--prompt: TEXT is missing' model.gguf -p
refuse 2 '--json: takes no argument' model.gguf -p x --json=yes
refuse 2 'is not a whole number' model.gguf -p x -n 0
refuse 2 'is not a whole number' model.gguf -p x -n 12x
refuse 2 'is not a whole number' model.gguf -p x -n 99999999999999999999
refuse 2 'is not a whole number' model.gguf -p x -t 0
refuse 2 'is not a whole number' model.gguf -p x --ctx -5
refuse 2 'is not a whole number' model.gguf -p x --seed 1.5
refuse 2 'is not a number' model.gguf -p x --temp hot
refuse 2 'is not a number' model.gguf -p x --temp nan
refuse 2 'is not a number' model.gguf -p x --temp -1
refuse 2 'is not a number' model.gguf -p x --top-p 0
refuse 2 'is not a number' model.gguf -p x --top-p 1.1
refuse 2 'is not a number' model.gguf -p x --min-p 1
refuse 2 'is not a number' model.gguf -p x --repeat-penalty 0
refuse 2 'is not one of bf16, f16, f32' model.gguf -p x --dtype f64
refuse 2 'is not one of auto, cpu, cuda' model.gguf -p x --backend gpu
refuse 2 '--backend cuda, --kv h2o: only raw, puzzle' model.gguf -p x --backend cuda --kv h2o
refuse 2 '--chat, --raw-prompt' model.gguf -p x --chat --raw-prompt
refuse 2 '--system: a raw prompt' model.gguf -p x --raw-prompt --system y
refuse 2 '--stop: the text is empty' model.gguf -p x --stop ''
refuse 2 '--kv: given twice' model.gguf -p x --kv raw --kv puzzle
refuse 2 'unknown key "foo"' model.gguf -p x --kv puzzle:foo=1
refuse 2 'not a multiple of 8' model.gguf -p x --kv puzzle:page=33
refuse 2 'unknown policy; there are: puzzle, puzzle-int4, raw' model.gguf -p x --kv nonesuch
refuse 2 'ratio stands for rk and rv' model.gguf -p x --kv puzzle:ratio=0.5,rk=4

# ---- What only a look at files and machine shows ------------------------------------------------

: > "$work/empty"
printf 'abc\n\303(' > "$work/latin"
mkfifo "$work/fifo"
PUZZLEKV_MODULES="$work" refuse 1 "--backend cuda: there is no $work/puzzlekv-runner-cuda.so, which" \
    model.gguf -p x --backend cuda
refuse 1 'No such file' "$work/none.gguf" -p x
refuse 1 'none.txt: No such file' model.gguf -f "$work/none.txt"
refuse 1 'empty: the prompt is empty' model.gguf -f "$work/empty"
refuse 1 'standard input: the prompt is empty' model.gguf -f -
refuse 1 'latin: not valid UTF-8 at byte offset 4' model.gguf -f "$work/latin"
refuse 1 'not a regular file' model.gguf -f "$work"
refuse 1 'not a regular file' model.gguf -f "$work/fifo"
refuse 1 'not a regular file' model.gguf -f /dev/zero
refuse 1 "$work" "$work/empty" -p x
long=$(printf '%04000d' 0)
refuse 1 "$long: File name too long" "$long" -p x
refuse 1 'tokenizer' "$source/tests/data/tiny-llama3" -p x
PUZZLEKV_ISA=abacus puzzlekv-run --version > "$work/out" 2> "$work/err" &&
    fail 'PUZZLEKV_ISA=abacus is accepted'
grep -q abacus "$work/err" || fail "PUZZLEKV_ISA=abacus: $(cat "$work/err")"
if [ -e /dev/full ]; then
    puzzlekv-run --help > /dev/full 2> "$work/err"
    same 'status with a full device' $? 1
    grep -q 'standard output: ' "$work/err" || fail "a full device: $(cat "$work/err")"
fi

need_model

# ---- Answers ------------------------------------------------------------------------------------

answer france --raw-prompt -p 'The capital of France is' -n 6
case $(value france text) in
' Paris'*) ;;
*) fail "the capital of France is $(value france text)" ;;
esac
same 'keys' "$(keys france)" "model backend isa threads kv kv_canonical page_tokens rank_k \
rank_v prompt_tokens reused_tokens generated_tokens text token_ids finish_reason ttft_s tpot_s \
prefill_tokens_per_s decode_tokens_per_s kv_bytes kv_bytes_raw kv_ratio kv_reserved_bytes \
kv_peak_bytes factorize_s peak_rss_bytes "
same kv "$(value france kv)" puzzle
same kv_canonical "$(value france kv_canonical)" \
    puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=post
same prompt_tokens "$(value france prompt_tokens)" 5
same generated_tokens "$(value france generated_tokens)" 6
same finish_reason "$(value france finish_reason)" length
same kv_bytes "$(value france kv_bytes)" $((10 * 30 * 3 * 2 * 64 * 2))

# INT4 factors, once pages are behind the window.
answer int4 --raw-prompt -f "$source/COPYING" -n 2 --kv puzzle-int4
tokens=$(($(value int4 prompt_tokens) + 1))
pages=$((tokens / 32 - 2))
[ $pages -gt 0 ] || fail "COPYING has $tokens tokens"
same 'kv of INT4' "$(value int4 kv) $(value int4 kv_canonical)" \
    'puzzle-int4 puzzle-int4:page=32,rk=16,rv=14,sink=1,window=1,factors=int4,rope=post'
same 'kv_bytes of INT4' "$(value int4 kv_bytes)" $((30 * 3 * (2 * 2 * 64 * (tokens - 32 * pages) + \
    pages * (30 * 96 / 2 + 2 * (16 + 64 + 32 + 64)))))

# Every policy answers a prompt, which it attends exactly, and holds a conversation.
puzzlekv-eval calibrate "$model" "$source/COPYING" --sequences 1 --length 40 \
    -o "$work/calibration" || fail "calibrate: status $?"
for kv in $(sed -nE 's/^  ([a-z0-9-]+) .*/\1/p' "$work/help_policies") puzzle:rope=pre; do
    case $kv in
    palu) kv="palu:calibration=$work/calibration,ratio=1,ranks=uniform" ;;
    ojakv) kv="ojakv:calibration=$work/calibration" ;;
    esac
    answer kv --raw-prompt -p 'The capital of France is' -n 3 --kv "$kv"
    same "the first token with $kv" "$(value kv token_ids.0)" "$(value france token_ids.0)"
    same "the name of $kv" "$(value kv kv_canonical | cut -d : -f 1)" "${kv%%:*}"
    [ "$(value kv kv_bytes)" -gt 0 ] || fail "$kv: $(value kv kv_bytes) bytes"
    printf 'Hello\nAnd you?\n' |
        puzzlekv-run "$model" -i -n 4 --ctx 256 --kv "$kv" > "$work/text" 2> "$work/err" ||
        fail "-i --kv $kv: status $?: $(cat "$work/err")"
    same "answers with $kv" "$(wc -l < "$work/text")" 2
done

# Streamed, the text is the same; the statistics are apart from it.
puzzlekv-run "$model" --raw-prompt -p 'The capital of France is' -n 6 --stats > "$work/text" \
    2> "$work/stats" < /dev/null || fail "--stats: status $?"
same 'streamed text' "$(cat "$work/text")" "$(value france text)"
for row in 'prompt tokens' 'generated tokens' TTFT TPOT 'KV bytes raw' 'KV bytes stored' \
    'KV bytes reserved' ratio 'factorize time' pages; do
    grep -q "^  $row  *[0-9]" "$work/stats" || fail "--stats: no row \"$row\""
done
grep -q '^  backend  *cpu, [a-z]' "$work/stats" || fail "--stats: $(grep backend "$work/stats")"
grep -q '^  pages  *1 filling, 0 sink, 0 window, 0 factorized$' "$work/stats" ||
    fail "--stats: $(grep pages "$work/stats")"

# A prompt of several pages: the same ids for any number of threads, and bytes in closed form.
for threads in 1 2 5; do
    answer "t$threads" --raw-prompt -f "$source/COPYING" -n 24 -t $threads
    same "token ids with -t $threads" "$(value "t$threads" token_ids)" "$(value t1 token_ids)"
done
same threads "$(value t5 threads)" 5
answer raw --raw-prompt -f "$source/COPYING" -n 24 --kv raw
tokens=$(($(value t1 prompt_tokens) + $(value t1 generated_tokens) - 1))
pages=$((tokens / 32))
same 'stored bytes' "$(value t1 kv_bytes)" \
    $((30 * 3 * 2 * (2 * 2 * 32 * 64 + (pages - 2) * 30 * 96 + tokens % 32 * 2 * 64)))
tokens=$(($(value raw prompt_tokens) + $(value raw generated_tokens) - 1))
same 'dense bytes' "$(value raw kv_bytes)" $((30 * 3 * 2 * tokens * 2 * 64))
same 'dense ratio' "$(value raw kv_ratio)" 1.0
same 'dense ranks' "$(value raw rank_k) $(value raw rank_v)" 'null null'
[ "$pages" -ge 5 ] || fail "the prompt has only $pages pages"
answer room_puzzle -p hi -n 1 --ctx 4096
answer room_raw -p hi -n 1 --ctx 4096 --kv raw
[ "$(value room_puzzle kv_reserved_bytes)" -lt $(($(value room_raw kv_reserved_bytes) * 3 / 4)) ] ||
    fail "puzzle reserves $(value room_puzzle kv_reserved_bytes) bytes for 4096 tokens"

# Formats. Special tokens count as one in a raw prompt, and as text in a chat.
answer raw_special --raw-prompt -p '<|im_start|>' -n 1
same 'a special token' "$(value raw_special prompt_tokens)" 1
answer chat -p 'hi' -n 1
answer chat_special -p '<|im_start|>' -n 1
[ "$(value chat_special prompt_tokens)" -gt "$(value chat prompt_tokens)" ] ||
    fail 'a special token is parsed out of a chat'
answer system -p 'hi' --system 'Answer in French, and be as brief as you can be.' -n 1 --chat
[ "$(value system prompt_tokens)" -ne "$(value chat prompt_tokens)" ] ||
    fail '--system changes nothing'
printf hi | puzzlekv-run "$model" -f - -n 1 --json > "$work/stdin.json" || fail "-f -: status $?"
same 'standard input' "$(value stdin token_ids)" "$(value chat token_ids)"

# The end: a stop text (also across tokens) is not part of the answer, nor is anything after it.
answer count --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 30
answer stop --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 30 --stop 'no such text' --stop ', 9'
same 'the count' "$(value count text | head -c 12)" ' 7, 8, 9, 10'
same 'text before a stop text' "$(value stop text)" ' 7, 8'
same 'finish_reason at a stop text' "$(value stop finish_reason)" stop
same 'streamed text before a stop text' "$(puzzlekv-run "$model" --raw-prompt \
    -p '1, 2, 3, 4, 5, 6,' -n 30 --stop ', 9')" ' 7, 8'
answer one -p 'Say yes.' -n 200
same 'finish_reason of a whole answer' "$(value one finish_reason)" stop

# Sampling is reproducible and depends on the seed.
set -- --raw-prompt -p 'Once upon a time' -n 12 --temp 1 --top-k 50 --top-p 0.95 --min-p 0.01 \
    --repeat-penalty 1.1
answer seed1 "$@" --seed 1
answer seed1again "$@" --seed 1
answer seed2 "$@" --seed 2
same 'ids of one seed' "$(value seed1again token_ids)" "$(value seed1 token_ids)"
[ "$(value seed1 token_ids)" != "$(value seed2 token_ids)" ] || fail '--seed changes nothing'

# Storage types, and room for a few tokens only.
answer f32 --raw-prompt -p 'The capital of France is' -n 6 --dtype f32
same 'f32 bytes' "$(value f32 kv_bytes)" $((10 * 30 * 3 * 2 * 64 * 4))
answer room --raw-prompt -p 'The capital of France is' -n 6 --ctx 7
same 'tokens with --ctx 7' "$(value room generated_tokens)" 3
same 'finish_reason with --ctx 7' "$(value room finish_reason)" length
puzzlekv-run "$model" --raw-prompt -p 'The capital of France is' -n 6 --ctx 7 > "$work/text" \
    2> "$work/err" || fail "--ctx 7: status $?"
same 'message with --ctx 7' "$(cat "$work/err")" \
    'puzzlekv-run: the answer ends early: the context of 7 tokens is full'

refuse 1 'are more than --ctx 4' "$model" --raw-prompt -p 'The capital of France is' --ctx 4
refuse 1 "the model's context is 8192" "$model" -p x --ctx 8193
refuse 1 'must be 1 to 64' "$model" -p x --kv puzzle:page=128,rk=65
write_long_text "$work/long"
refuse 1 "are more than the model's context of 8192" "$model" -f "$work/long"

# Where output is lost, no more is computed; where address space is short, nothing waits for it. (A
# build with sanitizers does not run with any limit.)
if [ -e /dev/full ]; then
    puzzlekv-run "$model" --raw-prompt -p '1, 2, 3,' -n 8000 > /dev/full 2> "$work/err"
    same 'status of an answer to a full device' $? 1
    same 'errors of an answer to a full device' "$(wc -l < "$work/err")" 1
fi
# shellcheck disable=SC3045 # every shell that is /bin/sh somewhere has ulimit -v
if (ulimit -v 16000000 && puzzlekv-run --version) > "$work/out" 2>&1; then
    # What is enough depends on the machine: an answer or an error, but neither a crash nor a hang.
    for limit in 100000 400000 500000; do
        # shellcheck disable=SC3045
        (ulimit -v $limit && exec timeout 60 puzzlekv-run "$model" -f "$source/COPYING" -n 2 -t 2) \
            > "$work/out" 2> "$work/err"
        status=$?
        [ $status -eq 0 ] || grep -q '^puzzlekv-run: .*: .' "$work/err" ||
            fail "ulimit -v $limit: $(cat "$work/err")"
        [ $status -le 1 ] || fail "ulimit -v $limit: status $status"
        [ $limit -gt 100000 ] || same "status with ulimit -v $limit" $status 1
    done
fi

# ---- Ctrl-C --------------------------------------------------------------------------------------

# In the middle of an answer.
puzzlekv-run "$model" --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 4000 > "$work/text" 2> "$work/err" &
wait_ready $! "$work/text"
kill -INT $!
wait $!
same 'status after Ctrl-C' $? 130
grep -q '^  generated tokens  *[1-9]' "$work/err" || fail "after Ctrl-C: $(cat "$work/err")"
[ "$(head -c 3 "$work/text")" = ' 7,' ] || [ "$(wc -c < "$work/text")" -lt 4 ] ||
    fail "text before Ctrl-C: $(cat "$work/text")"

# A request to end is heard as well, and leaves a whole document.
puzzlekv-run "$model" --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 4000 --json > "$work/ended.json" \
    2> "$work/err" &
wait_ready $! /nonexistent
kill -TERM $!
wait $!
same 'status after SIGTERM' $? 130
"$json_get" "$work/ended.json" || fail 'after SIGTERM: not one JSON document'

# A model that another program shortens ends the run with an error.
cp "$model" "$work/short.gguf"
puzzlekv-run "$work/short.gguf" --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 4000 > "$work/text" \
    2> "$work/err" &
wait_ready $! "$work/text"
: > "$work/short.gguf"
wait $!
same 'status with a shortened model' $? 1
same 'error with a shortened model' "$(cat "$work/err")" \
    "puzzlekv-run: $work/short.gguf: was shortened while in use, or cannot be read any more"

# As early as it can be; whatever was done by then, the document is whole.
puzzlekv-run "$model" -f "$source/COPYING" -n 4000 --json > "$work/interrupted.json" \
    2> "$work/err" &
wait_ready $! /nonexistent
kill -INT $!
wait $!
same 'status after an early Ctrl-C' $? 130
"$json_get" "$work/interrupted.json" || fail 'after an early Ctrl-C: not one JSON document'
same 'finish_reason after Ctrl-C' "$(value interrupted finish_reason)" interrupted

[ $failures -eq 0 ] || exit 1
