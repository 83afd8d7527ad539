#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-eval generate-tasks, tasks and ranks: refusals, then rows for the real model.
set -u

tool=puzzlekv-eval
data=${PUZZLEKV_TEST_DATA:?}
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"

# ---- What the command line shows to be wrong ----------------------------------------------------

refuse 2 '--task NAME: is missing' generate-tasks model.gguf --length 9 --rows 1 -o out
refuse 2 '--length N: is missing' generate-tasks model.gguf --task s1 --rows 1 -o out
refuse 2 '--rows N: is missing' generate-tasks model.gguf --task s1 --length 9 -o out
refuse 2 '--output FILE: is missing' generate-tasks model.gguf --task s1 --length 9 --rows 1
refuse 2 '--task: "s2" is not one of s1, ' generate-tasks model.gguf --task s2
refuse 2 '--rows: "0" is not a whole number' generate-tasks model.gguf --rows 0
refuse 2 '--seed: "x" is not a whole number' generate-tasks model.gguf --seed x
refuse 2 'FILE: is missing' tasks model.gguf
refuse 2 'unexpected argument after FILE' tasks model.gguf rows.jsonl more.jsonl
refuse 2 '--metric: "any" is not one of all, part' tasks model.gguf rows.jsonl --metric any
refuse 2 '--max-new: "0" is not a whole number' tasks model.gguf rows.jsonl --max-new 0
refuse 2 '--resume: continues an --output, which is missing' tasks model.gguf rows.jsonl --resume
refuse 2 '--plot out: is the --output as well' tasks model.gguf rows.jsonl -o out --plot out
refuse 2 '--csv, --json: give one or the other' tasks model.gguf rows.jsonl --csv --json
refuse 2 '--ablation: "rank" is not one of ranks, ' tasks model.gguf rows.jsonl --ablation rank
refuse 2 '--file FILE: is missing' ranks model.gguf
refuse 1 'No such file' tasks "$work/none.gguf" rows.jsonl
refuse 1 'No such file' tasks "$work/none.gguf" rows.jsonl --ablation ranks
PATH=$work/empty "$(command -v puzzlekv-eval)" ranks model.gguf -f text --plot "$work/plot.svg" \
    2> "$work/err" && fail 'a plot without gnuplot'
grep -q 'gnuplot: is not installed' "$work/err" || fail "without gnuplot: $(cat "$work/err")"
refuse 1 'No such file' generate-tasks "$work/none.gguf" --task s1 --length 900 --rows 1 \
    -o "$work/out.jsonl"

# A file that is read is not written over, be it long closed.
mkdir "$work/small"
cat "$data/tokenizer/smollm/tokenizer.json" > "$work/small/tokenizer.json"
refuse 1 "$work/small/tokenizer.json: is the input" generate-tasks "$work/small" --task s1 \
    --length 400 --rows 1 -o "$work/small/tokenizer.json"
cmp "$work/small/tokenizer.json" "$data/tokenizer/smollm/tokenizer.json" ||
    fail 'generate-tasks wrote over the tokenizer'

need_model

# ---- Rows ---------------------------------------------------------------------------------------

# generate NAME TASK ARGUMENT...
generate() {
    name=$1
    shift
    puzzlekv-eval generate-tasks "$model" --task "$@" -o "$work/$name.jsonl" > "$work/out" \
        2> "$work/err" || fail "generate-tasks $*: status $?: $(cat "$work/err")"
    if [ -s "$work/out" ] || [ -s "$work/err" ]; then
        fail "generate-tasks $*: prints something"
    fi
}

# row NAME N: the N-th row as a document of that name.
row() {
    sed -n "$2p" "$work/$1.jsonl" > "$work/$1.json"
}

for task in s1 multi-key uuid multi-query multi-value variable-tracking common-words \
    frequent-words; do
    generate $task $task --length 777 --rows 2
    same "rows of $task" "$(wc -l < "$work/$task.jsonl")" 2
    for n in 1 2; do
        row $task $n
        same "keys of $task" "$(keys $task)" 'index input outputs length gen_prefix '
        same "numbers of $task" "$(value $task index) $(value $task length)" "$((n - 1)) 777"
        printf '%s %s' "$(value $task input)" "$(value $task gen_prefix)" > "$work/prompt"
        same "tokens of $task" "$(puzzlekv-eval tokenize "$model" -f "$work/prompt" | wc -w)" 777
    done
