#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds in a folder of its own; run again, builds what has changed.
#   tools/build.sh FOLDER [CONFIGURE-ARGUMENT...]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
shift

[ -x "$root/configure" ] || "$root/bootstrap"
mkdir -p "$folder"
cd "$folder"
"$root/configure" --disable-static "$@"
make -j"$(nproc)"
