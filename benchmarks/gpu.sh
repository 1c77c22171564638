#!/usr/bin/env bash
# Everything that needs a GPU, for one H200 with 16 cores: `gpu.sh tests` and `gpu.sh benchmarks`, each below 9 minutes;
# without an argument both. PYTHON has torch, triton, deepspeed and pytest; results go to OUT.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
WHAT=${1:-all}
case $WHAT in tests | benchmarks | all) ;; *) echo "usage: gpu.sh [tests | benchmarks]"; exit 2 ;; esac
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
unset DS_ACCELERATOR
summary="$OUT/summary_$WHAT.txt"
: >"$summary"

# name, limit in seconds, command: its output to a log, a line to the summary
item() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    local verdict="failed ($status)"
    [ $status -eq 0 ] && verdict=passed
    [ $status -eq 5 ] && verdict="no such tests" && status=0 # pytest's
    [ $status -eq 124 ] && verdict="NOT FINISHED in $limit s"
    printf '%-20s %-24s %4d s  %s\n' "$name" "$verdict" $((SECONDS - start)) "$(tail -n 1 "$OUT/$name.log")" >>"$summary"
    return $status
}

gpu_tests() { # name, limit, arguments of pytest
    local name=$1 limit=$2
    shift 2
    item "$name" "$limit" env CUBLAS_WORKSPACE_CONFIG=:4096:8 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider "$@"
}

benchmark() { # name, limit, arguments
    local name=$1 limit=$2
    shift 2
    item "$name" "$limit" "$PYTHON" "$@"
}

item machine 60 "$PYTHON" -c "
import subprocess, torch, triton, deepspeed
from ds_kfac.ops import backends
print(subprocess.run('nvidia-smi; nvcc --version; git describe --always --dirty', shell=True, text=True,
                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout)
print('torch', torch.__version__, 'triton', triton.__version__, 'deepspeed', deepspeed.__version__)
print(backends.use(None, 'cuda'))" # builds the CUDA ops, before several processes want them
failed=$?

if [ "$WHAT" != benchmarks ]; then
    # beside each other: none of them is timed
    gpu_tests ops 400 tests/gpu/test_ops.py &
    pids=($!)
    gpu_tests modes 400 -s tests/gpu/test_modes.py &
    pids+=($!)
    for backend in triton cuda; do
        gpu_tests "sanitizer_$backend" 400 tests/gpu/test_sanitizer.py -k "$backend" &
        pids+=($!)
    done
    gpu_tests others 400 tests --ignore=tests/gpu &
    pids+=($!)
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
fi

if [ "$WHAT" != tests ]; then
    # one after the other: all of them are timed; with the first item their limits add up to 530 s
    benchmark sweep 110 benchmarks/kernels.py --device cuda --sweep syrk --seconds 0.05 --out "$OUT" || failed=1
    benchmark goals 90 benchmarks/kernels.py --device cuda --goals --models squares gpt2 --seconds 0.2 --name goals \
        --out "$OUT" || failed=1
    benchmark goals_2048 40 benchmarks/kernels.py --device cuda --goals --models squares --ops syrk_accumulate_ \
        --rows 2048 --seconds 0.2 --name goals_2048 --out "$OUT" || failed=1
    benchmark step 140 benchmarks/step_gpu.py --out "$OUT" || failed=1
    benchmark models 90 benchmarks/kernels.py --device cuda --models bert_large llama_7b resnet50 --seconds 0.1 \
        --name models --out "$OUT" || failed=1
fi

cat "$summary"
grep -hs 'Overhead\|\*\*fail\*\*' "$OUT"/goals*.md "$OUT"/step_*.md
exit $failed
