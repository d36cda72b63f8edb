"""Compare runs and sweeps: the settings in which they differ, and their results.

hicache compare RUN OTHER_RUN
hicache compare SWEEP --metric request/ttft_s_p99 --metric cache/token_hit_rate
hicache compare SWEEP OTHER_SWEEP --baseline SWEEP
hicache compare SWEEP --where storage.read_gbps=2,4 --baseline cache.policy=lru
hicache compare SWEEP --json            (or --csv, --markdown)
hicache compare SWEEP --paired          request by request

Runs that differ only in random seed and slice (part of the trace) share one row, which shows their
median and range. Each row is compared with the baseline that shares the most settings with it.
Without --baseline, the program takes the first setting that is not a number. The rows with the
first value of this setting are the baselines. --paired compares the requests that finished under
both configurations. It shows 95 % confidence intervals if there are enough slices
(`workload.slice`).
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.tables.groups import compared_groups

FORMS = {
    "json": "print a list of objects with unrounded values",
    "csv": "print CSV with unrounded values and without notes",
    "markdown": "print a Markdown table",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache compare", __doc__)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="RUN_OR_SWEEP", help="result directories")
    add("--metric", action="append", help="metric to show, a key of summary.json; repeatable")
    add(
        "--where",
        action="append",
        default=[],
        metavar="KNOB=VALUE,...",
        help="use only the runs with one of these values; repeatable",
    )
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="KNOB=VALUE|DIRECTORY",
        help="compare with the runs that have this setting or lie there; repeatable",
    )
    form = parser.add_mutually_exclusive_group()
    for name, purpose in FORMS.items():
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=purpose)
    add("--paired", action="store_true", help="compare the runs request by request")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        from hicache.cli.tables import result_table  # pandas, which the help does not need
        from hicache.cli.tables.comparison import RATIO_OF, over_runs, table_of
        from hicache.cli.tables.paired_table import PAIRED, table_of_pairs

        groups = compared_groups(options.paths, where=options.where, baseline=options.baseline)
        metrics = tuple(options.metric or groups[0].runs[0].metrics)
        if options.paired:
            result = table_of_pairs(groups, metrics)
            heading = PAIRED
        else:
            result = table_of(groups, metrics, ratio_of=metrics[0] if options.metric else RATIO_OF)
            num_runs = sum(len(group.runs) for group in groups)
            heading = ": ".join(filter(None, [f"{num_runs} runs", over_runs(groups)]))
        if options.form:
            print(getattr(result_table, f"as_{options.form}")(result))
        else:
            result_table.show_result(result, heading)
