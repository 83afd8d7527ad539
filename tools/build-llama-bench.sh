#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds llama.cpp's llama-bench for this processor, to compare with, in a folder outside the
# repository, and prints its path. Its source is the copy in llama-cpp-python on PyPI, which also has
# CMake and Ninja. Needs pip and a C++ compiler.
#   tools/build-llama-bench.sh FOLDER
set -eu

version=0.3.36
usage() {
    echo "usage: build-llama-bench.sh FOLDER" >&2
    exit 2
}

[ $# -eq 1 ] || usage
case $1 in
-*) usage ;;
esac
mkdir -p "$1"
folder=$(cd "$1" && pwd)
program=$folder/build/bin/llama-bench

if [ ! -x "$program" ]; then
    {
        pip="python3 -m pip --quiet --disable-pip-version-check --no-cache-dir"
        [ -x "$folder/python/bin/ninja" ] ||
            $pip install --target "$folder/python" cmake ninja
        PYTHONPATH=$folder/python PATH=$folder/python/bin:$PATH
        export PYTHONPATH PATH
        [ -f "$folder/llama_cpp_python-$version.tar.gz" ] ||
            $pip download --no-deps --no-binary=llama-cpp-python --dest "$folder" \
                "llama-cpp-python==$version"
        tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
        # GCC 12 believes that 8 bytes of a tile configuration are read, and drops the other 56:
        # an illegal instruction where there is AMX.
        sed -i 's/^ *_tile_loadconfig(&tc);/__asm__ volatile("" : : "m"(tc));\n&/' \
            "$folder/llama_cpp_python-$version/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
        cmake -S "$folder/llama_cpp_python-$version/vendor/llama.cpp" -B "$folder/build" -G Ninja \
            -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
            -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
        ninja -C "$folder/build" llama-bench
    } >&2
fi
echo "$program"
