#!/usr/bin/env bash
# Everything that needs a GPU, in three parts, each of which ends within ten minutes:
#   kernels   their tests for real, at production shapes too, machine code as the local triton makes
#             it, the bench with sweeps, the claims that it confirms or refutes, compute-sanitizer on
#             copies, appends and load-backs, Nsight Compute on the copy kernels
#   contest   ours, the peers and, named in KERNELS, those of the user's own, by size and direction;
#             then 1,400 random transfers
#   executor  random mixes through Triton kernels and CUDA streams with equal logits, one of them
#             under compute-sanitizer, a verified run, overlap of load-back from CUDA events, launches
#             and host waits of a step
#
#   experiments/gpu/gpu.sh [kernels] [contest] [executor]          all unless named
#   experiments/gpu/gpu.sh --dry-run          the claims of the pages, and what decides each; no GPU
#
# The first two need torch, triton, einops, numpy and pytest; pytest-xdist saves time if it is
# there. The last also needs what the project needs: hydra-core, omegaconf and the like.
# What cannot be measured, or is not installed, is said in steps.log.
#
# OUT     where results go                        (default: outputs/gpu)
# PYTHON  the interpreter                         (default: python3)
# SGLANG  a folder to put on the path, from which SGLang's kernels are imported as a peer, as made by
#         python -m experiments.gpu.sglang_kernels (1 MB); they are built on first use, by nvcc and
#         ninja, with apache-tvm-ffi
# KERNELS copy kernels of the user's own for the contest, as module:name, with spaces between
# WHEELS  a folder of wheels of what the machine lacks and cannot fetch; beside torch and pandas the
#         last part needs no more than those of pip wheel --no-deps -w DIR hydra-core omegaconf
#         antlr4-python3-runtime==4.9.3 hydra-joblib-launcher pooch platformdirs
#         With flashinfer-python==0.5.3 (7 MB), apache-tvm-ffi==0.1.11, msgspec and fla-core, attention,
#         scan and SGLang's copies have their peers
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-outputs/gpu}"
python="${PYTHON:-python3}"
parts="${*:-kernels contest executor}"
if [[ "$parts" == "--dry-run" ]]; then
    exec "$python" -m experiments.gpu.claims
fi
mkdir -p "$out"
if [[ -n "${WHEELS:-}" ]]; then
    site="$(mktemp -d)"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH="$PWD${SGLANG:+:$SGLANG}${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET
# what SGLang's kernels are linked with; nvcc on the path may be no more than a script
for home in /usr/local/cuda /usr/local/cuda-*; do
    [[ -z "${CUDA_HOME:-}" && -e "$home/lib64/libcudart.so" ]] && export CUDA_HOME="$home"
done
[[ -n "${CUDA_HOME:-}" ]] && export PATH="$PATH:$CUDA_HOME/bin"  # FlashInfer builds its kernels
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # whatever else is installed has no part in this
# a warning that libraries give only beside a GPU is shown, and fails nothing
pytest=("$python" -m pytest -W default -q --durations=5 -m)
workers=()  # most of a test's time is the compiler's
"$python" -c 'import xdist' 2>/dev/null && workers=(-p xdist.plugin -n 8)
status=0

step() {  # seconds, name, command: a step that fails or hangs does not cost the others
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
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

sanitize() {  # tool, name of the step, command
    local tool=$1 name=$2
    shift 2
    if command -v compute-sanitizer >/dev/null; then
        # calls that fail are not reported: libraries ask the driver for what it may not have
        step 75 "${name}_$tool" compute-sanitizer --tool "$tool" --report-api-errors no \
            --error-exitcode 1 "$@"
    else
        skip "${name}_$tool" "compute-sanitizer is not installed"
    fi
}

if [[ " $parts " == *" kernels "* ]]; then
    step 120 tests "${pytest[@]}" "gpu and not soak" "${workers[@]}" tests/kernels --confcutdir=tests/kernels
    step 30 codegen "$python" -m hicache.workbench.codegen
    LINES_SHOWN=260 step 240 bench "$python" -m hicache.workbench.bench \
        --json "$out/bench.json"
    LINES_SHOWN=100 step 20 claims "$python" -m experiments.gpu.claims "$out/bench.json"
    if [[ -s "$out/bench.json" ]] && "$python" -c 'import hydra'; then
        step 20 profile "$python" -m experiments.gpu.profile "$out/bench.json"
    else
        skip profile "no bench.json, or something it needs: it runs anywhere"
    fi
    # what the tests above have compiled; every pool lies in an allocation of its own, so that a byte
    # beyond it is an error that is seen
    kernels=("${pytest[@]}" gpu --confcutdir=tests/kernels tests/kernels/test_copy.py)
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    sanitize memcheck copies "${kernels[@]}" tests/kernels/test_index.py
    sanitize memcheck steps "${pytest[@]}" "gpu and not soak" --confcutdir=tests/kernels \
        tests/kernels/test_append.py tests/kernels/test_load.py
    sanitize racecheck copies "${kernels[@]}" -k checksum  # its sums
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    if command -v ncu >/dev/null; then
        # four launches a case: across the link both ways, then pages within the device
        step 60 ncu ncu --clock-control none --set basic --section MemoryWorkloadAnalysis \
            --kernel-name 'regex:.*_copy_kernel.*' --launch-count 24 "$python" \
            -m hicache.workbench.bench --op pages --repeats 1 --device-mib 512 --host-mib 128
    else
        skip ncu "Nsight Compute is not installed"
    fi
fi

if [[ " $parts " == *" contest "* ]]; then
    entered=()
    sglang="${SGLANG:+experiments.gpu.sglang_peers:tma experiments.gpu.sglang_peers:registers}"
    for kernel in ${KERNELS:-} $sglang; do
        entered+=(--kernel "$kernel")
    done
    LINES_SHOWN=80 step 300 contest "$python" -m hicache.workbench.bench --op contest "${entered[@]}" \
        --json "$out/contest.json"
    LINES_SHOWN=100 step 20 claims "$python" -m experiments.gpu.claims "$out"/*.json
    step 240 fuzz "${pytest[@]}" "gpu and soak" "${workers[@]}" tests/kernels --confcutdir=tests/kernels
fi

if [[ " $parts " == *" executor "* ]] && ! "$python" -c 'import hydra, hicache.experiment'; then
    skip executor "something it needs is not installed; WHEELS can bring it"
elif [[ " $parts " == *" executor "* ]]; then
    step 240 mixes "${pytest[@]}" gpu "${workers[@]}" tests/executor/test_model_runner.py
    # a mix with load-backs, back-ups, fences and states, and fewer kernels than most
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck mix "$python" -c '
from tests.executor.mixes import run_mix
verdict = run_mix(137, device="cuda").verdict
print(verdict)
raise SystemExit(verdict.num_equal != verdict.num_checked)'
    export HYDRA_FULL_ERROR=1
    run=("$python" -m experiments.run executor.device=cuda tracker.wandb_mode=disabled workload=agents)
    step 60 launches "$python" -m experiments.gpu.steps
    LINES_SHOWN=40 step 90 verified "${run[@]}" executor=torch model=tiny_hybrid executor.verify=true
fi
echo "results in $out"
exit "$status"
