"""Make the pages of stored runs.

hicache report RUN_OR_SWEEP ...

Writes report.html into the directory of each run. `hicache run` writes it for a single run; the
runs of a sweep get it here. The table and the files of a sweep, such as sweep.html, are made anew.
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.sweep import sum_up
from hicache.cli.tables.groups import find_runs
from hicache.results.requests_file import TableRecords, read_requests
from hicache.runs.stored import CONFIG_FILE, flat, read_rows, read_summary, read_yaml


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs or of sweeps")
    options = parser.parse_args(arguments)
    from pyarrow import Table  # --help needs neither pyarrow nor jinja2

    from hicache.results.report import write_report

    with in_one_sentence():
        for run in [run for path in options.runs for run in find_runs(path)]:
            page = write_report(
                run,
                title=run.name,
                summary=read_summary(run),
                rows=read_rows(run),
                knobs=flat(read_yaml(run / CONFIG_FILE, dict)),
                records=TableRecords(Table.from_pandas(read_requests(run))),
            )
            print(page)
        for path in options.runs:
            if not (path / "summary.json").is_file():
                runs = find_runs(path)
                sum_up(path, runs, title=str(read_yaml(runs[0] / CONFIG_FILE, dict).get("name")))
                print(path / "sweep.html")
