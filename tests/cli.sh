# shellcheck shell=sh
# SPDX-License-Identifier: MIT
# What the command-line tests share. A test sets `tool`, the program's name, and sources this file.
# It counts in $failures, keeps its files in $work and says its result with its exit status.

: "${tool:?}"
source=${PUZZLEKV_SOURCE:?}
json_get=${PUZZLEKV_BUILD:?}/tests/json_get
model=${PUZZLEKV_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/puzzlekv/SmolLM2-135M-Instruct.Q4_1.gguf}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# refuse STATUS TEXT ARGUMENT...: nothing on standard output, one line with TEXT on standard error.
refuse() {
    status=$1 text=$2
    shift 2
    "$tool" "$@" > "$work/out" 2> "$work/err" < /dev/null
    got=$?
    if [ $got -ne "$status" ] || [ -s "$work/out" ] || [ "$(wc -l < "$work/err")" -ne 1 ] ||
        ! grep -q "^$tool: .*: ." "$work/err" || ! grep -qF -e "$text" "$work/err"; then
        fail "$tool $*: status $got, expected $status and \"$text\":"
        cat "$work/out" "$work/err"
    fi
}

# same WHAT A B
same() {
    [ "$2" = "$3" ] || fail "$1: \"$2\" is not \"$3\""
}

# document NAME ARGUMENT...: a command with --json into $work/NAME.json.
document() {
    name=$1
    shift
    "$tool" "$@" --json > "$work/$name.json" 2> "$work/err" < /dev/null ||
        fail "$tool $*: status $?: $(cat "$work/err")"
    [ ! -s "$work/err" ] || fail "$tool $*: on standard error: $(cat "$work/err")"
    "$json_get" "$work/$name.json" || fail "$tool $*: not one JSON document"
}

# value NAME PATH: of a document.
value() {
    "$json_get" "$work/$1.json" "$2"
}

# keys NAME: a document's outermost ones, each with a space after it.
keys() {
    "$json_get" --keys "$work/$1.json" | tr '\n' ' '
}

# compare_options LEAST: those in $work/help, at least LEAST, are those in the manual page.
compare_options() {
    sed -nE 's/^ +(-[a-zA-Z], )?--([a-z0-9-]+).*/\1\2/p' "$work/help" |
        sort -u > "$work/help_options"
    sed -nE 's/^\.It (Fl ([a-zA-Z]) , )?Fl -([a-z0-9-]+).*/-\2, \3/p' "$source/man/$tool.1" |
        sed 's/^-, //' | sort -u > "$work/man_options"
    [ "$(wc -l < "$work/help_options")" -ge "$1" ] || fail "--help: lists too few options"
    diff "$work/help_options" "$work/man_options" || fail "--help and the manual differ"
}

# compare_synopsis COMMAND: the options that a command ('': the program, which has none) lists in its
# help are those of its synopsis, with the same names of arguments.
compare_synopsis() {
    "$tool" ${1:+"$1"} --help | sed -nE -e 's/^  -([a-zA-Z]), --[a-z0-9-]+(( [A-Z]+)?).*/\1\2/p' \
        -e 's/^      --([a-z0-9-]+(( [A-Z]+)?)).*/\1/p' | sed -e '/^[hV]$/d' |
        sort > "$work/help_synopsis"
    sed -n '/^\.Sh SYNOPSIS/,/^\.Sh DESCRIPTION/p' "$source/man/$tool.1" | awk -v command="$1" '
        $1 == ".Nm" { mine = command == "" }
        $1 == ".Cm" { mine = $2 == command }
        mine {
            for (i = 1; i < NF; i++)
                if ($i ~ /^\.?Fl$/) {
                    sub(/^-/, "", $(i + 1))
                    print $(i + 1) ($(i + 2) == "Ar" ? " " $(i + 3) : "")
                }
        }' | sed -e '/^help$/d' -e '/^version$/d' | sort > "$work/man_synopsis"
    [ -s "$work/help_synopsis" ] || fail "$1 --help: lists no options"
    diff "$work/help_synopsis" "$work/man_synopsis" ||
        fail "the synopsis of $tool $1 differs from its --help"
}

# write_long_text FILE: more tokens than the real model's context.
write_long_text() {
    i=0
    while [ $i -lt 1000 ]; do
        echo '0 1 2 3 4 5 6 7 8 9'
        i=$((i + 1))
    done > "$1"
}

# wait_ready PROCESS FILE: waits until process $1 is the program and no longer the shell that starts it, until it catches
# SIGINT, and until file $2 has something in it.
wait_ready() {
    i=0
    while [ $i -lt 600 ]; do
        mask=$(sed -n -e '/^Name:/{/'"$tool"'/!q}' -e 's/^SigCgt:.*\(.\)$/\1/p' \
            "/proc/$1/status" 2> /dev/null)
        case $mask in
        [2367abef]) [ ! -e "$2" ] || [ -s "$2" ] && return ;;
        esac
        sleep 0.1
        i=$((i + 1))
    done
    fail "process $1 is not ready"
}

# Ends the test here where the real model is not there.
need_model() {
    [ ! -r "$model" ] || return 0
    echo "$model: not there, so the rest is skipped (tools/fetch-model.sh smollm2 gets it)"
    [ $failures -eq 0 ] && exit 77
    exit 1
}
