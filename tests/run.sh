#!/bin/sh
# SPDX-License-Identifier: MIT
# From a bare Debian or Ubuntu to test results: installs what is missing, builds in build/, fetches
# the model that some tests need and runs all tests. None may be skipped.
#   tests/run.sh [CONFIGURE-ARGUMENT...]
set -eu
cd "$(dirname "$0")/.."

tools/install-deps.sh
tools/build.sh build "$@"
tools/fetch-model.sh smollm2
tests/check.sh build
