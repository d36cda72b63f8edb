"""The table of a fault matrix: TTFT under each fault and stop policy, in Markdown.

python -m experiments.fault_table outputs/fault_matrix/<time> [more directories]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.groups import StoredRun, load_runs

FAULT, STOP, ENGINE = "storage.faults.preset", "prefetch.stop", "storage.kind"


def fault_table(runs: Sequence[StoredRun]) -> str:
    """One row for each engine and fault, and for each stop policy the mean and p95 TTFT and hits.

    Cells: mean TTFT / its 95th percentile in seconds, and the share of prompt tokens not computed.
    """
    stops = list(dict.fromkeys(str(run.config[STOP]) for run in runs))
    cells = {
        (run.config[ENGINE], run.config[FAULT], run.config[STOP]): _cell(run.summary)
        for run in runs
    }
    rows = dict.fromkeys((run.config[ENGINE], run.config[FAULT]) for run in runs)
    lines = [
        "| engine | fault | " + " | ".join(stops) + " |",
        "|---|---|" + "---|" * len(stops),
    ]
    for engine, fault in rows:
        row = [cells.get((engine, fault, stop), "none") for stop in stops]
        lines.append(f"| {engine} | {fault} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _cell(summary: dict[str, float]) -> str:
    mean, p95 = summary["request/ttft_s_mean"], summary["request/ttft_s_p95"]
    return f"{mean:.2f} / {p95:.2f} s, {summary['cache/token_hit_rate']:.3f}"


if __name__ == "__main__":
    print(fault_table(load_runs([Path(argument) for argument in sys.argv[1:]])))
