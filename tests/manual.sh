#!/bin/sh
# SPDX-License-Identifier: MIT
# The library's header, its version script and the manual pages of section 3 say the same: the same
# functions with the same parameters, and every type, field, constant and macro has its place in a
# page. The pages' references exist, and every function is installed as a page.
set -eu

header=${PUZZLEKV_SOURCE:?}/lib/puzzlekv.h
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$PUZZLEKV_SOURCE/man"
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# The header's own code without what it includes, a declaration a line.
$CC -E "$header" | awk '
    /^# [0-9]+ "/ { own = $3 ~ /puzzlekv\.h"$/; next }
    own { gsub(/[ \t]+/, " "); printf "%s ", $0 }' |
    awk '
    {
        for (i = 1; i <= length($0); i++) {
            c = substr($0, i, 1)
            depth += (c == "{") - (c == "}")
            printf "%s", c == ";" && depth == 0 ? ";\n" : c
        }
    }' | sed 's/^ *//' > "$scratch/header"

# ---- Functions, spaces left out

grep -v '^typedef' "$scratch/header" | grep -o '.*pkv_[a-z0-9_]*(.*);' | tr -d ' ' |
    sort > "$scratch/declared"
awk '
    function text(from) {
        line = $0
        for (i = 1; i < from; i++)
            sub(/^[^ ]+ +/, "", line)
        return line
    }
    $1 == ".Ft" { type = text(2); gsub(/"/, "", type) }
    $1 == ".Fn" && type != "" {
        parameters = NF > 2 ? text(3) : ""
        gsub(/" "/, ",", parameters)
        gsub(/"/, "", parameters)
        print type $2 "(" parameters ");"
        type = ""
    }
    $1 == ".Fo" { name = $2; parameters = ""; inside = 1 }
    $1 == ".Fa" && inside {
        parameter = text(2)
        gsub(/"/, "", parameter)
        parameters = parameters (parameters == "" ? "" : ",") parameter
    }
    $1 == ".Fc" { print type name "(" parameters ");"; type = ""; inside = 0 }
' ./*.3 | tr -d ' ' | sort > "$scratch/synopses"
echo "< declared in puzzlekv.h, > in a SYNOPSIS:"
diff "$scratch/declared" "$scratch/synopses" || fail "prototypes differ"

sed 's/.*\(pkv_[a-z0-9_]*\)(.*/\1/' "$scratch/declared" | sort > "$scratch/functions"
[ -s "$scratch/functions" ] || fail "found no function in puzzlekv.h"

sed -n '/global:/,/local:/s/.*\(pkv_[a-z0-9_*]*\);/\1/p' ../lib/puzzlekv.map |
    sort > "$scratch/mapped"
echo "< declared in puzzlekv.h, > in puzzlekv.map:"
diff "$scratch/functions" "$scratch/mapped" || fail "the version script differs"

for page in *.3; do
    sed -n '/^\.Sh NAME/,/^\.Nd/s/^\.Nm \([a-z0-9_]*\).*/\1/p' "$page" > "$scratch/names"
    grep -qx "$(basename "$page" .3)" "$scratch/names" || fail "$page: is not one of its own names"
    grep '^pkv_' "$scratch/names" || :
done | sort > "$scratch/named"
echo "< declared in puzzlekv.h, > in a NAME:"
diff "$scratch/functions" "$scratch/named" || fail "names differ"

# ---- Types, fields and constants

cat ./*.3 > "$scratch/pages"
{
    sed -nE 's/^typedef struct [a-z_]+ \{(.*)\}.*/\1/p' "$scratch/header" | tr ';' '\n'
    sed -nE 's/^typedef enum [a-z_]+ \{(.*)\}.*/\1/p' "$scratch/header" | tr ',' '\n' |
        sed 's/=.*//'
    sed -nE 's/^typedef .* ([a-z_]+);/\1/p' "$scratch/header"
    sed -nE 's/^#define (PKV_[A-Z_]+) .*/\1/p' "$header"
} | sed -e 's/^ *//' -e 's/ *$//' -e 's/\[.*//' -e '/^$/d' > "$scratch/terms"
[ "$(grep -c PKV_ERROR_ "$scratch/terms")" -ge 8 ] || fail "found too few constants"
grep -q '^size_t layers$' "$scratch/terms" || fail "found no fields"
while read -r term; do
    grep -qwF -e "$term" "$scratch/pages" || fail "no page of section 3 has \"$term\""
done < "$scratch/terms"

# ---- References and installed pages

# `make check` may hand its own flags down.
(unset MAKEFLAGS MFLAGS && make -C "${PUZZLEKV_BUILD:?}" install-manual-links \
    DESTDIR="$scratch/root" man3dir=/man3) > "$scratch/log" 2>&1 ||
    fail "links: $(cat "$scratch/log")"
cp ./*.3 "$scratch/root/man3"
while read -r name; do
    page=$scratch/root/man3/$name.3
    [ ! -f "$page" ] || target=$(sed -n '1s/^\.so //p' "$page")
    if [ ! -f "$page" ] || [ ! -f "$scratch/root/${target:-man3/$name.3}" ]; then
        fail "$name is not installed as a page"
    fi
done < "$scratch/functions"

sed -nE 's/^\.(It )?Xr ([a-z_-]+) ([1-9]).*/\2.\3/p' ./*.[1-9] | grep -e puzzlekv -e '^pkv_' |
    sort -u |
    while read -r page; do
        [ -f "$page" ] || [ -f "$scratch/root/man3/$page" ] || echo "$page"
    done > "$scratch/dangling"
[ ! -s "$scratch/dangling" ] || fail "references to pages that are not there:" \
    "$(cat "$scratch/dangling")"

echo "$(wc -l < "$scratch/functions") functions, $(wc -l < "$scratch/terms") terms," \
    "$failures failures"
[ $failures -eq 0 ]