done
generate more s1 --length 777 --rows 3
head -n 2 "$work/more.jsonl" | cmp - "$work/s1.jsonl" || fail 'more rows are other rows'
generate other s1 --length 777 --rows 2 --seed 43
cmp "$work/other.jsonl" "$work/s1.jsonl" > "$work/out" && fail 'another seed makes the same rows'

# These are the first bytes of the first row on any machine.
same 'a row' "$(head -n 1 "$work/s1.jsonl" | cksum)" '2125719525 2694'

# The chat format's tokens are counted too.
generate chat s1 --length 777 --rows 1 --chat
row chat 1
row s1 1
printf '%s %s' "$(value chat input)" "$(value chat gen_prefix)" > "$work/prompt"
tokens=$(puzzlekv-eval tokenize "$model" -f "$work/prompt" | wc -w)
if [ "$tokens" -le 700 ] || [ "$tokens" -ge 770 ]; then
    fail "chat: $tokens tokens without the format"
fi

refuse 1 'the task s1 needs at least ' generate-tasks "$model" --task s1 --length 20 --rows 1 \
    -o "$work/short.jsonl"
[ ! -e "$work/short.jsonl" ] || fail 'a refused command left an output'
ln -s "$model" "$work/model.gguf"
refuse 1 "$work/model.gguf: is the input" generate-tasks "$model" --task s1 --length 900 \
    --rows 1 -o "$work/model.gguf"
refuse 1 'No such file' generate-tasks "$model" --task s1 --length 900 --rows 1 \
    -o "$work/none/rows.jsonl"
if [ -e /dev/full ]; then
    refuse 1 '/dev/full: ' generate-tasks "$model" --task s1 --length 900 --rows 1 -o /dev/full
fi

# ---- Answers ------------------------------------------------------------------------------------

generate rows s1 --length 200 --rows 3
set -- tasks "$model" "$work/rows.jsonl" --max-new 12
document all "$@" --kv raw --kv puzzle:window=0 --kv streaming:recent=16 --kv static
same 'keys of tasks' "$(keys all)" \
    'model isa cpu threads dtype file metric max_new chat tokens results '
same 'numbers of tasks' "$(value all metric) $(value all max_new) $(value all chat) \
$(value all tokens) $(value all results.1.n)" 'all 12 false 200 3'
same 'policies of tasks' "$(value all results.1.kv) $(value all results.3.kv_canonical)" \
    'puzzle:window=0 static'
same 'dense scores' "$(value all results.0.score) $(value all results.3.score)" '100.0 100.0'
same 'the score of a cache that forgets' "$(value all results.2.score)" 0.0
same 'an interval' "$(value all results.0.score_low | cut -c 1-6) \
$(value all results.0.score_high)" '43.850 100.0'
same 'a dense ratio' "$(value all results.0.kv_ratio)" 1.0
awk "BEGIN { r = $(value all results.1.kv_ratio); exit !(r > 0.7 && r < 0.8) }" ||
    fail "tasks: kv_ratio is $(value all results.1.kv_ratio)"

puzzlekv-eval "$@" --kv raw --csv > "$work/csv" || fail "tasks --csv: status $?"
same 'a heading of CSV' "$(head -n 1 "$work/csv")" 'kv,score,score_low,score_high,n,kv_ratio'
grep -q '^raw,100,43\.85[0-9]*,100,3,1$' "$work/csv" || fail "tasks --csv: $(cat "$work/csv")"
puzzlekv-eval "$@" --kv puzzle:rk=9,rv=9 --csv > "$work/csv" || fail "tasks --csv: status $?"
grep -q '^"puzzle:rk=9,rv=9",' "$work/csv" || fail "tasks --csv: $(cat "$work/csv")"
puzzlekv-eval "$@" --kv raw > "$work/table" || fail "tasks: status $?"
grep -q '^raw  *100\.00  *43\.85 - 100\.00  *3  *1\.00000$' "$work/table" ||
    fail "tasks: $(cat "$work/table")"

