"""Remakes the results pages of `docs/`: their runs, tables, figures and stamps.

python -m experiments.pages --list            every page, its runs, minutes, commit and canary
python -m experiments.pages routing           the missing runs of a page, then its tables
python -m experiments.pages --canaries        run the canaries; says which pages are stale

A page is a file of `experiments/findings/`. Either it lists arms (settings that are compared) and
conditions (settings under which they are), or the command of a program that makes the page. Each
run is kept in `outputs/pages`, by configuration and code. The numbers of the tables are written to
`experiments/results/NAME.json`, and the tables into the page, between `<!-- NAME -->` and
`<!-- end -->`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.studies.kept_runs import kept_runs
from hicache.results.metrics import Result, summarize
from hicache.results.verdict import is_overloaded

ROOT = Path(__file__).parents[1]
FINDINGS, RESULTS = ROOT / "experiments" / "findings", ROOT / "experiments" / "results"
OUT = Path("outputs", "pages")

Values = Mapping[str, float]  # a summary
Runs = Mapping[tuple[str, str], Sequence[Sequence[Values]]]  # by condition and arm: block, seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Settings under which arms are compared; it replaces what it names of its finding."""

    name: str
    settings: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    blocks: Sequence[str]
    seeds: Sequence[int]

    def runs(self) -> Iterator[tuple[str, str, int, list[str]]]:
        """Yield the arm, block, seed and overrides of each run; all arms of a seed come first."""
        for seed in self.seeds:
            for block in self.blocks:
                for arm, own in self.arms.items():
                    told = [*self.settings, *own, f"workload.slice={block}", f"seed={seed}"]
                    yield arm, block, seed, told


def conditions_of(finding: Mapping[str, Any]) -> list[Condition]:
    found = []
    for name, own in finding["conditions"].items():
        arms = finding["arms"]
        names = own.get("arms") or finding.get("few") or [*arms]
        found.append(
            Condition(
                name=name,
                settings=[*finding["settings"], *own.get("settings", ())],
                arms={each: arms[each] for each in names},
                blocks=own.get("blocks", finding["blocks"]),
                seeds=own.get("seeds", finding["seeds"]),
            )
        )
    return found


def measured(result: Result) -> dict[str, float]:
    summary = dict(summarize(result.records, result.measures))
    return summary | {"overloaded": is_overloaded(summary)}


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        for condition in conditions_of(yaml.safe_load((FINDINGS / f"{name}.yaml").read_text())):
            runs = [*condition.runs()]
            for number, (arm, block, seed, told) in enumerate(runs):
                (one,) = kept_runs([told], measured, OUT, jobs=1)
                print(condition.name, arm, block, seed, one["cache/token_hit_rate"],
                      f"{number + 1}/{len(runs)}", flush=True)
