#!/bin/sh
# SPDX-License-Identifier: MIT
# mandoc finds nothing wrong with the manual pages, and groff, which most distributions show them
# with, breaks their lines within 80 columns; tables that are too wide fall to pieces there.
set -eu

if ! command -v mandoc > /dev/null; then
    echo "manual_lint.sh: mandoc is not there (Debian package mandoc), so no page was looked at"
    exit 77
fi
cd "${PUZZLEKV_SOURCE:?}/man"
# Which other pages are installed here, and whether mandoc knows them, is not the pages' matter;
# manual.sh looks for their own references.
found=$(mandoc -T lint -W style ./*.[1-9] 2>&1 |
    grep -v -e ': STYLE: referenced manual not found: ' -e '^mandoc: outdated mandoc.db lacks ' || :)
if [ -n "$found" ]; then
    echo "$found"
    exit 1
fi
if command -v groff > /dev/null; then
    found=$(groff -mdoc -Tutf8 -wbreak -rLL=78n -z ./*.[1-9] 2>&1 || :)
    if [ -n "$found" ]; then
        echo "$found"
        exit 1
    fi
else
    echo "groff is not there (Debian package groff-base), so lines were not looked at"
fi
