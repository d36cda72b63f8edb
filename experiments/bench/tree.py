"""Our tree beside SGLang's, Python and Rust: microseconds of what a scheduler asks of it.

    python -m experiments.bench.tree

Each tree runs in a process of its own, SGLang's in the environment that `experiments.diff` keeps,
in turns; the least of the turns counts, for whatever else runs can only add. Full attention, full
and a window of 1,024 tokens, or these and states, on the device alone, 64 tokens a page, 64 pages a
request.
"""

import argparse

from experiments.bench.replay import last_word
from experiments.diff.engines import ENGINES, environment_of, prepare
from hicache.cli.command import in_one_sentence

TURNS = 3
RELEASE = "0.5.23"
COMPONENTS = ("full", "full,swa", "full,swa,mamba")


def main() -> None:
    """Print a table for each set of components."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", default=RELEASE)
    options = parser.parse_args()
    theirs = prepare(ENGINES["sglang"], options.release)
    ours = prepare(ENGINES["sglang"], "hicache")
    sides = {"ours": (ours, "ours"), "Python": (theirs, "python"), "Rust": (theirs, "rust")}
    for components in COMPONENTS:
        best: dict[str, dict[str, float]] = {name: {} for name in sides}
        for _ in range(TURNS):
            for name, (launch, core) in sides.items():
                command = [launch.interpreter, "-m", "experiments.bench.one_tree", core, components]
                environment = environment_of(launch) if core != "ours" else None
                for row, took_us in last_word(command, env=environment).items():
                    best[name][row] = min(took_us, best[name].get(row, took_us))
        print(
            f"{components}: µs per call of hicache, SGLang's Python core and its Rust core; speedup"
        )
        for row, took_us in best["ours"].items():
            python, rust = best["Python"][row], best["Rust"][row]
            print(f"{row:24} {took_us:8.1f} {python:8.1f} {rust:8.1f} {rust / took_us:8.2f}x")


if __name__ == "__main__":
    with in_one_sentence():
        main()
