"""Compare runs and sweeps: what was different about them, and what came of it.

python -m experiments.compare outputs/adhoc/RUN outputs/adhoc/OTHER_RUN
python -m experiments.compare SWEEP --metric request/ttft_s_p99 --metric cache/token_hit_rate
python -m experiments.compare SWEEP --json            (or --markdown)
python -m experiments.compare SWEEP --paired          request by request

The first run given is the baseline. Runs that differ in their seed alone make one row: the median,
with the range beside it. With --paired: the differences over the requests that both finished, and
their 95 % intervals.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.groups import Group, differing_keys, group_runs, load_runs
from experiments.job import one_sentence
from experiments.paired import of_requests
from experiments.paired_table import compare_pairs, describe_pairs, draw_pairs, markdown_pairs
from experiments.screen import show_table
from experiments.table import RATIO_OF, Style, draw_table, markdown_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN_OR_SWEEP")
    parser.add_argument("--metric", action="append", help="a key of summary.json; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    parser.add_argument("--paired", action="store_true", help="compare request by request")
    options = parser.parse_args(arguments)
    try:
        runs = load_runs(options.paths)
        metrics = tuple(options.metric or runs[0].metrics)
        groups = group_runs(runs, differing_keys(runs))
        if options.paired:
            comparisons = compare_pairs(groups, options.metric or of_requests(metrics))
            if options.json:
                print(json.dumps(describe_pairs(comparisons), indent=2))
            elif options.markdown:
                print(markdown_pairs(groups, comparisons))
            else:
                show_table(draw_pairs(groups, comparisons))
            return
        if options.json:
            print(json.dumps(compared(groups, metrics), indent=2))
            return
        style = Style(
            middle=median, metrics=metrics, ratio_of=metrics[0] if options.metric else RATIO_OF
        )
        if options.markdown:
            print(markdown_table(groups, style))
            return
        heading = f"\n{len(runs)} runs: median (lowest–highest) over seeds"
        show_table(draw_table(groups, style, title=heading))
    except (OSError, ValueError) as error:
        sys.stderr.write(one_sentence(error) + "\n")
        sys.exit(2)


def compared(groups: Sequence[Group], metrics: Sequence[str]) -> list[dict[str, object]]:
    """Each group's settings and metrics, with the ratio and the difference to the first."""
    first = {metric: median(groups[0].values(metric)) for metric in metrics}
    rows: list[dict[str, object]] = []
    for group in groups:
        cells: dict[str, dict[str, float | None]] = {}
        for metric in metrics:
            values = group.values(metric)
            middle = median(values)
            cells[metric] = {
                "median": middle,
                "min": min(values),
                "max": max(values),
                "ratio": middle / first[metric] if first[metric] else None,
                "difference": middle - first[metric],
            }
        rows.append(
            {
                "settings": group.settings,
                "runs": [str(run.path) for run in group.runs],
                "overloaded": any(run.is_overloaded for run in group.runs),
                "metrics": cells,
            }
        )
    return rows


if __name__ == "__main__":
    main()
