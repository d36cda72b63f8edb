"""Measure the speed of a replay against a chosen commit, and compare the summaries.

    python -m experiments.bench.replay --against COMMIT workload=mooncake_conversation

The program runs this checkout and COMMIT in pairs and compares their processor seconds, including
the time to read the trace. Both runs of a pair share one core at the same time, so whatever else
the machine does slows them equally; each core has its own pair. A pair with one replay fills the
caches of the parsed trace and of the page numbers beforehand. KNOB=VALUE goes to both versions;
`--here` and `--there` go to this checkout or to COMMIT only, to undo a default that has changed.
The exit code is 1 if a metric of both summaries differs in a byte, and 2 if a run fails.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import IO, TypedDict, cast

from hicache.cli.command import in_one_sentence

ROOT = Path(__file__).parents[2]
ONE_RUN = Path(__file__).with_name("one_run.py")
NUM_DRAWS = 4_000  # of the bootstrap


class Told(TypedDict):
    processor_s: float
    peak_mb: float
    summary: dict[str, float]


Run = tuple[Path, list[str]]  # a checkout, and the settings of its run
Pair = tuple[Told, Told]  # COMMIT, this checkout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--replays", type=int, default=2, help="replays in each run of a pair")
    parser.add_argument("--here", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--there", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("overrides", nargs="*", metavar="KNOB=VALUE")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        theirs = Path(scratch) / "theirs"
        check_out(options.against, theirs)
        environment = {**os.environ, "XDG_CACHE_HOME": f"{scratch}/cache"}
        runs = (
            (theirs, [*options.overrides, *options.there]),
            (ROOT, [*options.overrides, *options.here]),
        )
        pairs = measure(runs, environment, options.pairs, options.replays)
    before, now = (median(pair[side]["processor_s"] for pair in pairs) for side in (0, 1))
    ratios = [now["processor_s"] / before["processor_s"] for before, now in pairs]
    num_requests = pairs[0][1]["summary"]["request/count"]
    print(
        f"median processor time: {options.against} {before:.2f} s, this tree {now:.2f} s; "
        f"ratio {median(ratios):.3f}, upper 95 % bound {upper_bound(ratios):.3f}; "
        f"{num_requests / now:.0f} requests per second; peak memory "
        f"{pairs[0][0]['peak_mb']:.0f} and {pairs[0][1]['peak_mb']:.0f} MB"
    )
    differing = differences(pairs[0][0]["summary"], pairs[0][1]["summary"])
    told = f"the summaries differ in {', '.join(differing)}" if differing else "equal summaries"
    print(told)
    return bool(differing)


def check_out(commit: str, folder: Path) -> None:
    command = ["git", "-C", str(ROOT), "archive", commit]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    refuse_failure(command, done.returncode)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")


def measure(
    runs: tuple[Run, Run], environment: dict[str, str], num_pairs: int, num_replays: int
) -> list[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    one_pair(runs, environment, cores[0], 1)

    def pairs_on(place: int) -> list[Pair]:
        numbers = range(place, num_pairs, len(cores))
        return [one_pair(runs, environment, cores[place], num_replays) for _ in numbers]

    with ThreadPoolExecutor(len(cores)) as threads:
        return [pair for pairs in threads.map(pairs_on, range(len(cores))) for pair in pairs]


def one_pair(
    runs: tuple[Run, Run], environment: dict[str, str], core: int, num_replays: int
) -> Pair:
    """Replay two checkouts at the same time on one core; return what each reports of its run.

    Both begin to replay when both are ready.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_begin(run, environment, core, num_replays)) for run in runs
        ]
        pipes = [(cast(IO[str], each.stdin), cast(IO[str], each.stdout)) for each in processes]
        for _, printed in pipes:
            printed.readline()
        for go, _ in pipes:
            go.close()
        before, now = [printed.read() for _, printed in pipes]
    for each in processes:
        refuse_failure(cast(list[str], each.args), each.wait())
    return json.loads(before), json.loads(now)


def upper_bound(ratios: list[float]) -> float:
    draws = random.Random(0)
    medians = [median(draws.choices(ratios, k=len(ratios))) for _ in range(NUM_DRAWS)]
    return sorted(medians)[NUM_DRAWS * 95 // 100]


def differences(before: dict[str, float], now: dict[str, float]) -> list[str]:
    both = sorted(before.keys() & now.keys())
    return [key for key in both if json.dumps(before[key]) != json.dumps(now[key])]


def refuse_failure(command: list[str], status: int) -> None:
    if status:
        raise ValueError(f"command failed with exit status {status}: {shlex.join(command)}")


def _begin(
    run: Run, environment: dict[str, str], core: int, num_replays: int
) -> subprocess.Popen[str]:
    root, overrides = run
    path = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(ONE_RUN), str(root), str(num_replays), *overrides],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**environment, "PYTHONPATH": path},
    )
    os.sched_setaffinity(process.pid, {core})
    return process


if __name__ == "__main__":
    with in_one_sentence():
        sys.exit(main())