# With or without --output, alone or beside others, in one go or not, on one thread or two.
document alone "$@" --kv puzzle:window=0 -t 1 -o "$work/answers.jsonl"
same 'a score alone' "$(value alone results.0.score) $(value alone results.0.kv_ratio)" \
    "$(value all results.1.score) $(value all results.1.kv_ratio)"
same 'lines of answers' "$(wc -l < "$work/answers.jsonl")" 4
row answers 2
same 'keys of an answer' "$(keys answers)" 'row index outputs results '
row answers 1
same 'settings of answers' "$(value answers puzzlekv) $(value answers max_new) \
$(value answers rows)" 'tasks 12 3'
# Nothing that is printed gets into the file that takes a closed standard output's number.
for closed in 1 2; do
    rm -f "$work/closed.jsonl"
    eval 'puzzlekv-eval "$@" --kv puzzle:window=0 -o "$work/closed.jsonl"' "> /dev/null $closed>&-"
    same "status with descriptor $closed closed" $? $((closed == 1))
    cmp "$work/closed.jsonl" "$work/answers.jsonl" || fail "descriptor $closed closed: other answers"
done
refuse 1 'is there already; --resume continues it' "$@" --kv puzzle:window=0 \
    -o "$work/answers.jsonl"
refuse 1 '"kv" was ["puzzle:' "$@" --kv raw -o "$work/answers.jsonl" --resume
refuse 1 '"metric" was "all", and is "part" now' "$@" --kv puzzle:window=0 --metric part \
    -o "$work/answers.jsonl" --resume
head -c 900 "$work/answers.jsonl" > "$work/half.jsonl"
document again "$@" --kv puzzle:window=0 -t 2 -o "$work/half.jsonl" --resume
cmp "$work/half.jsonl" "$work/answers.jsonl" || fail 'a continued file differs'
same 'a continued score' "$(value again results)" "$(value alone results)"
document finished "$@" --kv puzzle:window=0 -o "$work/half.jsonl" --resume
same 'a score that was there' "$(value finished results)" "$(value alone results)"
sed 's/"index": 1/"index": 7/' "$work/rows.jsonl" > "$work/changed.jsonl"
refuse 1 '"file_digest" was ' tasks "$model" "$work/changed.jsonl" --max-new 12 \
    --kv puzzle:window=0 -o "$work/half.jsonl" --resume
refuse 1 "$work/rows.jsonl: is the input" "$@" -o "$work/rows.jsonl" --resume

# An empty prefix is none.
printf '%s\n' '{"input": "One, two,", "outputs": ["three"]}' \
    '{"input": "One, two,", "outputs": ["three"], "gen_prefix": ""}' > "$work/prefix.jsonl"
puzzlekv-eval tasks "$model" "$work/prefix.jsonl" --kv raw --max-new 4 -o "$work/prefix.out" \
    > "$work/out" || fail "tasks without a prefix: status $?"
same 'predictions without a prefix' "$(sed -n 's/^{"row": 0, //p' "$work/prefix.out")" \
    "$(sed -n 's/^{"row": 1, //p' "$work/prefix.out")"

# One of two outputs, in the chat format.
printf '%s\n' '{"index": 0, "input": "Repeat the word: Paris", "gen_prefix": "The word is", "outputs": ["paris", "qqq"], "length": 9}' > "$work/two.jsonl"
document share tasks "$model" "$work/two.jsonl" --chat --kv raw --max-new 12
same 'a share' "$(value share results.0.score) $(value share chat)" '50.0 true'
document any tasks "$model" "$work/two.jsonl" --chat --kv raw --max-new 12 --metric part
same 'any' "$(value any results.0.score) $(value any metric)" '100.0 part'

