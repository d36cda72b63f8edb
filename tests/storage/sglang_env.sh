#!/usr/bin/env bash
# An environment with SGLang 0.5.23 on a CPU, for tests/storage/test_sglang.py:
#
#     tests/storage/sglang_env.sh DIR
#     HICACHE_SGLANG_PYTHON=DIR/bin/python python -m pytest tests/storage/test_sglang.py
#
# Python 3.11. SGLang's pins want a CUDA build of torch; what its storage interface needs runs
# with the CPU build, so its dependencies are installed one by one and itself without them.
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
test -x "$1/bin/python" || python3 -m venv "$1"
pip="$1/bin/pip install --quiet"
$pip --retries 0 torch==2.13.0 numpy --index-url https://download.pytorch.org/whl/cpu ||
    $pip torch==2.13.0 numpy
$pip transformers==5.19.0 msgspec orjson psutil pybase64 requests pillow pyzmq ipython pydantic \
    aiohttp starlette distro openai==2.8.0 dill sentencepiece gguf loguru partial-json-parser \
    nvidia-ml-py scipy tqdm regex apache-tvm-ffi==0.1.11
$pip --no-deps sglang==0.5.23 triton==3.5.0 torchvision==0.28.0 compressed-tensors==0.18.0 \
    xgrammar==0.2.7
$pip xxhash redis hiredis
