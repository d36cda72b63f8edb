#!/usr/bin/env bash
# Runs the kernel tests (interpreter, machine code, bench dry) on the oldest and the newest triton
# that this project supports, each in its own environment. No GPU is needed.
#
#   experiments/gpu/kernel_versions.sh [pytest arguments]      (-m soak: 5,000 random transfers)
#
# VENVS   where the environments are kept        (default: build/kernel_venvs)
# PYTHON  the interpreter they are made with     (default: python3)
# TORCH   the torch to install                   (default: torch==2.13.0+cpu)
# INDEX   where CPU wheels of torch are found    (default: https://download.pytorch.org/whl/cpu)
set -euo pipefail
cd "$(dirname "$0")/../.."
venvs="${VENVS:-build/kernel_venvs}"
torch="${TORCH:-torch==2.13.0+cpu}"
index="${INDEX:-https://download.pytorch.org/whl/cpu}"
export PYTHONPATH="$PWD"  # for the programs that tests start elsewhere
export OMP_NUM_THREADS=1  # tensors are small

# ranges over tensors fail in the interpreter of triton 3.6 with numpy 2.4, and warn with 2.3
declare -A numpy=(["3.6.0"]="numpy<2.4" ["3.9.0"]="numpy")
status=0
for version in 3.6.0 3.9.0; do
    venv="$venvs/triton-$version"
    if [[ ! -x "$venv/bin/pytest" ]]; then
        "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/pip" install -q --extra-index-url "$index" \
            "$torch" "triton==$version" "${numpy[$version]}" einops matplotlib pytest
    fi
    echo "== triton $version"
    "$venv/bin/python" -m pytest tests/kernels \
        -W "ignore:Conversion of an array:DeprecationWarning" \
        --confcutdir=tests/kernels -q -m "not gpu and not soak" "$@" || status=1
done
exit "$status"
