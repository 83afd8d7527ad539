#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-eval generate-tasks: refusals, then rows for the real model.
set -u

tool=puzzlekv-eval
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
refuse 1 'No such file' generate-tasks "$work/none.gguf" --task s1 --length 900 --rows 1 \
    -o "$work/out.jsonl"

need_model

# ---- Rows ---------------------------------------------------------------------------------------

# generate NAME TASK ARGUMENT...
generate() {
    name=$1
    shift
    puzzlekv-eval generate-tasks "$model" --task "$@" -o "$work/$name.jsonl" > "$work/out" \
        2> "$work/err" || fail "generate-tasks $*: status $?: $(cat "$work/err")"
    [ ! -s "$work/out" ] && [ ! -s "$work/err" ] || fail "generate-tasks $*: prints something"
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
same 'a row' "$(head -n 1 "$work/s1.jsonl" | cksum)" '3557076514 3267'

# The chat format's tokens are counted too.
generate chat s1 --length 777 --rows 1 --chat
row chat 1
row s1 1
printf '%s %s' "$(value chat input)" "$(value chat gen_prefix)" > "$work/prompt"
tokens=$(puzzlekv-eval tokenize "$model" -f "$work/prompt" | wc -w)
[ "$tokens" -gt 700 ] && [ "$tokens" -lt 770 ] || fail "chat: $tokens tokens without the format"

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

[ $failures -eq 0 ] || exit 1
