#!/usr/bin/env bash
# Everything that needs a GPU, for one with 16 cores, in calls of a part each, below 9 minutes and useful alone:
#   A  the machine, every op against float64, two steps in every ZeRO stage, engine modes, sanitizer
#   B  decompositions      C  Newton-Schulz      D  SYRK configurations, all ops against the roofline
#   E  a GPT-2-small step with AdamW, Muon, KFACAdamW and K-FAC into AdamW, with traces
#   F  a language model of 135 M parameters by several optimizers: F a (rates), F b, F c, and what else benchmarks.gpu_lm
#      takes. Each call goes on where the last one stopped, in $KEEP, which must outlive the call
#   G  CIFAR-10 by SGD, K-FAC into SGD and KFACAdamW   H  a GPT-2 step's cost by its tokens, beside what is predicted
#   I  what has not run: engine modes, also at the default precision, ranks that share the GPU, the Trainer, kills; of
#      these only what is named, as in: I shared trainer kills
#   J  the product of Newton-Schulz in 8 processes without ds_kfac, in fp16 and bf16, and under compute-sanitizer
# A part's items are rows of $OUT/gpu_<part>.csv when they end, failed ones too; what they write is in
# $OUT/gpu_<part>.tgz however the call ends (after SIGKILL: in the folder of that name).
#
#   PYTHON  has torch; A also needs triton, pytest, nvcc; A's steps and modes, and E, need deepspeed and its packages
#   WHEELS  folder of wheels to use if they are missing (benchmarks/wheels.sh collects them); no pip and no network
#   SECONDS_IN_ALL  540; an item gets its limit or what is left of these
#   DRY_RUN=1       only say what would run, with limits; F, G, H also what each run would take
#   KEEP            runs/gpu: runs and saves of F, G, H; on another machine what $OUT/gpu_<part>.tgz has of G and H goes
#                   to KEEP/<part> first, and the run that was cut off begins again
#   DATA            G: CIFAR-10, see examples/train_images.py; BATCH  G: 1024
#   SIZES=small     to rehearse it: with DS_ACCELERATOR=cpu on a machine without a GPU
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:-}
case $part in A | B | C | D | E | F | G | H | I | J) ;; *) echo "usage: gpu.sh A | B | C | D | E | F | G | H | I | J"; exit 2 ;; esac
PYTHON=${PYTHON:-python3}
KEEP=${KEEP:-runs/gpu} # ignored by git
[ -n "${DRY_RUN:-}" ] && OUT=$(mktemp -d) # nothing of earlier calls is touched
mkdir -p "${OUT:=benchmarks/results/gpu}"
OUT=$(cd "$OUT" && pwd)
work="$OUT/gpu_$part" rows="$OUT/gpu_$part.csv" ends=$((SECONDS + ${SECONDS_IN_ALL:-540}))
kept="$KEEP/$part"
rm -rf "$work" && mkdir "$work"
echo "part,item,result,seconds,last line" >"$rows"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
scratch=$(mktemp -d)
export TORCH_EXTENSIONS_DIR="$scratch/extensions" # a run that was killed leaves locks of DeepSpeed's builds
export CUBLAS_WORKSPACE_CONFIG=:4096:8
failed=0 child='' item='' began=0

row() { # result
    local last
    last=$(tail -n 1 "$work/$item.log" 2>/dev/null | tr -d '"' | cut -c 1-200)
    echo "$part,$item,$1,$((SECONDS - began)),\"$last\"" | tee -a "$rows"
}

collect() { :; } # what lies elsewhere, into $work

finish() {
    local status=$?
    trap '' EXIT TERM INT HUP
    [ -n "${DRY_RUN:-}" ] && rm -rf "$OUT" "$scratch" && exit $status
    if [ -n "$child" ]; then
        kill "$child" 2>/dev/null
        row "cut short"
    fi
    collect
    cp "$rows" "$work/items.csv"
    if [ -d "$kept" ]; then # tables, pages and plots of all calls so far; what runs go on from stays
        (cd "$kept" && find . -type f \( -name "*.csv" -o -name "*.json" -o -name "*.md" -o -name "*.png" -o -name "*.partial" \) \
            -not -path "*.saved/*" -print0 | tar cf - --null -T -) | tar xf - -C "$work"
    fi
    tar czf "$OUT/gpu_$part.tgz.new" -C "$OUT" "gpu_$part" && mv "$OUT/gpu_$part.tgz.new" "$OUT/gpu_$part.tgz" && rm -rf "$work"
    rm -rf "$scratch"
    exit $status
}
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT HUP

run() { # item, limit in seconds, command
    local left=$((ends - SECONDS)) limit=$2 status
    item=$1 began=$SECONDS
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ -n "${DRY_RUN:-}" ]; then
        echo "$item, at most $limit s: $*"
        return
    fi
    if [ "$limit" -lt 5 ]; then
        row "no time" && failed=1
        return
    fi
    timeout -k 10 "$limit" "$@" >"$work/$item.log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=''
    case $status in
    0) row passed ;;
    5) row "no such tests" ;; # pytest's
    124 | 137) row "not finished in $limit s" && failed=1 ;;
    *) row "failed ($status)" && failed=1 ;;
    esac
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# wheels are zip files: unpacked, they can be imported, without pip
if [ -n "${WHEELS:-}" ] && ! has deepspeed; then
    for wheel in "$WHEELS"/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$scratch/packages"; done
    export PYTHONPATH="$PYTHONPATH:$scratch/packages"
fi

