"""What each choice of the simulation changes: the same run with it and without it.

python -m experiments.studies.choices --out choices.md   (some minutes; figures in docs/validity.md)

The choices stand in `choices.yaml`. Each is made in several windows of the trace: the table has the
means of both, how one differs from the other, and the least and the most that it does in a window.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from hicache import experiment
from hicache.cli.schema import config_of
from hicache.executor.simulated.cost import CostModel
from hicache.results.metrics import summarize
from hicache.results.verdict import CLEAN, objections

HEADINGS = ("choice", "metric", "with it", "without it", "change", "in a window", "verdict")


def main() -> None:
    """Run every choice both ways and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=200, help="requests of a window")
    parser.add_argument("--windows", type=int, default=8, help="of the trace")
    parser.add_argument("--only", default="", help="run only choices whose name contains this text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told: Any = OmegaConf.load(Path(__file__).with_suffix(".yaml"))
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    limit = f"workload.limit={options.limit * options.windows} workload.windows={options.windows}"
    for choice in told["choices"]:
        if options.only not in choice["name"]:
            continue
        base = f"{told['base']} {limit} {choice.get('both', '')}"
        lines.append(row(choice, base, options.windows))
        print(lines[-1])
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def row(choice: dict[str, Any], base: str, num_windows: int) -> str:
    """One choice both ways in every window, as Markdown."""
    runs = (choice["with_it"], choice["without"])
    summaries = [
        [measure(f"{base} workload.window={window}", run) for window in range(num_windows)]
        for run in runs
    ]
    found = np.array([[each[choice["metric"]] for each in side] for side in summaries])
    with_it, without = found.mean(axis=1)
    apart = found[1] / found[0] - 1
    told = (
        f"{with_it:.4g} ({runs[0]['says']})",
        f"{without:.4g} ({runs[1]['says']})",
        f"{without / with_it - 1:+.1%}",
        f"{apart.min():+.1%} to {apart.max():+.1%}",
        ", ".join(each.name for each in objections(summaries[0] + summaries[1])) or CLEAN,
    )
    return f"| {choice['name']} | `{choice['metric']}` | {' | '.join(told)} |"


def measure(base: str, run: dict[str, Any]) -> dict[str, float | int]:
    """The summary of one of a choice's runs."""
    config = config_of(*base.split(), *run.get("overrides", "").split())
    inside = CostModel.layer_bytes

    def at_once(
        self: CostModel, num_full: int, num_swa: int, num_states: int
    ) -> NDArray[np.float64]:
        # every byte before the first layer: computing and loading one after the other
        layers = inside(self, num_full, num_swa, num_states)
        total = np.zeros_like(layers)
        total[0] = layers.sum()
        return total

    patch = mock.patch.object(CostModel, "layer_bytes", at_once)
    with patch if run.get("loads_first") else nullcontext():
        result = experiment.run(config)
    return summarize(result.records, result.measures)


if __name__ == "__main__":
    main()
