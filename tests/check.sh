#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs make check in a build folder; the last line is "N passed, N failed". A Check suite counts as
# its checks, any other test as one. A skipped test counts as failed unless --allow-skips is given.
#   tests/check.sh [--allow-skips] FOLDER
set -eu

allow_skips=0
if [ "$1" = --allow-skips ]; then
    allow_skips=1
    shift
fi
folder=$1

find "$folder/tests" -name '*.trs' -delete
status=0
# Tests use all cores themselves: built side by side, they run one after the other.
{ make -C "$folder" -j"$(nproc)" check TESTS= && make -C "$folder" check; } || status=1

count_results()
{
    find "$folder/tests" -name '*.trs' | awk -v status="$status" -v allow_skips="$allow_skips" '
    {
        results = $0
        log_file = $0
        sub(/trs$/, "log", log_file)
        result = "ERROR"
        while ((getline line < results) > 0)
            if (line ~ /^:global-test-result:/)
                result = substr(line, length(":global-test-result: ") + 1)
        if (result == "SKIP" && allow_skips)
            next
        checks = failures = 0
        while ((getline line < log_file) > 0) {
            if (line ~ /^[0-9]+%: Checks: /) {
                split(line, number, /[^0-9]+/)
                checks += number[2]
                failures += number[3] + number[4]
            }
        }
        if (checks == 0)
            checks = 1
        # A suite can also fail outside its checks: a crash at exit, a leak.
        if (result != "PASS" && failures == 0)
            failures = 1
        passed += checks - failures
        failed += failures
    }
    END {
        if (status != 0 && failed == 0 || passed + failed == 0)
            failed++
        printf "%d passed, %d failed\n", passed, failed
    }'
}

find "$folder/tests" -name '*.trs' -exec grep -lE '^:global-test-result: (FAIL|ERROR)' {} + |
    while read -r results; do
        echo "--- ${results%.trs}: the end of its log"
        tail -n 25 "${results%.trs}.log"
    done
total=$(count_results)
echo "$total"
case $total in
*", 0 failed") ;;
*) exit 1 ;;
esac