cpu=() small=() tiny=() marked=(-m gpu)
if [ "${SIZES:-}" = small ]; then
    cpu=(--device cpu) small=(--max-dim 256 --rows 64 --blocks 1 --seconds 0.01) marked=(-m "not gpu")
    tiny=(--width 16 --blocks 1 --heads 2 --context 5 --vocabulary 11 --rows 2 --periods 1)
fi
cifar=() tokens=()
if [ "${SIZES:-}" = small ]; then
    cifar=(--model resnet8 --batch 256 --epochs 2 --parts 1 0.5 --seeds 0 --evaluations 4)
    tokens=(--tiny)
fi
# seconds for a program that stops by itself: it needs some to save
left() { echo $((ends - SECONDS - ${1:-20} > 0 ? ends - SECONDS - ${1:-20} : 0)); }
kernels=("$PYTHON" -m benchmarks.kernels "${cpu[@]}" --out "$work")
tests=("$PYTHON" -m pytest -v -p no:cacheprovider "${marked[@]}")

run machine 60 "$PYTHON" benchmarks/machine.py
case $part in
A)
    run ops_check 100 "$PYTHON" -m benchmarks.kernels.check
    run ops 240 "${tests[@]}" tests/gpu/test_ops.py
    run steps 120 "$PYTHON" benchmarks/step_gpu.py --smoke "${tiny[@]}" --out "$work"
    run modes 200 "${tests[@]}" -s tests/gpu/test_modes.py
    run others 60 "${tests[@]}" tests/curvature/test_eigensolver.py tests/step/test_recorded_step.py
    run sanitizer 300 "${tests[@]}" tests/gpu/test_sanitizer.py
    ;;
B)
    run costs 120 "$PYTHON" -m benchmarks.kernels.costs "${cpu[@]}" "${small[@]:0:2}" --seconds 0.1 --out "$work/costs.json"
    for op in "cholesky inverse" iteration eigh "eigh batched"; do
        run "${op// /_}" 200 "${kernels[@]}" --ops "$op" --seconds 0.3 "${small[@]}" --name "${op// /_}"
    done
    ;;
C)
    run newton_schulz 500 "${kernels[@]}" --ops "newton schulz" --seconds 0.1 "${small[@]}" --name newton_schulz
    ;;
D)
    run sweep 150 "${kernels[@]}" --sweep syrk --seconds 0.05 "${small[@]}"
    run goals 120 "${kernels[@]}" --goals --models squares gpt2 --ops syrk_accumulate_ symmetric_pack_into_ \
        symmetric_unpack_from ema_update_ adam_step_ --seconds 0.2 "${small[@]}" --name goals
    run goals_2048 60 "${kernels[@]}" --goals --models squares --ops syrk_accumulate_ --seconds 0.2 "${small[@]}" --rows 2048 \
        --name goals_2048
    run fp32 60 "${kernels[@]}" --models squares --ops syrk_accumulate_ --seconds 0.1 "${small[@]}" --dtype float32 --name fp32
    run models 120 "${kernels[@]}" --models bert_large llama_7b resnet50 --ops syrk_accumulate_ symmetric_pack_into_ \
        symmetric_unpack_from ema_update_ adam_step_ --seconds 0.1 "${small[@]}" --name models
    ;;
E)
    run step 500 "$PYTHON" benchmarks/step_gpu.py "${tiny[@]}" --trace --out "$work"
    ;;
F)
    lm=("$PYTHON" -m benchmarks.gpu_lm --out "$KEEP/lm" --sizes "${SIZES:-full}")
    [ -n "${DRY_RUN:-}" ] && "${lm[@]}" --dry-run "${@:2}"
    collect() {
        for path in "$KEEP"/lm/{runs,report.md,curves.csv,curves_b.png,curves_c.png,curves_d.png,corpus/corpus.json}; do
            [ -e "$path" ] && cp -r "$path" "$work"
        done
    }
    run corpus 300 "${lm[@]}" corpus
    run gpu_lm 530 "${lm[@]}" "${@:2}" --seconds $((ends - SECONDS - 15)) # saves and ends by itself
    ;;
I)
    wanted() { [ $# -eq 1 ] || [[ " ${*:2} " == *" $1 "* ]]; } # I takes names of items, too
    for name in modes coarse shared trainer; do
        wanted "$name" "${@:2}" && run "$name" 200 "${tests[@]}" -s "tests/gpu/test_$name.py"
    done
    wanted kills "${@:2}" && run kills 300 "$PYTHON" -m benchmarks.gpu_lm.kills --sizes "${SIZES:-kills}" --out "$work/kills"
    ;;
J)
    alone=("$PYTHON" -m benchmarks.kernels.newton_schulz_alone "${cpu[@]}" --out "$work/newton_schulz_alone.csv")
    [ "${SIZES:-}" = small ] && alone+=(--small)
    for dtype in float16 bfloat16; do run "${dtype}" 180 "${alone[@]}" --dtype "$dtype"; done
    run memcheck 120 "${alone[@]}" --dtype float16 --sanitizer memcheck
    ;;
G)
    cifar=("$PYTHON" -m benchmarks.cifar ${DATA:+--data "$DATA"} --batch "${BATCH:-1024}" "${cifar[@]}" --out "$kept")
    [ -n "${DRY_RUN:-}" ] && "${cifar[@]}" --dry-run
    run cifar 540 "${cifar[@]}" --seconds "$(left)"
    ;;
H)
    tokens+=(--out "$kept")
    [ -n "${DRY_RUN:-}" ] && "$PYTHON" benchmarks/step_tokens.py "${tokens[@]}" --dry-run
    run tokens 540 "$PYTHON" benchmarks/step_tokens.py "${tokens[@]}" --seconds "$(left)"
    ;;
esac
exit $failed
