#!/bin/sh
# SPDX-License-Identifier: MIT
# puzzlekv-run -i: conversations typed at a terminal and sent through a pipe, with the real model.
set -u

tool=puzzlekv-run
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"
pty_run=${PUZZLEKV_BUILD:?}/tests/pty_run

need_model

TERM=xterm
export TERM
system='You answer questions about the countries of Europe, their people and their capitals, in one sentence.'
first='Answer in one short sentence.
What is the capital of France?'
second='And of Italy?'
third='Which of the two has more people?'

# typed NAME STATUS ARGUMENT...: types the script on standard input to a chat. Its answers go to
# $work/NAME.text, everything else to $work/NAME.shown.
typed() {
    name=$1 status=$2
    shift 2
    # shellcheck disable=SC2016 # the inner shell's
    "$pty_run" "$work/$name.tty" sh -c 'out=$1; shift; exec puzzlekv-run "$@" > "$out"' sh \
        "$work/$name.text" "$model" -i "$@"
    same "$name: status" $? "$status"
    tr -d '\r' < "$work/$name.tty" > "$work/$name.shown"
}

# piped NAME ARGUMENT...: the same through a pipe.
piped() {
    name=$1
    shift
    puzzlekv-run "$model" -i "$@" > "$work/$name.text" 2> "$work/$name.shown" ||
        fail "$name: status $?: $(cat "$work/$name.shown")"
}

# row NAME N ROW: the first word of a row in the Nth statistics.
row() {
    sed -n "s/^  $3  *\([^ ]*\).*/\1/p" "$work/$1.shown" | sed -n "$2p"
}

# tokens TEXT: how many it has.
tokens() {
    printf '%s' "$1" > "$work/tokens.txt"
    puzzlekv-eval tokenize "$model" -f "$work/tokens.txt" | tr ',' '\n' | grep -c '[0-9]'
}

# turn ROLE TEXT and answer: as the model's template writes them.
turn() {
    printf '<|im_start|>%s\n%s<|im_end|>\n' "$1" "$2"
}
answer='<|im_start|>assistant
'

# ---- Three turns ---------------------------------------------------------------------------------

# The first message is pasted where the terminal's marks are understood.
block='"""\rAnswer in one short sentence.\rWhat is the capital of France?\r"""\r'
if grep -q '^#define HAVE_LIBEDIT 1' "$PUZZLEKV_BUILD/config.h"; then
    block='\e[200~Answer in one short sentence.\rWhat is the capital of France?\r\e[201~\r'
fi
typed talk 0 --system "$system" --stats << END
expect /help lists the commands
expect >
send $block
expect pages
expect >
send $second\r
expect pages
expect >
send $third\r
expect pages
expect >
send /stats\r
expect pages
expect >
send /nonsense\r
expect no such command
expect >
send /help\r
expect /reset
expect Ctrl-C
expect >
send /reset\r
expect is forgotten
expect >
send $second\r
expect pages
expect >
send \cd
END
same 'answers' "$(wc -l < "$work/talk.text")" 4
text1=$(sed -n 1p "$work/talk.text") text2=$(sed -n 2p "$work/talk.text")

# A turn reads what is new: the end of the answer before it and its own block.
end_of_turn='<|im_end|>
'
head=$(turn system "$system" && echo x)
head=${head%x}
block1=$(turn user "$first" && printf '%sx' "$answer")
block2=$(turn user "$second" && printf '%sx' "$answer")
block3=$(turn user "$third" && printf '%sx' "$answer")
same 'tokens of turn 1' "$(row talk 1 'prompt tokens')" "$(tokens "$head${block1%x}")"
same 'tokens of turn 2' "$(row talk 2 'prompt tokens')" "$(tokens "$end_of_turn${block2%x}")"
same 'tokens of turn 3' "$(row talk 3 'prompt tokens')" "$(tokens "$end_of_turn${block3%x}")"

# What the cache holds is the whole conversation as the template writes it.
whole="$head${block1%x}$text1$end_of_turn${block2%x}$text2$end_of_turn${block3%x}"
cached=$(row talk 3 'cached tokens')
same 'tokens in the cache' $((cached - $(row talk 3 'generated tokens') + 1)) "$(tokens "$whole")"
same '/stats' "$(row talk 4 'cached tokens')" "$cached"
[ "$cached" -gt 96 ] || fail "the conversation has only $cached tokens"

# /reset forgets all of it.
same 'tokens after /reset' "$(row talk 5 'prompt tokens')" "$(tokens "$head${block2%x}")"

