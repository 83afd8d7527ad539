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

    # What is stored, and less than 1 % beside it.
    bytes=$(stat -c %s "$work/s")
    stored=$(value first kv_bytes)
    if [ "$bytes" -le "$stored" ] || [ $((100 * (bytes - stored))) -ge "$stored" ]; then
        fail "a session of $bytes bytes for $stored with $kv"
    fi

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

# Instruction sets read each other's sessions, with another number of threads.
isas=
for isa in generic avx2 avx512 neon; do
    PUZZLEKV_ISA=$isa puzzlekv-run --version > "$work/out" 2>&1 && isas="$isas $isa"
done
export PUZZLEKV_ISA
for from in $isas; do
    PUZZLEKV_ISA=$from
    run "$from" "$from" "$early" -n 1
    for to in $isas; do
        PUZZLEKV_ISA=$to
        cp "$work/$from" "$work/s"
        run to s "$early" -n 1 -t 1
        same "$to with a session of $from" "$(value to isa) $(counts to)" \
            "$to $(value early prompt_tokens) $(($(value early prompt_tokens) - 1)) 1"
    done
done
unset PUZZLEKV_ISA
cp "$work/puzzle.session" "$work/s"

# In words.
puzzlekv-run "$model" --raw-prompt -p "$text" -n 2 --session "$work/s" --stats > "$work/out" \
    2> "$work/err" || fail "--stats: status $?"
grep -q "^  reused tokens  *$((tokens - 1))\$" "$work/err" || fail "--stats: $(cat "$work/err")"
[ "$(stat -c %a "$work/s")" = 600 ] || fail "the session's mode is $(stat -c %a "$work/s")"
[ "$(ls "$work"/s.* 2> /dev/null)" = "" ] || fail "left behind: $(ls "$work"/s.*)"

# ---- Chats

TERM=xterm
export TERM
pty_run=${PUZZLEKV_BUILD:?}/tests/pty_run
system='You answer in one sentence.'
first='What is the capital of France?'
second='And of Italy?'
third='Which has more people?'

# chat OUTPUT ARGUMENT...: one, through a pipe.
chat() {
    output=$work/$1
    shift
    puzzlekv-run "$model" -i -n 8 --ctx 300 --system "$system" "$@" > "$output" 2> "$work/err"
}

# row ROW: the first word of a row in the last statistics.
row() {
    sed -n "s/^  $1  *\([^ ]*\).*/\1/p" "$work/err" | tail -n 1
}

# typed STATUS ARGUMENT...: the script on standard input, typed to a chat. What it answers goes to
# $work/text, everything else to $work/shown.
typed() {
    status=$1
    shift
    # shellcheck disable=SC2016 # the inner shell's
    "$pty_run" "$work/shown" sh -c 'out=$1; shift; exec puzzlekv-run "$@" > "$out"' sh \
        "$work/text" "$model" -i -n 8 --ctx 300 --system "$system" "$@"
    same "status of a typed chat: $(cat "$work/shown")" $? "$status"
}

# Three turns in three runs are what they are in one.
printf '%s\n%s\n%s\n' "$first" "$second" "$third" | chat at_once || fail "$(cat "$work/err")"
same 'answers' "$(wc -l < "$work/at_once")" 3
rm -f "$work/s"
echo "$first" | chat turn1 --session "$work/s" --stats || fail "$(cat "$work/err")"
same 'reused by the first turn' "$(row 'reused tokens')" 0
cached=$(row 'cached tokens')
typed 0 --session "$work/s" << END
expect /help lists the commands
expect a conversation of 2 turns goes on
expect >
send $second\r
expect >
send /quit\r
END
cp "$work/text" "$work/turn2"
cp "$work/s" "$work/two"
echo "$third" | chat turn3 --session "$work/s" --stats || fail "$(cat "$work/err")"
cat "$work/turn1" "$work/turn2" "$work/turn3" | cmp - "$work/at_once" ||
    fail 'other answers in three runs than in one'
[ "$(row 'reused tokens')" -gt "$cached" ] || fail "the third turn reuses $(row 'reused tokens')"
same 'prompt and answer of the third turn' "$(row 'cached tokens')" \
    $(($(row 'prompt tokens') + $(row 'generated tokens') - 1))

# Another system message is another conversation: all of it is read again.
cp "$work/two" "$work/s"
echo "$third" | chat other --session "$work/s" --system 'Bonjour.' --stats ||
    fail "$(cat "$work/err")"
[ "$(row 'reused tokens')" -lt 5 ] || fail "another system message: $(row 'reused tokens') reused"

# It is saved after every turn: one that is killed goes on with the next message.
rm -f "$work/s"
mkfifo "$work/messages"
puzzlekv-run "$model" -i -n 8 --ctx 300 --system "$system" --session "$work/s" \
    < "$work/messages" > "$work/killed" 2> "$work/err" &
exec 3> "$work/messages"
echo "$first" >&3
i=0
while [ $i -lt 600 ] && [ ! -e "$work/s" ]; do
    sleep 0.1
    i=$((i + 1))
done
kill -KILL $!
wait $!
exec 3>&-
echo "$second" | chat again --session "$work/s" || fail "$(cat "$work/err")"
cmp "$work/again" "$work/turn2" || fail 'another answer after a chat that was killed'

# An answer to one prompt goes on as a chat, with the first message as an option.
rm -f "$work/s"
puzzlekv-run "$model" -n 8 --system "$system" -p "$first" --session "$work/s" > "$work/text" ||
    fail 'a prompt for a chat'
