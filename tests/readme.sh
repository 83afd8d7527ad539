#!/bin/sh
# SPDX-License-Identifier: MIT
# The C program in README.md compiles against the library as built, and runs.
set -eu
# shellcheck source=tests/example.sh
. "${PUZZLEKV_SOURCE:?}/tests/example.sh"

check_readme_example "$PUZZLEKV_SOURCE/README.md" build_example