# Through a pipe, and with the first message as an option, the answers are the same.
printf '"""\n%s\n"""\n\n%s\r\n%s\n/reset\n%s' "$first" "$second" "$third" "$second" |
    piped pipe --system "$system"
cmp "$work/talk.text" "$work/pipe.text" || fail 'the pipe gives other answers'
[ "$(wc -l < "$work/pipe.shown")" -eq 1 ] || fail "through a pipe: $(cat "$work/pipe.shown")"
printf '%s\n/quit\nnever read\n' "$second" | piped option --system "$system" -p "$first"
same 'answers with -p' "$(cat "$work/option.text")" "$text1
$text2"

# With a dense cache, reading the whole conversation at once gives the same last answer.
printf '%s\n%s' "$second" "$third" | piped dense --system "$system" -p "$first" --kv raw
sed -n 3p "$work/dense.text" > "$work/last"
text1=$(sed -n 1p "$work/dense.text") text2=$(sed -n 2p "$work/dense.text")
printf '%s' "$head${block1%x}$text1$end_of_turn${block2%x}$text2$end_of_turn${block3%x}" \
    > "$work/whole"
puzzlekv-run "$model" --raw-prompt -f "$work/whole" --kv raw > "$work/once"
cmp "$work/once" "$work/last" || fail 'the conversation read at once gives another answer'

# ---- Ctrl-C --------------------------------------------------------------------------------------

# Raw text is continued. Ctrl-C ends the answer, drops a line that is being typed, and ends the
# program when it comes twice.
"$pty_run" "$work/ctrl_c.tty" puzzlekv-run "$model" -i --raw-prompt << 'END'
expect >
send 1, 2, 3, 4, 5, 6,\r
expect 12, 13
send \cc
expect >
send /stats\r
expect interrupted
expect pages
expect >
send dropped\cc
expect Ctrl-C again
expect >
send /help\r
expect /reset
expect >
send \cc
expect Ctrl-C again
expect >
send \cc
END
same 'status after Ctrl-C at two prompts' $? 130
# The end of an answer wipes nothing of it away.
grep -q '12, 13[^[]*$' "$work/ctrl_c.tty" || fail "an interrupted answer: $(cat "$work/ctrl_c.tty")"

# A request to end is heard at a prompt, and the terminal's modes are then what they were.
cat > "$work/chat.sh" << 'END'
echo $$ > "$1"
exec puzzlekv-run "$2" -i
END
: > "$work/end.tty"
# shellcheck disable=SC2016 # the inner shell's
"$pty_run" "$work/end.tty" sh -c 'stty -a; sh "$@"; echo "status $?"; stty -a' sh \
    "$work/chat.sh" "$work/pid" "$model" < /dev/null &
i=0
while [ $i -lt 600 ] && ! grep -q '> ' "$work/end.tty"; do
    sleep 0.1
    i=$((i + 1))
done
kill -TERM "$(cat "$work/pid")"
wait $!
grep -q '^status 130' "$work/end.tty" || fail "SIGTERM at a prompt: $(cat "$work/end.tty")"
same 'modes of the terminal' "$(grep -c '^isig icanon .* echo ' "$work/end.tty")" 2

# ---- Limits --------------------------------------------------------------------------------------

# A message for which there is no room is refused, an answer for which there is none is cut, and
# what came before stays.
{
    echo 'Say yes.'
    i=0
    while [ $i -lt 50 ]; do
        printf 'and yes '
        i=$((i + 1))
    done
    printf '\nSay no.\n/reset\nSay yes.\n'
} | piped full --ctx 60 -n 4 --stats
grep -q 'the message does not fit: .* the context 60; /reset begins a new one' "$work/full.shown" ||
    fail "a full context: $(cat "$work/full.shown")"
same 'tokens after a message that does not fit' "$(row full 2 'prompt tokens')" \
    "$(($(tokens "$end_of_turn$(turn user 'Say no.')
$answer") + 1))"
same 'answer after /reset' "$(sed -n 1p "$work/full.text")" "$(tail -n 1 "$work/full.text")"
echo 'Once upon a time' | piped cut --ctx 20 --raw-prompt
grep -q 'the context of 20 tokens is full; /reset begins a new conversation' "$work/cut.shown" ||
    fail "no more room: $(cat "$work/cut.shown")"

# What is not UTF-8 is refused, and the conversation goes on.
printf 'a\377b\n/stats\n' | piped bytes
grep -q 'message: not valid UTF-8 at byte offset 1' "$work/bytes.shown" ||
    fail "not UTF-8: $(cat "$work/bytes.shown")"
same 'tokens after what is not UTF-8' "$(row bytes 1 'cached tokens')" 0

[ $failures -eq 0 ] || exit 1
