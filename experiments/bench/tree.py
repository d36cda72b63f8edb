"""Compare the speed of this project's tree with that of SGLang's trees, in Python and in Rust.

    python -m experiments.bench.tree
    python -m experiments.bench.tree --release 0.5.23 --turns 5

The trees take turns, each in a process of its own, and SGLang's in the environment that
`experiments.diff` keeps. The least of the turns counts, because other programs can only add time.
Full attention, with a window of 1,024 tokens, and with Mamba states, on the device alone; 64 tokens
a page and 64 pages a prompt. The exit code is 1 if SGLang's Rust core is faster in any row.
"""

import argparse
import json
import subprocess
import sys

from experiments.bench.one_tree import MODELS
from experiments.diff.engines import ENGINES, environment_of, prepare
from hicache.cli.command import in_one_sentence

RELEASE = "0.5.23"
Times = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", default=RELEASE, help="of SGLang, or a checkout or wheel")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    theirs = prepare(ENGINES["sglang"], options.release)
    sides = {
        "ours": ([sys.executable], None),
        **dict.fromkeys(("python", "rust"), ([theirs.interpreter], environment_of(theirs))),
    }
    is_slower = False
    for components in MODELS:
        best: dict[str, Times] = {core: {} for core in sides}
        for _ in range(options.turns):
            for core, (interpreter, environment) in sides.items():
                command = [*interpreter, "-m", "experiments.bench.one_tree", core, components]
                took: Times = json.loads(_last_line(command, environment))
                best[core] = {row: min(us, best[core].get(row, us)) for row, us in took.items()}
        print(f"{components}: µs of hicache, SGLang's Python core, its Rust core; Rust / hicache")
        for row, ours in best["ours"].items():
            python, rust = best["python"][row], best["rust"][row]
            is_slower |= rust < ours
            print(f"{row:20} {ours:8.1f} {python:8.1f} {rust:8.1f} {rust / ours:8.2f}", flush=True)
    return int(is_slower)


def _last_line(command: list[str], environment: dict[str, str] | None) -> bytes:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with exit code {done.returncode}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    with in_one_sentence():
        sys.exit(main())
