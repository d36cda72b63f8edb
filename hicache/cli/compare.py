"""Compare runs and sweeps: the settings in which they differ, and their results.

hicache compare outputs/adhoc/RUN outputs/adhoc/OTHER_RUN
hicache compare SWEEP --metric request/ttft_s_p99 --metric cache/token_hit_rate
hicache compare SWEEP --json            (or --csv, --latex, --markdown)
hicache compare SWEEP --paired          request by request

The first run is the baseline. Runs that differ only in window and seed share one row, which shows
their median and range. --paired compares the requests that both sides finished, with 95 % intervals
if there are enough windows (`workload.windows`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.tables.groups import Group, Spread, differing_keys, group_runs, load_runs
from hicache.cli.tables.paired_table import compare_pairs, describe_pairs, table_of_pairs
from hicache.cli.tables.result_table import as_csv, as_latex, as_markdown, show_result
from hicache.cli.tables.table import (
    RATIO_OF,
    answer_sets,
    is_overloaded,
    makes_claim,
    over_runs,
    table_of,
)
from hicache.cli.tables.verdicts import Verdicts

FORMS = {
    "csv": (as_csv, "print CSV with unrounded values and without notes"),
    "latex": (as_latex, "print a LaTeX table, which needs \\usepackage{booktabs}"),
    "markdown": (as_markdown, "print a Markdown table"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or JSON."""
    parser = parser_of("hicache compare", __doc__)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN_OR_SWEEP", help="result directories"
    )
    parser.add_argument(
        "--metric", action="append", help="metric to show, a key of summary.json; repeatable"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, (_, purpose) in FORMS.items():
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=purpose)
    parser.add_argument("--paired", action="store_true", help="compare the runs request by request")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        runs = load_runs(options.paths)
        metrics = tuple(options.metric or runs[0].metrics)
        groups = group_runs(runs, differing_keys(runs))
        if options.paired:
            comparisons = compare_pairs(groups, metrics)
            if options.json:
                print(json.dumps(describe_pairs(comparisons), indent=2))
                return
            result = table_of_pairs(groups, comparisons)
            heading = "Differences to the first row"
        else:
            if options.json:
                print(json.dumps(compared(groups, metrics), indent=2))
                return
            result = table_of(groups, metrics, ratio_of=metrics[0] if options.metric else RATIO_OF)
            heading = ": ".join(filter(None, [f"{len(runs)} runs", over_runs(groups)]))
        if options.form:
            write, _ = FORMS[options.form]
            print(write(result))
        else:
            show_result(result, heading)


def compared(groups: Sequence[Group], metrics: Sequence[str]) -> list[dict[str, object]]:
    """Each group's settings and metrics, with the ratio and the difference to the first.

    Both are None for a latency where either side is overloaded.
    """
    first = {metric: Spread.of(groups[0].values(metric)).middle for metric in metrics}
    verdicts = Verdicts(answer_sets(groups))
    rows: list[dict[str, object]] = []
    for group in groups:
        cells: dict[str, dict[str, float | None]] = {}
        for metric in metrics:
            middle, low, high = Spread.of(group.values(metric))
            claims = makes_claim(metric, group, groups[0])
            cells[metric] = {
                "median": middle,
                "min": low,
                "max": high,
                "ratio": middle / first[metric] if first[metric] and claims else None,
                "difference": middle - first[metric] if claims else None,
            }
        rows.append(
            {
                "settings": group.settings,
                "runs": [str(run.path) for run in group.runs],
                "overloaded": is_overloaded(group),
                "verdict": verdicts.sentences(group),
                "metrics": cells,
            }
        )
    return rows


if __name__ == "__main__":
    main()
