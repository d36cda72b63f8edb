"""The table of a fault matrix: TTFT under each fault and stop policy, in Markdown.

python -m experiments.studies.fault_table outputs/fault_matrix/<time> [more directories]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from hicache.cli.tables.groups import StoredRun, load_runs
from hicache.results.verdict import in_short, objections

FAULT, STOP, ENGINE = "storage.faults.preset", "prefetch.stop", "storage.kind"


def fault_table(runs: Sequence[StoredRun]) -> str:
    """One row for each fault and engine, and for each stop policy the mean and p95 TTFT and hits.

    Cells: mean TTFT / its 95th percentile in seconds, and the share of prompt tokens not computed.
    Engines whose cells are all equal share a row. What speaks against any run stands below.
    """
    stops = list(dict.fromkeys(str(run.config[STOP]) for run in runs))
    cells = {
        (str(run.config[ENGINE]), str(run.config[FAULT]), str(run.config[STOP])): _cell(run.summary)
        for run in runs
    }
    engines: dict[tuple[str, ...], list[str]] = {}
    for engine, fault in dict.fromkeys((engine, fault) for engine, fault, _ in cells):
        cells_of_row = (fault, *(cells.get((engine, fault, stop), "none") for stop in stops))
        engines.setdefault(cells_of_row, []).append(engine)
    rows = [[", ".join(names), *cells_of_row] for cells_of_row, names in engines.items()]
    table = pd.DataFrame(rows, columns=["engine", "fault", *stops])
    verdict = in_short(objections([run.summary for run in runs]))
    return f"{table.to_markdown(index=False, disable_numparse=True)}\n\nverdict: {verdict}"


def _cell(summary: dict[str, float]) -> str:
    mean, p95 = summary["request/ttft_s_mean"], summary["request/ttft_s_p95"]
    return f"{mean:.2f} / {p95:.2f} s, {summary['cache/token_hit_rate']:.3f}"


if __name__ == "__main__":
    print(fault_table(load_runs([Path(argument) for argument in sys.argv[1:]])))
