#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-eval from the command line: refusals, the tiny models, then the real one.
set -u

tool=puzzlekv-eval
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"
data=${PUZZLEKV_TEST_DATA:?}
tiny=$data/tiny-llama3

# ---- Help and manual ----------------------------------------------------------------------------

puzzlekv-eval --help > "$work/help" || fail "--help: status $?"
puzzlekv-eval ppl --help > "$work/ppl_help" || fail "ppl --help: status $?"
puzzlekv-eval --version > "$work/version" || fail "--version: status $?"
grep -q '^instruction set: [a-z]' "$work/version" || fail "--version: $(cat "$work/version")"
grep -q -e '--prefill' "$work/ppl_help" || fail 'ppl --help: no --prefill'
grep -q -e '--output' "$work/ppl_help" && fail "ppl --help: has another command's --output"
compare_options 9
for command in info tokenize logits ppl ranks tasks generate-tasks calibrate; do
    compare_synopsis $command
done

# ---- What the command line shows to be wrong ----------------------------------------------------

refuse 2 'COMMAND: is missing; there are: info, tokenize, logits, ppl, '
refuse 2 'bogus: unknown command; there are: info, tokenize, logits, ppl, ' bogus model.gguf
refuse 2 'MODEL: is missing' info
refuse 2 'unexpected argument' info model.gguf other.gguf
refuse 2 '--file FILE: is missing' tokenize model.gguf
refuse 2 '--tokens FILE: is missing' logits model.gguf --prefill 1 --kv raw -o out
refuse 2 '--prefill N: is missing' logits model.gguf --tokens ids --kv raw -o out
refuse 2 '--kv SPEC: is missing' logits model.gguf --tokens ids --prefill 1 -o out
refuse 2 '--output FILE: is missing' logits model.gguf --tokens ids --prefill 1 --kv raw
refuse 2 '--kv: given 2 times' logits model.gguf --tokens ids --prefill 1 --kv raw --kv raw -o out
refuse 2 '--file FILE: is missing' ppl model.gguf --tokens 9 --prefill 1 --kv raw
refuse 2 '--tokens N: is missing' ppl model.gguf -f text --prefill 1 --kv raw
refuse 2 'is not below --tokens 9' ppl model.gguf -f text --tokens 9 --prefill 9 --kv raw
refuse 2 'is not a whole number' ppl model.gguf -f text --tokens 1 --prefill 1 --kv raw
refuse 2 'is not a whole number' ppl model.gguf -f text --tokens 9 --prefill 0 --kv raw
refuse 2 'unknown key "foo"' ppl model.gguf -f text --tokens 9 --prefill 1 --kv puzzle:foo=1
refuse 2 'unknown policy; there are: puzzle, puzzle-int4, raw' info model.gguf --kv nonesuch
refuse 2 '--temp: unknown' info model.gguf --temp 1
refuse 2 '--output: unknown' ppl model.gguf --output x
refuse 2 'is not one of bf16, f16, f32' info model.gguf --dtype int8
refuse 2 'TEXT: is missing' calibrate model.gguf -o out
refuse 2 '--output FILE: is missing' calibrate model.gguf text
refuse 2 'is not a whole number' calibrate model.gguf text -o out --sequences 0

# ---- info ---------------------------------------------------------------------------------------

refuse 1 'No such file' info "$work/none.gguf"
refuse 1 'must be 1 to 64' info "$tiny" --kv puzzle:page=128,rk=65
document info info "$tiny" --kv raw --kv puzzle --kv puzzle:ratio=0.586 --kv puzzle-int4
same 'keys of info' "$(keys info)" "model isa cpu threads dtype architecture layers hidden \
intermediate query_heads kv_heads head_dim vocabulary context tied_output rope_theta rope_scaling \
types tokens results "
same geometry "$(value info architecture) $(value info layers) $(value info query_heads) \
$(value info kv_heads) $(value info head_dim) $(value info tied_output)" 'llama 3 6 2 64 false'
same 'first length' "$(value info tokens.0)" 1024
same 'dense bytes' "$(value info results.0.bytes.0)" $((3 * 2 * 2 * 1024 * 2 * 64))
same 'stored bytes' "$(value info results.1.bytes.0)" \
    $((3 * 2 * 2 * (2 * 2 * 32 * 64 + 30 * 30 * 96)))
same 'a ratio' "$(value info results.2.kv_canonical)" \
    puzzle:page=32,rk=13,rv=12,sink=1,window=1,factors=native,rope=post
same 'bytes of INT4' "$(value info results.3.bytes.0)" \
    $((3 * 2 * (2 * 2 * 2 * 32 * 64 + 30 * (30 * 96 / 2 + 2 * (16 + 64 + 32 + 64)))))
