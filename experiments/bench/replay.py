"""Measure the speed of a replay against a chosen commit, and compare the summaries.

    python -m experiments.bench.replay --against COMMIT workload=mooncake_conversation

The program runs this checkout and COMMIT in alternation. It reports the processor seconds of whole
runs, including the time to read the trace. A first run of this checkout fills the caches of the
parsed trace and of the page numbers. Settings after the options go to both versions, and must mean
the same in both: spell out those whose defaults have changed since COMMIT. The exit code is 1 if a
metric of both summaries differs in a byte, and 2 if a run fails.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from hicache.cli.command import in_one_sentence

ROOT = Path(__file__).parents[2]
ONE_RUN = Path(__file__).with_name("one_run.py")


class Told(TypedDict):
    processor_s: float
    peak_mb: float
    summary: dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("overrides", nargs="*", metavar="KNOB=VALUE")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        theirs = Path(scratch) / "theirs"
        check_out(options.against, theirs)
        environment = {**os.environ, "XDG_CACHE_HOME": f"{scratch}/cache"}
        cold = one_run(ROOT, options.overrides, environment)
        pairs = []
        for number in range(1, options.pairs + 1):
            pair = [one_run(root, options.overrides, environment) for root in (theirs, ROOT)]
            pairs.append(pair)
            before, now = (each["processor_s"] for each in pair)
            print(f"pair {number}: {options.against} {before:.2f} s, this tree {now:.2f} s")
    before, now = (median(pair[side]["processor_s"] for pair in pairs) for side in (0, 1))
    num_requests = pairs[0][1]["summary"]["request/count"]
    print(
        f"median processor time: {options.against} {before:.2f} s, this tree {now:.2f} s "
        f"(first run {cold['processor_s']:.2f} s): {before / now:.2f} times as fast, "
        f"{num_requests / now:.0f} requests per second; peak memory "
        f"{pairs[0][0]['peak_mb']:.0f} and {pairs[0][1]['peak_mb']:.0f} MB"
    )
    differing = differences(pairs[0][0]["summary"], pairs[0][1]["summary"])
    told = f"the summaries differ in {', '.join(differing)}" if differing else "equal summaries"
    print(told)
    return bool(differing)


def check_out(commit: str, folder: Path) -> None:
    packed = output_of(["git", "-C", str(ROOT), "archive", commit])
    with tarfile.open(fileobj=BytesIO(packed)) as files:
        files.extractall(folder, filter="data")


def one_run(root: Path, overrides: list[str], environment: dict[str, str]) -> Told:
    environment = {**environment, "PYTHONPATH": str(root)}
    command = [sys.executable, str(ONE_RUN), str(root), *overrides]
    told: Told = json.loads(output_of(command, cwd=root, env=environment).splitlines()[-1])
    return told


def output_of(command: list[str], **options: Any) -> bytes:
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, **options)
    if done.returncode:
        raise ValueError(
            f"command failed with exit status {done.returncode}: {shlex.join(command)}"
        )
    printed: bytes = done.stdout
    return printed


def differences(before: dict[str, float], now: dict[str, float]) -> list[str]:
    both = sorted(before.keys() & now.keys())
    return [key for key in both if json.dumps(before[key]) != json.dumps(now[key])]


if __name__ == "__main__":
    with in_one_sentence():
        sys.exit(main())
