#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-run --session: what is kept from one run to the next, and what is refused.
set -u
export LC_ALL=C
tool=puzzlekv-run
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"

# run NAME SESSION PROMPT ARGUMENT...
run() {
    name=$1 session=$2
    printf '%s' "$3" > "$work/prompt"
    shift 3
    document "$name" "$model" --raw-prompt -f "$work/prompt" --session "$work/$session" -t 2 "$@"
}

# counts NAME: prompt, reused and generated tokens.
counts() {
    echo "$(value "$1" prompt_tokens) $(value "$1" reused_tokens) $(value "$1" generated_tokens)"
}

# unchanged COMMAND...: the session $work/s stays as it is, whatever the command does.
unchanged() {
    cp "$work/s" "$work/before"
    "$@"
    cmp "$work/s" "$work/before" || fail "the session has changed: $*"
}

# ---- The command line

for kv in static int4 h2o puzzle:rope=pre puzzle-int4:rope=pre; do
    refuse 2 "--session, --kv $kv: only raw" none.gguf -p x --session "$work/s" --kv "$kv"
done
refuse 2 '-i, --session' none.gguf -i --session "$work/s"
refuse 2 '--session: the name is empty' none.gguf -p x --session ''

need_model

# ---- Reuse

# 100 numbers: 5 tokens each but for the last.
text=$(i=100 && while [ $i -lt 200 ]; do printf '%s, ' $i && i=$((i + 1)); done)
for kv in raw puzzle puzzle-int4; do
    rm -f "$work/s"
    run first s "$text" -n 8 --kv $kv
    tokens=$(value first prompt_tokens)
    same "tokens of the first run with $kv" "$(counts first)" "$tokens 0 8"

    # The same again: all but the last token is there, dense pages at the end.
    run again s "$text" -n 8 --kv $kv
    same "tokens of the same prompt with $kv" "$(counts again)" "$tokens $((tokens - 1)) 8"

    # The prompt and the answer: all that was cached is there.
    run on s "$text$(value again text)" -n 8 --kv $kv
    same "reused of a prompt that goes on with $kv" "$(value on reused_tokens)" \
        $(($(value on prompt_tokens) - 1))

    # A prompt that differs early: up to the differing token, or to its page's beginning.
    early=$(printf '%s' "$text" | sed 's/120, .*/xyz/')
    cp "$work/s" "$work/long"
    run early s "$early" -n 2 --kv $kv
    common=$(($(value early prompt_tokens) - 2))
    [ $common -gt 64 ] || fail "\"$early\" has only $common tokens in common"
    reused=$(value early reused_tokens)
    if [ $kv = raw ]; then
        [ "$reused" -ge $((common - 2)) ] || fail "reused of an early end: $reused of $common"
    else
        same "reused of an early end with $kv" "$reused" $((common / 32 * 32))
    fi
    run short s "$early" -n 2 --kv $kv
    same "reused after a shorter run with $kv" "$(value short reused_tokens)" \
        $(($(value short prompt_tokens) - 1))

    # Nothing in common.
    run other s 'Hello' -n 2 --kv $kv
    same "reused of another prompt with $kv" "$(value other reused_tokens)" 0
    mv "$work/long" "$work/$kv.session"
done

# A dense cache gives what it gives without a session.
document fresh "$model" --raw-prompt -f "$work/prompt" -n 2 -t 2 --kv raw
document plain "$model" --raw-prompt -p "$text" -n 8 -t 2 --kv raw
run raw_again raw.session "$text" -n 8 --kv raw
same 'ids from a session' "$(value raw_again token_ids)" "$(value plain token_ids)"
same 'reused without a session' "$(value plain reused_tokens)" 0

# --ctx counts what this run needs, though the session is longer.
cp "$work/puzzle.session" "$work/s"
run ctx s "$early" -n 50 --ctx $(($(value early prompt_tokens) + 3))
same 'tokens up to --ctx' "$(value ctx generated_tokens) $(value ctx finish_reason)" '4 length'

# Another instruction set and another number of threads.
cp "$work/puzzle.session" "$work/s"
PUZZLEKV_ISA=generic
export PUZZLEKV_ISA
run generic s "$text" -n 2 -t 1
unset PUZZLEKV_ISA
same 'reused with generic' "$(counts generic)" "$tokens $((tokens - 1)) 2"

# In words.
puzzlekv-run "$model" --raw-prompt -p "$text" -n 2 --session "$work/s" --stats > "$work/out" \
    2> "$work/err" || fail "--stats: status $?"
grep -q "^  reused tokens  *$((tokens - 1))\$" "$work/err" || fail "--stats: $(cat "$work/err")"
[ "$(stat -c %a "$work/s")" = 600 ] || fail "the session's mode is $(stat -c %a "$work/s")"
[ "$(ls "$work"/s.* 2> /dev/null)" = "" ] || fail "left behind: $(ls "$work"/s.*)"

# ---- What is refused

unchanged refuse 1 "$work/s: dtype: " "$model" -p x --session "$work/s" --dtype f16
unchanged refuse 1 "$work/s: page_tokens: " "$model" -p x --session "$work/s" --kv puzzle:page=64
unchanged refuse 1 "$work/s: factors_k: " "$model" -p x --session "$work/s" --kv raw
unchanged refuse 1 "$work/s: ranks: " "$model" -p x --session "$work/s" --kv puzzle:rk=15
unchanged refuse 1 "$work/s: model_id: " "$model" -p x --session "$work/s" --exact
refuse 1 "$work: " "$model" -p x --session "$work"
refuse 1 "$work/prompt: is the input" "$model" -f "$work/prompt" --session "$work/prompt"
refuse 1 "$model: is the input" "$model" -p x --session "$model"
cp "$work/s" "$work/whole"
for bytes in 0 100 200 10000; do
    head -c $bytes "$work/whole" > "$work/s"
    unchanged refuse 1 "the session ends in it" "$model" -p x --session "$work/s"
done
{
    cat "$work/whole"
    echo
} > "$work/s"
unchanged refuse 1 "end: " "$model" -p x --session "$work/s"
printf 'GGUF0000000000000000' > "$work/s"
unchanged refuse 1 "magic: " "$model" -p x --session "$work/s"

# One that cannot be written: the answer is there, and the status says so.
puzzlekv-run "$model" -p x -n 1 --session "$work/none/s" > "$work/out" 2> "$work/err"
same 'status without a folder' $? 1
[ -s "$work/out" ] || fail 'no answer without a folder'
grep -q "^puzzlekv-run: $work/none/s: " "$work/err" || fail "$(cat "$work/err")"

[ $failures -eq 0 ]
