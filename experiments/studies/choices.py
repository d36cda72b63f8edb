"""What each choice of the simulation changes: the same run with it and without it.

python -m experiments.studies.choices --out choices.md   (some minutes; figures in docs/validity.md)

The choices stand in `choices.yaml`.
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

from experiments.launch.schema import config_of
from hicache import experiment
from hicache.executor.simulated.cost import CostModel
from hicache.results.metrics import summarize
from hicache.results.verdict import in_short, objections

HEADINGS = ("choice", "metric", "with it", "without it", "change", "verdict")


def main() -> None:
    """Run every choice both ways and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=600, help="requests of the trace")
    parser.add_argument("--only", default="", help="choices whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told: Any = OmegaConf.load(Path(__file__).with_suffix(".yaml"))
    base = f"{told['base']} workload.limit={options.limit}"
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for choice in told["choices"]:
        if options.only not in choice["name"]:
            continue
        runs = (choice["with_it"], choice["without"])
        summaries = [measure(f"{base} {choice.get('both', '')}", run) for run in runs]
        with_it, without = (summary[choice["metric"]] for summary in summaries)
        change = f"{without / with_it - 1:+.1%}" if with_it else f"{without:+.3g}"
        lines.append(
            f"| {choice['name']} | `{choice['metric']}` | {with_it:.4g} ({runs[0]['says']}) "
            f"| {without:.4g} ({runs[1]['says']}) | {change} | {in_short(objections(summaries))} |"
        )
        print(lines[-1])
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


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
