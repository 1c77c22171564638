#!/usr/bin/env bash
# What needs a GPU, in five calls of at most 8 minutes each on one GPU:
#
#   gpu.sh modes     every engine mode, CUDA graphs included, against tests/oracle.py
#   gpu.sh step      a step of GPT-2 small by AdamW, Muon, KFACAdamW and K-FAC into AdamW, with traces
#   gpu.sh lm        280 steps of 131,072 tokens by KFACAdamW, Muon and AdamW at the rates in RATES
#   gpu.sh images    CIFAR-10 by ResNet-32 at batch 1,024; DATA must name the data set
#   gpu.sh kernels   every op beside the library's way and the roofline; decompositions; costs.json
#
# A call keeps its results in $OUT/CALL as it gets them. Called again it goes on where it stopped, skips
# what is there, and says in its last line what it left out. After "--" come more arguments for the program.
#
#   --rehearse   the same on a CPU at a small size, in about a minute
#   OUT          runs/gpu; small files only
#   FROM         folder that an earlier call filled as OUT, if OUT is not the same folder: copied first
#   SAVES        runs/gpu_saves: checkpoints of a run that was cut off (2.5 GB for lm)
#   LIMIT        450 seconds for a whole call
#   PYTHON       has torch; all calls but kernels need deepspeed and its packages
#   WHEELS       folder of wheels to import what is missing from (benchmarks/wheels.sh fills one)
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:-} rehearse=''
usage="usage: gpu.sh modes | step | lm | images | kernels [--rehearse] [-- ARGUMENTS]"
case $call in modes | step | lm | images | kernels) shift ;; *) echo "$usage" && exit 2 ;; esac
[ "${1:-}" = --rehearse ] && rehearse=yes && shift
[ "${1:-}" = -- ] && shift
[ -n "$rehearse" ] && export DS_ACCELERATOR=cpu
PYTHON=${PYTHON:-python3} limit=${LIMIT:-450}
out=${OUT:-runs/gpu}/$call saves=${SAVES:-runs/gpu_saves}/$call
[ -n "$rehearse" ] && out=${OUT:-runs/rehearsal}/$call saves=${SAVES:-runs/rehearsal_saves}/$call
mkdir -p "$out"
[ -n "${FROM:-}" ] && [ -d "$FROM/$call" ] && cp -rn "$FROM/$call/." "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export TORCH_EXTENSIONS_DIR="$scratch/extensions" # a build that was killed leaves a lock
if [ -n "${WHEELS:-}" ] && ! "$PYTHON" -c "import deepspeed" 2>/dev/null; then
    for wheel in "$WHEELS"/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$scratch/packages"; done
    export PYTHONPATH="$PYTHONPATH:$scratch/packages"
fi

left() { echo $((limit - SECONDS > 0 ? limit - SECONDS : 0)); }

run() { # a program that ends by itself; killed if it does not
    timeout -k 10 "$(($(left) + 20))" "$PYTHON" "$@"
}

convergence() { # arguments: of the program, before --seconds
    run -m benchmarks.convergence "$@" --out "$out/results" --saves "$saves" --seconds "$(left)"
}

main() {
    {
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU"
        "$PYTHON" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
        git describe --always --dirty 2>/dev/null
        date -u
    } | tee "$out/machine.txt"
    case $call in
    modes)
        local device=cuda
        [ -n "$rehearse" ] && device=cpu
        MODES=$out MODES_UNTIL=$(($(date +%s) + $(left) - 30)) \
            run -m pytest -q -p no:cacheprovider tests/gpu/test_modes.py -k $device "$@"
        ;;
    step)
        local small=()
        [ -n "$rehearse" ] && small=(--model tiny --periods 1 --start-seconds 1)
        run benchmarks/step.py --trace --out "$out" --seconds "$(left)" "${small[@]}" "$@"
        ;;
    lm)
        local task=gpt2_small
        local rates=(kfacadamw_decay_1=4e-3 muon_gpt2=0.0125 adamw_decay_0.1=1e-3)
        [ -n "$rehearse" ] && task=gpt2_tiny
        [ -n "${RATES:-}" ] && read -ra rates <<<"$RATES"
        convergence final --tasks "$task" --rates "${rates[@]}" --reserve 25 "$@"
        ;;
    images)
        if [ -n "$rehearse" ]; then
            convergence final --tasks digits --steps 4 --seeds 0 --methods sgd kfac_nesterov kfacadamw \
                --rates sgd=0.1 kfac_nesterov=0.1 kfacadamw=2e-3 "$@"
        elif [ -z "${DATA:-}" ]; then
            echo "left out: all of it, as DATA names no data set" && return 2
        else
            convergence sweep final --tasks cifar_resnet32 --data "$DATA" --extensions 0 "$@"
        fi
        ;;
    kernels)
        local small=() device=cuda models=(squares gpt2)
        [ -n "$rehearse" ] && device=cpu models=(resnet50) &&
            small=(--max-dim 256 --rows 64 --seconds 0.01)
        if [ ! -e "$out/costs.json" ]; then
            run -m benchmarks.kernels.costs --device $device "${small[@]:0:2}" --seconds 0.05 \
                --out "$out/costs.json"
        fi
        run -m benchmarks.kernels --device $device --models "${models[@]}" --seconds 0.1 "${small[@]}" \
            --seconds-in-all "$(left)" --out "$out" "$@"
        ;;
    esac
}

main "$@" 2>&1 | tee -a "$out/log.txt"
status=${PIPESTATUS[0]}
echo "gpu.sh $call: exit status $status after $SECONDS s; results in $out"
exit "$status"
