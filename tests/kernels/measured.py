"""Print the output of a bench of all operations on an imitated GPU, with made-up times.

Sizes are scaled down, the kernels of peers do nothing, and the reference stands in for ours. The
numbers show what is measured and by which formula, and nothing about speed.

    python -m tests.kernels.measured > tests/kernels/measured.txt
"""

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter

from hicache.workbench.bench import measure
from tests import imitated_gpu

measure.KIB, measure.MIB, measure.GIB = 1 << 6, 1 << 12, 1 << 18  # imported by the modules below
measure.CACHE_BYTES = 1 << 16

from hicache.kernels import copy, index  # noqa: E402
from hicache.workbench.bench import __main__ as bench  # noqa: E402
from hicache.workbench.bench import link_cases  # noqa: E402

bench.NUM_LAYERS = 4
link_cases.STEPS = {"GEMM": (16, 16, 16, 2), "decode": (4, 16, 32, 2)}


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel's reference so that it takes tensors of the host and of the imitated GPU."""

    def launch(*arguments: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = function(*arguments, **options)
        if result is not None:
            imitated_gpu.ON_GPU.add(result)
        return result

    return launch


def elapsed_ms(start: imitated_gpu.Event, end: imitated_gpu.Event) -> float:
    """A made-up time in ms: 0.1 to 0.16 ms for each event recorded after `start`."""
    return (end.second - start.second) * (1 + end.second % 7 / 10) / 10


def main() -> int:
    """Run the bench; return its exit code."""
    interpreter.GridExecutor.__call__ = lambda *arguments, **constants: None
    imitated_gpu.Event.elapsed_time = elapsed_ms
    for module, names in (
        (copy, ("copy_items", "copy_items_with_checksum")),
        (index, ("page_table",)),
    ):
        for name in names:
            setattr(module, name, on_gpu(getattr(module, f"naive_{name}")))
    measure.Bench.verify = lambda self, transfer, launch: launch()
    seconds = count()
    time.perf_counter = lambda: next(seconds) ** 1.5 / 1e3
    imitated_gpu.Event.num_recorded = 0
    # what verifies results of kernels that do nothing here has tests of its own
    left_out = {"loads", "encodes", "appends", "attention", "scans"}
    names = [name for name in (*bench.CASES, bench.CONTEST) if name not in left_out]
    every = [f"--op={name}" for name in names]
    sizes = ["--device-mib=1024", "--host-mib=128", "--repeats=3"]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["bench", *every, *sizes, f"--json={Path(folder, 'json')}"]
        code = bench.main()
        print(Path(folder, "json").read_text().count("\n"), "lines of JSON")
    return code


if __name__ == "__main__":
    sys.exit(main())
