#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes, in two parts:
#   kernels   their tests for real, machine code as the local triton makes it, the bench with sweeps
#             and peers, compute-sanitizer on small copies, Nsight Compute on the copy kernels
#   executor  random mixes through Triton kernels and CUDA streams with equal logits, one of them
#             under compute-sanitizer, a verified run, overlap of load-back from CUDA events
#
#   experiments/gpu.sh [kernels] [executor]          both unless named
#
# The first needs torch, triton, einops, numpy and pytest; matplotlib draws the figure if it is
# there. The second also needs what the project needs: hydra-core, omegaconf and the like.
# What cannot be measured, or is not installed, is said in steps.log.
#
# OUT     where results go                        (default: outputs/gpu)
# PYTHON  the interpreter                         (default: python3)
# SGLANG  a folder to put on the path, from which SGLang's kernels are imported as a peer
# WHEELS  a folder of wheels of what the machine lacks and cannot fetch
set -uo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-outputs/gpu}"
python="${PYTHON:-python3}"
parts="${*:-kernels executor}"
mkdir -p "$out"
if [[ -n "${WHEELS:-}" ]]; then
    site="$(mktemp -d)"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH="$PWD${SGLANG:+:$SGLANG}${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET
status=0

step() {  # seconds, name, command: a step that fails or hangs does not cost the others
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    tail -n "${LINES_SHOWN:-12}" "$out/$name.log"
    echo "-- $name: exit $code after $((SECONDS - start)) s" | tee -a "$out/steps.log"
    [[ $code -eq 0 ]] || status=1
}

: >"$out/steps.log"
{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" -c "import sys, torch, triton; print(sys.version, torch.__version__, triton.__version__)"
} >"$out/machine.txt" 2>&1
cat "$out/machine.txt"

skip() {  # name, why
    echo "-- $1: skipped, $2" | tee -a "$out/steps.log"
}

sanitize() {  # name of the step, command
    local name=$1 tool
    shift
    for tool in memcheck racecheck; do
        if command -v compute-sanitizer >/dev/null; then
            step 60 "${name}_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$@"
        else
            skip "${name}_$tool" "compute-sanitizer is not installed"
        fi
    done
}

if [[ " $parts " == *" kernels "* ]]; then
    step 120 tests "$python" -m pytest -m gpu tests/kernels --confcutdir=tests/kernels -q
    step 45 codegen "$python" -m hicache.kernels.codegen
    LINES_SHOWN=160 step 200 bench "$python" -m hicache.kernels.bench \
        --json "$out/bench.json" --figure "$out/bench.png"
    if [[ -s "$out/bench.json" ]]; then
        step 20 profile "$python" -m experiments.gpu_profile "$out/bench.json"
    fi
    sanitize copies "$python" experiments/gpu_small_copies.py
    if command -v ncu >/dev/null; then
        step 60 ncu ncu --set basic --section MemoryWorkloadAnalysis --kernel-name regex:copy \
            --launch-count 12 "$python" experiments/gpu_small_copies.py
    else
        skip ncu "Nsight Compute is not installed"
    fi
fi

if [[ " $parts " == *" executor "* ]] && ! "$python" -c 'import hydra, hicache.experiment'; then
    skip executor "something it needs is not installed; WHEELS can bring it"
elif [[ " $parts " == *" executor "* ]]; then
    step 120 mixes "$python" -m pytest -q -m gpu tests/executor/test_torch_mixes.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize mix "$python" -c '
from tests.executor.mixes import run_mix
verdict = run_mix(3, device="cuda").verdict
print(verdict)
raise SystemExit(verdict.num_equal != verdict.num_checked)'
    export HYDRA_FULL_ERROR=1
    run=("$python" -m experiments.run executor.device=cuda tracker.wandb_mode=disabled workload=agents)
    LINES_SHOWN=40 step 60 verified "${run[@]}" executor=torch model=tiny_hybrid executor.verify=true
    LINES_SHOWN=40 step 90 overlap "${run[@]}" executor=torch_timing model=llama3_8b workload.limit=60
fi
echo "results in $out"
exit "$status"
