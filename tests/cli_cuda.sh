#!/bin/sh
# SPDX-License-Identifier: MIT
# --backend from the command line: where there is no module, no driver, and, with the modules of
# tests/cuda_host, where there is a device. What a device computes is check_transformer's.
set -u

tool=puzzlekv-eval
# shellcheck source=tests/cli.sh
. "${PUZZLEKV_SOURCE:?}/tests/cli.sh"

data=$source/tests/data/tiny-qwen3
echo '[1, 5, 9, 200, 17, 3, 44, 101, 7]' > "$work/ids"

# logits NAME BACKEND OPTION...: those of the tiny model into $work/NAME.f32.
logits() {
    name=$1 backend=$2
    shift 2
    document "$name" logits "$data" --tokens "$work/ids" --prefill 5 --kv puzzle -o "$work/$name.f32" \
        --backend "$backend" "$@"
}

# ---- Wrong whatever is there --------------------------------------------------------------------

refuse 2 'is not one of auto, cpu, cuda' logits none --tokens x --prefill 5 --kv raw -o x --backend gpu
refuse 2 '--backend cuda, --kv kivi: only raw, puzzle' logits none --tokens x --prefill 5 --kv kivi \
    -o x --backend cuda
tool=puzzlekv-bench
refuse 2 '--backend cuda, --kv h2o: only raw, puzzle' model --shape smollm2-135m --prompt-tokens 9 \
    --predict 2 --kv h2o --backend cuda
refuse 2 '--backend cuda, --solver lapack: a device has none' factorize \
    --shape smollm2-135m --pages 9 --solver batched --solver lapack --backend cuda
refuse 2 '--backend: ' storage --shape smollm2-135m --tokens 9 --backend cpu

# ---- No module ----------------------------------------------------------------------------------

PUZZLEKV_MODULES=$work
export PUZZLEKV_MODULES
tool=puzzlekv-eval
no_module="--backend cuda: there is no $work/puzzlekv-runner-cuda.so, which"
refuse 1 "$no_module" logits "$data" --tokens "$work/ids" --prefill 5 --kv raw -o "$work/no.f32" \
    --backend cuda
[ ! -e "$work/no.f32" ] || fail 'logits of no device'
logits cpu cpu
logits auto auto
cmp "$work/cpu.f32" "$work/auto.f32" || fail 'auto is not the CPU without a module'
refuse 1 "$no_module" ppl "$data" -f "$work/ids" --tokens 9 --prefill 5 \
    --backend cuda
echo '{}' > "$work/rows"
refuse 1 "$no_module" tasks "$data" "$work/rows" --backend cuda
tool=puzzlekv-bench
for command in 'attention --tokens 64' 'factorize --pages 9' 'model --prompt-tokens 9 --predict 2'; do
    # shellcheck disable=SC2086 # words
    refuse 1 "$no_module" $command --shape smollm2-135m --backend cuda
done

same 'backends without a module' "$(puzzlekv-bench --version | grep '^backends:')" 'backends: cpu'

# ---- What is no module --------------------------------------------------------------------------

echo 'no module' > "$work/puzzlekv-runner-cuda.so"
refuse 1 'puzzlekv-runner-cuda.so: ' attention --tokens 64 --shape smollm2-135m --backend cuda
rm "$work/puzzlekv-runner-cuda.so"

# ---- No driver, or no device --------------------------------------------------------------------

if [ -e "$PUZZLEKV_BUILD/gpu/puzzlekv-runner-cuda.so" ] && [ ! -e /dev/nvidiactl ]; then
    PUZZLEKV_MODULES=$PUZZLEKV_BUILD/gpu
    refuse 1 '--backend cuda: no CUDA device: ' attention --tokens 64 --shape smollm2-135m \
        --backend cuda
    same 'backends without a device' "$(puzzlekv-run --version | grep '^backends:')" 'backends: cpu'
    tool=puzzlekv-eval
    logits auto auto
    cmp "$work/cpu.f32" "$work/auto.f32" || fail 'auto is not the CPU without a device'
fi

# ---- A device that is none ----------------------------------------------------------------------

if [ -e "$PUZZLEKV_BUILD/tests/cuda_host/modules/puzzlekv-cuda.so" ]; then
    PUZZLEKV_MODULES=$PUZZLEKV_BUILD/tests/cuda_host/modules
    for tool in puzzlekv-run puzzlekv-bench puzzlekv-eval; do
        same "backends of $tool" "$($tool --version | grep '^backends:')" 'backends: cpu, cuda (sm_90)'
    done
    tool=puzzlekv-eval
    for backend in cuda auto; do
        logits cuda $backend
        same "isa with $backend" "$(value cuda isa)" sm_90
        same 'bytes of logits' "$(wc -c < "$work/cuda.f32")" "$(wc -c < "$work/cpu.f32")"
    done
    logits cpu cpu
    same 'bytes of the cache' "$(value cuda results.0.kv_bytes)" "$(value cpu results.0.kv_bytes)"
    # The library's own alone are on a device.
    document h2o logits "$data" --tokens "$work/ids" --prefill 5 --kv h2o -o "$work/h2o.f32"
    [ "$(value h2o isa)" != sm_90 ] || fail 'h2o on a device'
    tool=puzzlekv-bench
    document attention attention --shape smollm2-135m --tokens 96 --repeats 1 --backend cuda
    same 'isa of attention' "$(value attention isa)" sm_90
    same 'bytes attended' "$(value attention results.0.bytes_per_token_layer)" $((96 * 3 * 2 * 64 * 2))
    document factorize factorize --shape smollm2-135m --pages 6 --repeats 1 --backend cuda
    same 'solver' "$(value factorize results.0.solver)" batched
    case $(value factorize results.0.excess_error) in
    *e-0[789] | *e-1? | -* | 0.0) ;;
    *) fail "excess error $(value factorize results.0.excess_error)" ;;
    esac
    document model model --shape smollm2-135m --depth 40 --prompt-tokens 9 --predict 3 --repeats 1 \
        --backend cuda
    same 'isa of model' "$(value model isa)" sm_90
    refuse 1 'the cache of 100006 tokens: CUDA device 0: out of memory: dense page slots: ' model \
        --shape llama-3.1-8b --depth 100000 --prompt-tokens 4 --predict 2 --kv raw --backend cuda
    # A model's weights are on the device, and its tokens are decoded by a graph.
    document tiny model "$data" --prompt-tokens 70 --predict 30 --repeats 1 --backend cuda
    same 'ratio of raw' "$(value tiny results.0.kv_ratio)" 1.0
fi

echo "$failures failures"
[ $failures -eq 0 ]