# Rows that are refused, all before any is answered.
# bad_row TEXT ROW: after a good row and an empty line.
bad_row() {
    { cat "$work/two.jsonl" && printf '\n%b\n' "$2"; } > "$work/bad.jsonl"
    refuse 1 "$work/bad.jsonl: line 3: $1" tasks "$model" "$work/bad.jsonl" --kv raw \
        -o "$work/bad.out"
    [ ! -e "$work/bad.out" ] || fail "bad row $2: there is an output"
}
bad_row 'is not valid JSON: ' '{"input": "a", "outputs": ["b"]'
bad_row 'is not a JSON object' '["a"]'
bad_row '"input" is missing; expected a string' '{"outputs": ["b"]}'
bad_row '"input" is not a string' '{"input": 1, "outputs": ["b"]}'
bad_row '"outputs" is missing; expected an array' '{"input": "a"}'
bad_row '"outputs" is empty' '{"input": "a", "outputs": []}'
bad_row '"outputs": element 1 is not a string' '{"input": "a", "outputs": ["b", 2]}'
bad_row '"gen_prefix" is not a string' '{"input": "a", "outputs": ["b"], "gen_prefix": 2}'
bad_row 'is not valid UTF-8 at offset 11 of the line' '{"input": "\0377", "outputs": ["b"]}'
bad_row 'has a byte of value 0 at offset 11 of the line' '{"input": "\0000", "outputs": ["b"]}'
bad_row 'the prompt is empty' '{"input": "", "outputs": ["b"]}'
refuse 1 'its 777 tokens and --max-new 9000 are more than the model'"'"'s context of 8192' \
    tasks "$model" "$work/s1.jsonl" --max-new 9000
: > "$work/none.jsonl"
refuse 1 'has no rows' tasks "$model" "$work/none.jsonl"

# A great many rows are read in little memory, down to the one at the end that is wrong.
awk 'BEGIN {
    for (i = 0; i < 100000; i++)
        printf "{\"index\": %d, \"input\": \"Row %d\", \"outputs\": [\"%d\"]}\n", i, i, i
    print "{}"
}' > "$work/many.jsonl"
refuse 1 'many.jsonl: line 100001: "input" is missing' tasks "$model" "$work/many.jsonl" --kv raw

# Ctrl-C keeps what is done.
generate long s1 --length 400 --rows 40
puzzlekv-eval tasks "$model" "$work/long.jsonl" --kv raw -o "$work/long.out" > "$work/out" \
    2> "$work/err" &
i=0
while [ $i -lt 600 ] && { [ ! -s "$work/long.out" ] || [ "$(wc -l < "$work/long.out")" -lt 3 ]; }; do
    sleep 0.1
    i=$((i + 1))
done
kill -INT $!
wait $!
same 'status after Ctrl-C' $? 130
grep -q 'rows are done, which --resume goes on from$' "$work/err" ||
    fail "Ctrl-C: $(cat "$work/err")"
[ "$(wc -l < "$work/long.out")" -ge 3 ] || fail 'Ctrl-C: rows are lost'

# ---- Ablations, ranks and plots -----------------------------------------------------------------

set -- ppl "$model" -f "$source/COPYING" --tokens 100 --prefill 97
document ranks_grid "$@" --ablation ranks --kv static
same 'an ablation' "$(value ranks_grid results.0.kv) $(value ranks_grid results.1.kv) \
$(value ranks_grid results.25.kv) $(value ranks_grid results.26.kv)" \
    'raw puzzle:rk=12,rv=12 puzzle:rk=20,rv=20 static'
document pages "$@" --ablation pages
same 'pages' "$(value pages results.3.kv)" 'puzzle:page=64,rk=24,rv=24'
document precision "$@" --ablation precision
same 'precision' "$(value precision results.4.kv)" puzzle-int4
document rope "$@" --ablation rope
same 'rope' "$(value rope results.1.kv)" 'puzzle:rk=16,rv=16,rope=pre'
puzzlekv-eval "$@" --kv puzzle:rk=9,rv=9 --csv > "$work/csv" || fail "ppl --csv: status $?"
same 'a heading of CSV' "$(head -n 1 "$work/csv")" 'kv,ppl,nll,kl,top1,kv_ratio'
grep -q '^"puzzle:rk=9,rv=9",[0-9.]*,' "$work/csv" || fail "ppl --csv: $(cat "$work/csv")"