chat again --session "$work/s" -p "$second" < /dev/null || fail "$(cat "$work/err")"
cmp "$work/again" "$work/turn2" || fail 'another answer after a prompt that was no chat'

# /reset is a new conversation, which takes the place of the old one.
cp "$work/two" "$work/s"
printf '/reset\n%s\n' "$first" | chat reset --session "$work/s" || fail "$(cat "$work/err")"
cmp "$work/reset" "$work/turn1" || fail 'another answer after /reset'
echo "$second" | chat again --session "$work/s" || fail "$(cat "$work/err")"
cmp "$work/again" "$work/turn2" || fail 'another answer in the run after /reset'

# Raw text goes on as well.
rm -f "$work/s"
printf '1, 2, 3,\n' | puzzlekv-run "$model" -i --raw-prompt -n 6 --session "$work/s" \
    > "$work/raw1" || fail 'raw text with a session'
printf ' 7,\n' | puzzlekv-run "$model" -i --raw-prompt -n 6 --session "$work/s" > "$work/raw2" ||
    fail 'more raw text with a session'
printf '1, 2, 3,\n 7,\n' | puzzlekv-run "$model" -i --raw-prompt -n 6 | grep . > "$work/raw"
cat "$work/raw1" "$work/raw2" | grep . | cmp - "$work/raw" || fail 'other raw text in two runs'

# Where it cannot be saved, the chat goes on.
printf '%s\n%s\n' "$first" "$second" | chat lost --session "$work/none/s"
same 'status of a chat that is not saved' $? 1
cat "$work/turn1" "$work/turn2" | cmp - "$work/lost" || fail 'other answers without a folder'
same 'messages without a folder' "$(grep -c "^puzzlekv-run: $work/none/s: " "$work/err")" 2

# ---- Ctrl-C

# In the prompt: the session is as it was. In the answer: it has what was answered.
puzzlekv-run "$model" --raw-prompt -p '1, 2, 3, 4, 5, 6,' -n 4000 --session "$work/ended" \
    > "$work/text" 2> "$work/err" &
wait_ready $! "$work/text"
kill -INT $!
wait $!
same 'status after Ctrl-C in an answer' $? 130
printf '1, 2, 3, 4, 5, 6,%s' "$(cat "$work/text")" > "$work/prompt"
document ended "$model" --raw-prompt -f "$work/prompt" -n 2 --session "$work/ended"
[ "$(value ended reused_tokens)" -gt 0 ] || fail 'nothing is reused after Ctrl-C in an answer'
head -c 12000 "$source/COPYING" > "$work/prompt"
cat "$source/README.md" >> "$work/prompt"
head -c 20000 "$work/prompt" > "$work/long_prompt"
cp "$work/two" "$work/s"
puzzlekv-run "$model" -f "$work/long_prompt" -n 1 --session "$work/s" > "$work/text" \
    2> "$work/err" &
wait_ready $! /nonexistent
kill -INT $!
wait $!
same 'status after Ctrl-C in a prompt' $? 130
cmp "$work/two" "$work/s" || fail 'Ctrl-C in a prompt changed the session'
[ "$(ls "$work"/s.* 2> /dev/null)" = "" ] || fail "left behind: $(ls "$work"/s.*)"

# ---- What is refused

# User data that someone made: ids that the model does not have, turns that end early.
cp "$work/two" "$work/s"
"$PUZZLEKV_BUILD/tests/session_edit" "$work/s" 4 ff ff ff 7f || fail 'session_edit'
unchanged refuse 1 "$work/s: token id 2147483647 " "$model" -i --session "$work/s"
unchanged refuse 1 "$work/s: token id 2147483647 " "$model" -p x --session "$work/s"
cp "$work/two" "$work/s"
tokens=$(($(od -An -t u8 -j 104 -N 8 "$work/s")))
"$PUZZLEKV_BUILD/tests/session_edit" "$work/s" $((4 * tokens)) ff ff ff ff || fail 'session_edit'
unchanged refuse 1 "$work/s: user data: the conversation ends in a turn" "$model" -i \
    --session "$work/s"
cp "$work/two" "$work/s"

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

# A disk that is full: the answer is there, the old session too.
(
    trap '' XFSZ
    ulimit -f 16
    puzzlekv-run "$model" -p x -n 1 --session "$work/two" > "$work/out" 2> "$work/err"
)
same 'status with a full disk' $? 1
grep -q "^puzzlekv-run: $work/two: write: File too large" "$work/err" || fail "$(cat "$work/err")"
[ -s "$work/out" ] || fail 'no answer with a full disk'
[ "$(ls "$work"/two.* 2> /dev/null)" = "" ] || fail "left behind: $(ls "$work"/two.*)"
echo "$third" | chat again --session "$work/two" || fail "$(cat "$work/err")"
cmp "$work/again" "$work/turn3" || fail 'another answer after a full disk'

# One that cannot be written: the answer is there, and the status says so.
puzzlekv-run "$model" -p x -n 1 --session "$work/none/s" > "$work/out" 2> "$work/err"
same 'status without a folder' $? 1
[ -s "$work/out" ] || fail 'no answer without a folder'
grep -q "^puzzlekv-run: $work/none/s: " "$work/err" || fail "$(cat "$work/err")"

[ $failures -eq 0 ]