document info_f32 info "$data/tiny-qwen3" --dtype f32
same 'default policies' "$(value info_f32 results.0.kv) $(value info_f32 results.1.kv)" 'raw puzzle'
same 'f32 bytes' "$(value info_f32 results.0.bytes.0)" $((3 * 2 * 4 * 1024 * 2 * 128))
same 'Qwen3 geometry' "$(value info_f32 architecture) $(value info_f32 head_dim)" 'qwen3 128'
puzzlekv-eval info "$tiny" > "$work/table" || fail "info: status $?"
grep -q "^puzzle  *1024  *$(value info results.1.bytes.0)  *$(value info results.1.bytes_raw.0) " \
    "$work/table" || fail "info: $(cat "$work/table")"

# ---- logits -------------------------------------------------------------------------------------

# largest_difference A B: of two files of f32.
largest_difference() {
    od -An -v -w4 -tf4 "$1" > "$work/a"
    od -An -v -w4 -tf4 "$2" > "$work/b"
    paste "$work/a" "$work/b" | awk '
        NF != 2 || $0 ~ /[a-df-z]/ { print "broken"; broken = 1; exit }
        { d = $1 - $2; if (d < 0) d = -d; if (d > largest) largest = d }
        END { if (!broken) print largest + 0 }'
}

for name in tiny-llama3 tiny-qwen3; do
    tr -d ' \n' < "$data/$name/expected.json" | sed 's/.*"token_ids":\(\[[0-9,]*\]\).*/\1/' \
        > "$work/$name.ids"
    vocabulary=$(puzzlekv-eval info "$data/$name" --json > "$work/v.json" && value v vocabulary)
    tail -c +$((149 * vocabulary * 4 + 1)) "$data/$name/logits_raw.f32" |
        head -c $((90 * vocabulary * 4)) > "$work/expected_raw"
    cat "$data/$name/logits_puzzle_16_14.f32" > "$work/expected_puzzle"
    for kv in raw puzzle; do
        puzzlekv-eval logits "$data/$name" --tokens "$work/$name.ids" --prefill 150 --kv $kv \
            -o "$work/$kv.f32" > "$work/out" || fail "logits $name $kv: status $?"
        [ ! -s "$work/out" ] || fail "logits $name $kv: prints $(cat "$work/out")"
        difference=$(largest_difference "$work/$kv.f32" "$work/expected_$kv")
        echo "logits $name $kv: largest difference $difference"
        awk "BEGIN { exit !(\"$difference\" ~ /^[0-9]/ && $difference + 0 <= 2e-3) }" ||
            fail "logits $name $kv: differ by $difference"
    done
done
document logits logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw -t 1 \
    -o "$work/again.f32"
same 'keys of logits' "$(keys logits)" \
    'model isa cpu threads dtype tokens prefill rows columns results '
same 'size of logits' "$(value logits rows) $(value logits dtype)" '90 f32'
same 'bytes in logits' "$(value logits results.0.kv_bytes)" $((239 * 3 * 2 * 2 * 64 * 4))
puzzlekv-eval logits "$tiny" --tokens - --prefill 150 --kv raw -t 2 -o "$work/two.f32" \
    < "$work/tiny-llama3.ids" || fail "logits --tokens -: status $?"
cmp "$work/again.f32" "$work/two.f32" || fail 'logits differ between one thread and two'

# An output takes its place when it is whole; a link to it and its permissions stay.
echo old > "$work/target.f32"
chmod 604 "$work/target.f32"
ln -s target.f32 "$work/link.f32"
puzzlekv-eval logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw \
    -o "$work/link.f32" || fail "logits -o LINK: status $?"
[ -h "$work/link.f32" ] || fail 'logits -o LINK: the link is gone'
cmp "$work/again.f32" "$work/target.f32" || fail 'logits -o LINK: another output'
same permissions "$(stat -c %a "$work/target.f32")" 604
(
    umask 027
    puzzlekv-eval logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw \
        -o "$work/umask.f32"
)
same 'permissions of a new file' "$(stat -c %a "$work/umask.f32")" 640
puzzlekv-eval logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw \
    -o /dev/stdout | cmp - "$work/again.f32" || fail 'logits -o /dev/stdout: another output'

# no_output FILE: there is no trace of it.
no_output() {
    for trace in "$1"*; do
        [ ! -e "$trace" ] || fail "$trace: a refused command left it"
    done
}