document ranks ranks "$model" -f "$source/COPYING" --tokens 130
same 'keys of ranks' "$(keys ranks)" 'model isa cpu threads dtype tokens results '
same 'a result of ranks' "$(value ranks results.3.page_tokens) $(value ranks results.3.part) \
$(value ranks results.3.pages)" '32 k 3'
same 'the energy at full rank' "$(value ranks results.3.energy.31 | cut -c 1-4)" 1.0
puzzlekv-eval ranks "$model" -f "$source/COPYING" --tokens 130 --csv > "$work/ranks.csv" ||
    fail "ranks --csv: status $?"
# For each part, layer and head: energy grows with the rank, up to 1; and the mean is the JSON's.
awk -F, -v mean="$(value ranks results.3.energy.15)" '
    NR == 1 { next }
    { key = $1 "," $2 "," $3 "," $4; if ($5 == 1) last = 0 }
    $6 < last || $6 > 1 + 1e-9 { print "bad line " $0; exit 1 }
    $5 == $1 && $6 < 1 - 1e-9 { print "bad end " $0; exit 1 }
    { last = $6; seen++ }
    $1 == 32 && $2 == "k" && $5 == 16 { sum += $6; heads++ }
    END {
        d = sum / heads - mean
        if (seen != 30 * 3 * 3 * (16 + 32 + 64) || heads != 90 || d > 1e-6 || d < -1e-6)
            print "bad table " seen " " heads " " d
    }' "$work/ranks.csv" > "$work/out"
[ ! -s "$work/out" ] || fail "ranks --csv: $(cat "$work/out")"
puzzlekv-eval ranks "$model" -f "$source/COPYING" --tokens 130 > "$work/table" ||
    fail "ranks: status $?"
same 'rows of ranks' "$(grep -cE '^ +(16|32|64) (k|k-before-rope|v) ' "$work/table")" 9
refuse 1 'tokens are fewer than the 128 of two pages' ranks "$model" -f "$source/COPYING" \
    --tokens 127

if command -v gnuplot > "$work/out"; then
    puzzlekv-eval ranks "$model" -f "$source/COPYING" --tokens 130 --plot "$work/ranks.svg" \
        > "$work/out" || fail "ranks --plot: status $?"
    puzzlekv-eval "$@" --kv raw --kv puzzle --plot "$work/ppl.svg" > "$work/out" ||
        fail "ppl --plot: status $?"
    document dot "$@" --kv raw --plot "$work/dot.svg"
    puzzlekv-eval tasks "$model" "$work/two.jsonl" --max-new 3 --kv raw --kv puzzle:window=0 \
        --plot "$work/tasks.svg" > "$work/out" || fail "tasks --plot: status $?"
    for plot in ranks ppl tasks; do
        grep -q '</svg>' "$work/$plot.svg" || fail "$plot --plot: no SVG"
    done
    grep -q 'puzzle' "$work/tasks.svg" || fail 'tasks --plot: no puzzle'
    refuse 1 'No such file' "$@" --kv raw --plot "$work/none/ppl.svg"
    cp "$work/two.jsonl" "$work/plotted.jsonl"
    refuse 1 "$work/plotted.jsonl: is the input" tasks "$model" "$work/plotted.jsonl" \
        -o "$work/plotted.out" --plot "$work/plotted.jsonl"
    cmp "$work/two.jsonl" "$work/plotted.jsonl" || fail 'tasks drew over its rows'
    [ ! -e "$work/plotted.out" ] || fail 'a refused command left an output'
    # A plot that cannot be written fails, but does not cost the results.
    if [ -e /dev/full ]; then
        puzzlekv-eval "$@" --kv raw --plot /dev/full > "$work/table" 2> "$work/err"
        same 'status of a plot on a full disk' "$? $(wc -l < "$work/table") $(cat "$work/err")" \
            '1 2 puzzlekv-eval: /dev/full: No space left on device'
    fi
    # XML is UTF-8, whatever the file is called.
    cp "$source/COPYING" "$work/$(printf 'caf\351<')"
    puzzlekv-eval ppl "$model" -f "$work/$(printf 'caf\351<')" --tokens 100 --prefill 98 --kv raw \
        --plot "$work/name.svg" > "$work/out" || fail "ppl --plot: status $?"
    grep -q 'caf?&lt;' "$work/name.svg" || fail 'a title that is not UTF-8'
fi

[ $failures -eq 0 ] || exit 1
