"""What a bench of everything measures and judges, from made-up times (`measured`)."""

import os
import subprocess
import sys
from pathlib import Path

EXPECTED = Path(__file__).with_name("measured.txt")


def test_the_bench_measures_and_judges_what_is_on_record():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.measured"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines()[1:] == EXPECTED.read_text().splitlines()[1:], (
        "if the bench is meant to measure something else now: "
        "TRITON_INTERPRET=1 python -m tests.kernels.measured > tests/kernels/measured.txt"
    )