# Without room for it: what was there before stays.
echo old > "$work/full.f32"
(
    trap '' XFSZ
    ulimit -f 1
    refuse 1 'full.f32: File too large' logits "$tiny" --tokens "$work/tiny-llama3.ids" \
        --prefill 150 --kv raw -o "$work/full.f32"
    exit $failures
) || failures=1
same 'what was there before' "$(cat "$work/full.f32")" old
no_output "$work/full.f32."

# More than a pipe holds is read only once the model is open; then the model is shortened.
mkdir "$work/shortened"
cat "$tiny/config.json" > "$work/shortened/config.json"
cat "$tiny/model.safetensors" > "$work/shortened/model.safetensors"
{
    head -c 200000 /dev/zero | tr '\0' ' '
    : > "$work/shortened/model.safetensors"
    cat "$work/tiny-llama3.ids"
} | puzzlekv-eval logits "$work/shortened" --tokens - --prefill 150 --kv raw -o "$work/bad.f32" \
    > "$work/out" 2> "$work/err"
same 'status with a shortened file' $? 1
same 'text for a shortened file' "$(cat "$work/err")" \
    "puzzlekv-eval: $work/shortened/model.safetensors: was shortened while in use, or cannot be read any more"
no_output "$work/bad.f32"

# bad_ids TEXT JSON
bad_ids() {
    printf '%s' "$2" > "$work/bad.json"
    refuse 1 "$1" logits "$tiny" --tokens "$work/bad.json" --prefill 1 --kv raw -o "$work/bad.f32"
    no_output "$work/bad.f32"
}
bad_ids 'line 1' ''
bad_ids 'line 2' '[1, 2
3]'
bad_ids 'not a JSON array' '{"token_ids": [1, 2]}'
bad_ids 'at least two' '[1]'
bad_ids 'at least two' '[]'
bad_ids 'element 1 is not a token id' '[1, -2]'
bad_ids 'element 1 is not a token id' '[1, 2.0]'
bad_ids 'element 2 is not a token id' '[1, 2, "3"]'
bad_ids 'element 0 is not a token id' '[100000, 2]'
bad_ids 'element 0 is not a token id' '[9223372036854775807, 2]'
bad_ids 'line 1' '[99999999999999999999, 2]'
bad_ids '1001 arrays and objects in 3003 bytes are too many' \
    "[$(yes '[],' | head -n 1000 | tr -d '\n')1]"
refuse 1 'has 240 tokens, and the last is not fed' logits "$tiny" --tokens "$work/tiny-llama3.ids" \
    --prefill 240 --kv raw -o "$work/bad.f32"
refuse 1 'No such file' logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw \
    -o "$work/none/bad.f32"
refuse 1 'No such file' logits "$tiny" --tokens "$work/none.json" --prefill 1 --kv raw \
    -o "$work/bad.f32"
refuse 1 'must be 1 to 64' logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 \
    --kv puzzle:page=128,rk=65 -o "$work/bad.f32"
no_output "$work/bad.f32"
cp "$work/tiny-llama3.ids" "$work/ids"
for output in "$work/ids" "$work/tiny/model.safetensors"; do
    mkdir -p "$work/tiny"
    cat "$tiny/config.json" > "$work/tiny/config.json"
    cat "$tiny/model.safetensors" > "$work/tiny/model.safetensors"
    refuse 1 "$output: is the input" logits "$work/tiny" --tokens "$work/ids" \
        --prefill 150 --kv raw -o "$output"
done
cmp "$work/ids" "$work/tiny-llama3.ids" || fail 'logits wrote over the token ids'
cmp "$work/tiny/model.safetensors" "$tiny/model.safetensors" || fail 'logits wrote over the model'
if [ -e /dev/full ]; then
    refuse 1 '/dev/full: ' logits "$tiny" --tokens "$work/tiny-llama3.ids" --prefill 150 --kv raw \
        -o /dev/full
fi

{
    cat "$tiny/config.json"
    head -c 1048576 /dev/zero | tr '\0' ' '
} > "$work/tiny/config.json"
refuse 1 'expected at most 1048576' info "$work/tiny"
refuse 1 'tokenizer' tokenize "$tiny" -f "$source/COPYING"
printf 'ab\377' > "$work/latin"
refuse 1 'not valid UTF-8 at byte offset 2' tokenize "$tiny" -f "$work/latin"

need_model

# ---- The real model -----------------------------------------------------------------------------

