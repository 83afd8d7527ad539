#!/bin/sh
# SPDX-License-Identifier: MIT
# gpu-check.sh FOLDER test|measure: the CUDA backend on an NVIDIA GPU, from a plain checkout, with
# nvcc and g++ alone: no autotools, BLAS or network. Each part takes less than 4 minutes on an H200;
# FOLDER/test.json and FOLDER/measure.json hold what came out, and together are
# FOLDER/gpu-check.json.
#   test      random walks on CPU and GPU with equal digests, a graph over 1,000 tokens, faults; the
#             runner's products and graphs, where there is cuBLAS; then a small case under
#             compute-sanitizer, where that works
#   measure   llama-3.1-8b's shape: factorizing, beside cuSOLVER where that is; decode attention at
#             32K tokens over all layers' storage; prompts of 32K tokens and decoding at 16K and
#             128K, by the whole model with random weights, where there is cuBLAS; memory
# A part that fails says so in its file, and leaves what it had found in FOLDER/PART.partial.
# With PUZZLEKV_GPU_CHECK=host it runs without a GPU, on tests/cuda_host and in small, to test
# itself; PUZZLEKV_GPU_ARCH (sm_90) is what nvcc compiles for.
set -eu

usage() {
    echo "usage: gpu-check.sh FOLDER test|measure" >&2
    exit 2
}

[ $# -eq 2 ] || usage
case $2 in
test | measure) part=$2 ;;
*) usage ;;
esac
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
trap 'exit 1' HUP INT TERM
arch=${PUZZLEKV_GPU_ARCH:-sm_90}
jobs=$(nproc)
host=${PUZZLEKV_GPU_CHECK:-}
cd "$source"
rm -f "$folder/$part.json" "$folder/$part.partial" "$folder/gpu-check.json"

# Toolkits are installed where neither shell nor loader look.
PATH=$PATH:/usr/local/cuda/bin
export PATH
if [ -z "$host" ]; then
    toolkit=$(dirname "$(dirname "$(command -v nvcc)")")
    LD_LIBRARY_PATH=$toolkit/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi

# LAPACK's solver is not used, and digests are only compared: stand-ins do where there is none.
stand_ins="-Itests/gpu_check/lapacke"
echo '#include <xxhash.h>' | gcc -E - >/dev/null 2>&1 ||
    stand_ins="$stand_ins -Itests/gpu_check/xxhash"
: >"$objects/config.h"

# The runner's module, which needs cuBLAS to be built and to start.
has_cublas() {
    echo '#include <cublas_v2.h>
        int main(void) { return cublasGetCudartVersion() == 0; }' >"$objects/probe.cu"
    nvcc -o "$objects/probe" "$objects/probe.cu" -lcublas >"$objects/probe.log" 2>&1 &&
        "$objects/probe" >>"$objects/probe.log" 2>&1
}
models=
models_flags=
if [ "$host" ] || has_cublas; then
    models="tools/runner/cuda/device.cu tools/runner/cuda/forward.cu tools/runner/cuda/kernels.cu
        tests/gpu_check/models.cu"
    models_flags='-DHAVE_MODELS -Itools/runner/cuda -Itools'
else
    echo "gpu-check.sh: no models: there is no cuBLAS:" >&2
    cat "$objects/probe.log" >&2
fi

# One line a source: its object, then the command without both.
commands() {
    for file in lib/*.c cpu/attention.c cpu/backend.c cpu/codec_*.c cpu/dispatch.c cpu/elements.c \
        cpu/factorize.c cpu/store.c cpu/kernels_generic.c cpu/solver_generic.c; do
        echo "$file gcc -std=gnu11 -O2 -ffp-contract=off -fopenmp -Wno-psabi" \
            "-I$objects -Ilib -iquote cpu $stand_ins -DPKGLIBDIR='\"/nowhere\"'"
    done
    for file in gpu/*.cu tests/gpu_check/gpu_check.cu $models; do
        if [ "$host" ]; then
            echo "$file g++ -std=c++20 -O1 -ffp-contract=off -x c++" \
                "-iquote tests/cuda_host -iquote gpu -Ilib $models_flags"
        else
            echo "$file nvcc -std=c++20 -O3 -fmad=false -arch=$arch" \
                "-Igpu/toolkit -Igpu -Ilib $models_flags"
        fi
    done
    [ -z "$models" ] || echo "tools/shapes.c gcc -std=gnu11 -O2 -Ilib"
    [ -z "$host" ] || for file in tests/cuda_host/*.cc; do
        echo "$file g++ -std=c++20 -O2 -iquote tests/cuda_host -Ilib"
    done
}

commands | while read -r file command; do
    echo "$command -c -o $objects/$(echo "$file" | tr / -).o $file || exit 255" # and none after it
done | tr '\n' '\0' | xargs -0 -r -n 1 -P "$jobs" sh -c
if [ "$host" ]; then
    g++ -o "$objects/gpu_check" "$objects"/*.o -fopenmp -llapacke -lopenblas -ldl -lm
else
    # shellcheck disable=SC2086 # no word where there is none
    nvcc -arch="$arch" -o "$objects/gpu_check" "$objects"/*.o ${models:+-lcublas} -lgomp -ldl -lm
fi

small=${host:+small}
status=0
# shellcheck disable=SC2086 # no word where there is none
OMP_NUM_THREADS=4 timeout 210 "$objects/gpu_check" "$part" $small >"$folder/$part.partial" \
    2>"$folder/$part.log" || status=$?
[ $status -ne 124 ] || echo 'not done in 210 s' >>"$folder/$part.log"
if [ $status -ne 0 ]; then
    cat "$folder/$part.log" >&2
    printf '{"failed": "%s"}\n' "$(tail -n 1 "$folder/$part.log" | tr -d '"\\\000-\037')" \
        >"$folder/$part.json"
    exit 1
fi
cat "$folder/$part.log" >&2

# It asks for more memory than there is on purpose, and looks itself at what calls return.
memcheck='not run'
if [ "$part" = test ] && [ -z "$host" ] && command -v compute-sanitizer >/dev/null; then
    status=0
    timeout 90 compute-sanitizer --report-api-errors no --error-exitcode 9 "$objects/gpu_check" \
        test small >"$folder/memcheck.log" 2>&1 || status=$?
    case $status in
    0) memcheck=clean ;;
    9) memcheck=errors ;;
    124) memcheck='not done in 90 s' ;;
    *) # gpu_check began, or the sanitizer did not
        if grep -q '"device"' "$folder/memcheck.log"; then
            memcheck="failed with status $status"
        else
            memcheck='does not work here'
        fi
        ;;
    esac
fi
if [ "$part" = test ]; then
    sed "\$ s/.*/,  \"memcheck\": \"$memcheck\"\n}/" "$folder/test.partial" >"$folder/test.json"
else
    cp "$folder/measure.partial" "$folder/measure.json"
fi
rm "$folder/$part.partial"
if [ -f "$folder/test.json" ] && [ -f "$folder/measure.json" ]; then
    {
        echo '{"test":'
        cat "$folder/test.json"
        echo ', "measure":'
        cat "$folder/measure.json"
        echo '}'
    } >"$folder/gpu-check.json"
fi
cat "$folder/$part.json"
case $memcheck in
errors | failed*) exit 1 ;;
esac
