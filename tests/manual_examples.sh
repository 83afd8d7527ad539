#!/bin/sh
# SPDX-License-Identifier: MIT
# The program in the EXAMPLES of every page of section 3 compiles against the library as built,
# runs, and prints what the page says: nothing, where it says nothing.
set -eu
# shellcheck source=tests/example.sh
. "${PUZZLEKV_SOURCE:?}/tests/example.sh"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# literal PAGE N: the Nth literal display in the EXAMPLES.
literal() {
    awk -v wanted="$2" '
        /^\.Sh / { examples = $2 == "EXAMPLES" }
        !examples { next }
        /^\.Bd -literal/ { inside = ++displays; next }
        /^\.Ed/ { inside = 0 }
        inside == wanted
    ' "$1" | sed -e 's/\\e/\\/g' -e 's/^\\&//'
}

failures=0
n=0
for page in "$PUZZLEKV_SOURCE"/man/*.3; do
    name=$(basename "$page" .3)
    literal "$page" 1 > "$folder/$name.c"
    literal "$page" 2 > "$folder/expected"
    n=$((n + 1))
    if ! build_example "$folder/$name.c" "$folder/$name" ||
        ! "$folder/$name" > "$folder/printed" || ! diff "$folder/expected" "$folder/printed"; then
        echo "FAIL: the example of $name(3)"
        failures=$((failures + 1))
    fi
done
echo "$n programs, $failures failures"
[ $n -gt 0 ] && [ $failures -eq 0 ]