# Ids as Hugging Face tokenizers gives them.
{
    printf 'Hello, world!\n<|im_start|>user\n\303\204pfel '
    printf '\344\275\240\345\245\275 12345  x\t\ty \360\237\231\202'
} > "$work/text"
same 'token ids' "$(puzzlekv-eval tokenize "$model" -f "$work/text")" \
    "[19556, 28, 905, 17, 198, 1, 4093, 198, 142, 222, 96, 34520, 216, 18645, 250, 48392, 138, \
216, 33, 34, 35, 36, 37, 216, 1792, 197, 197, 105, 47526]"
printf 'Hello, world!' | puzzlekv-eval tokenize "$model" -f - > "$work/ids"
same 'token ids of standard input' "$(cat "$work/ids")" '[19556, 28, 905, 17]'
: > "$work/empty"
same 'token ids of nothing' "$(puzzlekv-eval tokenize "$model" -f "$work/empty" --json)" '[]'

set -- ppl "$model" -f "$source/COPYING" --tokens 170 --prefill 140
document ppl "$@" --kv puzzle --kv raw --kv puzzle:rk=32,rv=32 --kv raw:page=64 --dtype f32
same 'keys of ppl' "$(keys ppl)" 'model isa cpu threads dtype tokens prefill results '
for i in 0 1 2 3; do
    for key in ppl nll kl top1 kv_ratio; do
        value ppl "results.$i.$key" > "$work/$key$i" || fail "ppl: no $key in result $i"
    done
done
same 'order of results' "$(value ppl results.0.kv) $(value ppl results.1.kv) \
$(value ppl results.2.kv) $(value ppl results.3.kv_canonical)" \
    'puzzle raw puzzle:rk=32,rv=32 raw:page=64'
same 'raw against itself' "$(cat "$work/kl1" "$work/top11" "$work/kv_ratio1" | tr '\n' ' ')" \
    '0.0 1.0 1.0 '
awk "BEGIN { exit !($(cat "$work/kl0") > 1e-3 && $(cat "$work/kl0") < 1) }" ||
    fail "ppl: puzzle's kl is $(cat "$work/kl0")"
awk "BEGIN { exit !($(cat "$work/kl2") < 1e-3) }" ||
    fail "ppl: kl at full rank is $(cat "$work/kl2")"
awk "BEGIN { kl = $(cat "$work/kl3"); exit !(kl < 1e-6 && kl > -1e-6) }" ||
    fail "ppl: kl of raw with other pages is $(cat "$work/kl3")"
awk "BEGIN { exit !($(cat "$work/ppl0") > 1 && $(cat "$work/kv_ratio0") < 1 && \
    $(cat "$work/kv_ratio2") > 1) }" || fail 'ppl: values'
# 169 tokens: 5 pages, 3 of them factors, and 9 tokens.
awk "BEGIN { r = (2 * 2 * 32 * 64 + 3 * 30 * 96 + 9 * 2 * 64) / (169 * 2 * 64);
    d = r - $(cat "$work/kv_ratio0"); exit !(d < 1e-9 && d > -1e-9) }" ||
    fail "ppl: kv_ratio is $(cat "$work/kv_ratio0")"

# Alone, on one thread, a policy has the same values as beside others.
document alone "$@" --kv puzzle --dtype f32 -t 1
for key in ppl nll kl top1 kv_ratio; do
    same "ppl: $key alone" "$(value alone "results.0.$key")" "$(cat "$work/${key}0")"
done
puzzlekv-eval "$@" --kv raw > "$work/table" || fail "ppl: status $?"
grep -q '^raw  *[0-9.]*  *[0-9.]*  *[0-9.e+-]*  *[0-9.]*  *[0-9.]*$' "$work/table" ||
    fail "ppl: $(cat "$work/table")"

refuse 1 'tokens; --tokens asks for 9000' ppl "$model" -f "$source/COPYING" --tokens 9000 \
    --prefill 1 --kv raw
write_long_text "$work/long"
refuse 1 "the model's context is 8192" ppl "$model" -f "$work/long" --tokens 9000 --prefill 1 \
    --kv raw
# ---- calibrate ----------------------------------------------------------------------------------

set -- calibrate "$model" "$source/COPYING" --sequences 3 --length 40
for threads in 1 2; do
    puzzlekv-eval "$@" -t $threads -o "$work/calibration$threads" > "$work/out" 2> "$work/err" ||
        fail "calibrate: status $?: $(cat "$work/err")"
    if [ -s "$work/out" ] || [ -s "$work/err" ]; then
        fail 'calibrate: prints something'
    fi
done
cmp "$work/calibration1" "$work/calibration2" || fail 'calibrations differ between threads'
puzzlekv-eval "$@" --seed 43 -o "$work/calibration2" || fail "calibrate --seed: status $?"
cmp -s "$work/calibration1" "$work/calibration2" && fail 'calibrate: the seed changes nothing'
echo 'Too short.' > "$work/short"
refuse 1 'short: has 4 tokens, fewer than the 1024 of a sequence' calibrate "$model" \
    "$work/short" -o "$work/wrong"
