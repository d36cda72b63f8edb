#!/bin/sh
# What only a GPU can show of the real executor, in one command: sh experiments/gpu_torch.sh
# 1. random mixes with Triton kernels and CUDA streams, logits equal; 2. the same under
# compute-sanitizer on a small case; 3. real time with verified logits; 4. overlap from CUDA events.
set -eu
PYTHON=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu_torch}
mkdir -p "$OUT"
export WANDB_MODE=${WANDB_MODE:-disabled}

"$PYTHON" -m pytest -q -m gpu tests/executor/test_torch_mixes.py 2>&1 | tee "$OUT/mixes.txt"
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$PYTHON" -c 'from tests.executor.mixes import run_mix
verdict = run_mix(3, device="cuda").verdict
print(verdict)
raise SystemExit(verdict.num_equal != verdict.num_checked)' 2>&1 | tee "$OUT/$tool.txt"
    done
else
    echo "compute-sanitizer is not installed: skipped" | tee "$OUT/memcheck.txt"
fi
"$PYTHON" -m experiments.run executor=torch executor.device=cuda model=tiny_hybrid \
    workload=agents executor.verify=true 2>&1 | tee "$OUT/verified.txt"
for model in llama3_8b; do
    "$PYTHON" -m experiments.run executor=torch_timing executor.device=cuda model=$model \
        workload=agents workload.limit=60 2>&1 | tee "$OUT/overlap_$model.txt"
done
