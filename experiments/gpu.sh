#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes: the kernel tests for real, machine code as the
# local triton makes it, the bench with sweeps and peers, and compute-sanitizer on small copies.
# Needs torch, triton, einops, numpy and pytest; matplotlib draws the figure if it is there.
#
#   experiments/gpu.sh
#
# OUT     where results go                        (default: outputs/gpu)
# PYTHON  the interpreter                         (default: python3)
# SGLANG  a folder to put on the path, from which SGLang's kernels are imported as a peer
set -uo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-outputs/gpu}"
python="${PYTHON:-python3}"
mkdir -p "$out"
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

step 120 tests "$python" -m pytest -m gpu tests/kernels --confcutdir=tests/kernels -q -x
step 45 codegen "$python" -m hicache.kernels.codegen
LINES_SHOWN=160 step 240 bench "$python" -m hicache.kernels.bench \
    --json "$out/bench.json" --figure "$out/bench.png"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        step 85 "sanitizer_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$python" experiments/gpu_small_copies.py
    done
else
    echo "-- sanitizer: compute-sanitizer is not installed" | tee -a "$out/steps.log"
fi
echo "results in $out"
exit "$status"