refuse 1 "the model's context is 8192" calibrate "$model" "$work/long" --length 9000 -o "$work/wrong"
refuse 1 'No such file' calibrate "$model" "$work/none" -o "$work/wrong"
no_output "$work/wrong"
puzzlekv-eval ppl "$model" -f "$source/COPYING" --tokens 60 --prefill 50 --kv raw \
    --kv "palu:calibration=$work/calibration1,ratio=1" --json > "$work/palu.json" 2> "$work/err" ||
    fail "ppl palu: status $?: $(cat "$work/err")"
same 'warning of palu' "$(cat "$work/err")" "puzzlekv-eval: --kv palu: warning: the calibration \
has no Fisher information, so the ranks are uniform"
same 'spec of palu' "$(value palu results.1.kv_canonical)" \
    "palu:calibration=$work/calibration1,ratio=1,ranks=uniform,align=1"
kl=$(value palu results.1.kl)
awk "BEGIN { exit !($kl < 1e-3 && $kl > -1e-3) }" || fail "ppl palu: kl at full rank is $kl"
refuse 1 'is the calibration of another model' info "$tiny" \
    --kv "palu:calibration=$work/calibration1"
refuse 2 'calibration=FILE is missing' info "$tiny" --kv palu

# A --kv need not be UTF-8; JSON is.
latin=$(printf 'caf\351')
ln -s "$work/calibration1" "$work/$latin"
clean=$(printf 'ojakv:calibration=%s/caf\357\277\275' "$work")
document latin_info info "$model" --kv "ojakv:calibration=$work/$latin"
same 'a --kv of info' "$(value latin_info results.0.kv)" "$clean"
document latin_ppl ppl "$model" -f "$source/COPYING" --tokens 20 --prefill 19 \
    --kv "ojakv:calibration=$work/$latin"
same 'a --kv of ppl' "$(value latin_ppl results.0.kv)" "$clean"
echo '[1, 2, 3]' > "$work/latin.ids"
document latin_logits logits "$model" --tokens "$work/latin.ids" --prefill 2 \
    --kv "ojakv:calibration=$work/$latin" -o "$work/latin.f32"
same 'a --kv of logits' "$(value latin_logits results.0.kv)" "$clean"
echo '{"input": "One, two,", "outputs": ["three"]}' > "$work/latin.jsonl"
document latin_tasks tasks "$model" "$work/latin.jsonl" --max-new 1 \
    --kv "ojakv:calibration=$work/$latin" -o "$work/latin.out"
same 'a --kv of tasks' "$(value latin_tasks results.0.kv)" "$clean"
sed -n 2p "$work/latin.out" > "$work/latin_row.json"
same 'a --kv of a prediction' "$(value latin_row results.0.kv)" "$clean"
tool=puzzlekv-bench
document latin_bench storage --shape smollm2-135m --tokens 99 --kv "ojakv:calibration=$work/$latin"
same 'a --kv of puzzlekv-bench' "$(value latin_bench results.0.kv)" "$clean"
tool=puzzlekv-run
document latin_run "$model" -p One -n 1 --kv "ojakv:calibration=$work/$latin"
same 'a --kv of puzzlekv-run' "$(value latin_run kv)" "$clean"
tool=puzzlekv-eval
refuse 1 'short: is the input' calibrate "$model" "$work/short" --length 2 -o "$work/short"
same 'the text afterwards' "$(cat "$work/short")" 'Too short.'

{
    printf '[1'
    i=0
    while [ $i -lt 3000 ]; do
        printf ', %d' $i
        i=$((i + 1))
    done
    echo ']'
} > "$work/many.json"

# Ctrl-C, the end of the system and that of the terminal leave no half of a file behind. Whoever
# runs this may have the last ignored, as nohup does, for all that is started here.
signals='INT TERM'
case $(sed -n 's/^SigIgn:.*\(.\)$/\1/p' /proc/self/status) in
[13579bdf]) ;;
*) signals="$signals HUP" ;;
esac
for signal in $signals; do
    puzzlekv-eval logits "$model" --tokens "$work/many.json" --prefill 1 --kv raw \
        -o "$work/half.f32" 2> "$work/err" &
    i=0
    while [ $i -lt 600 ] && [ -z "$(find "$work" -name 'half.f32.*' -size +0)" ]; do
        sleep 0.1
        i=$((i + 1))
    done
    kill -"$signal" $!
    wait $!
    same "status after SIG$signal" $? 130
    no_output "$work/half.f32"
done

[ $failures -eq 0 ] || exit 1
