"""The figures of docs/reports.md, each from the sweep of the experiment of its name.

python -m experiments.studies.report_figures outputs/prefetch_cut/SWEEP docs/reports
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.tables.groups import (
    Group,
    Spread,
    Value,
    answer_sets,
    differing_keys,
    group_runs,
    load_runs,
    short,
)
from hicache.cli.tables.table import over_runs
from hicache.cli.tables.verdicts import Verdicts
from hicache.results.report import save

VERDICT_LETTERS = 150  # on a line of a figure
LINE_INCHES = 0.2
COLOURS = ("#999999", "#0072B2", "#009E73", "#E69F00")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """How an experiment is drawn: one row a value of `row`, one panel a metric, one bar an arm.

    `arms`: what the bars are called, by the values of `arm_key` in the order of the sweep.
    """

    title: str
    axis: str
    axis_label: str
    arm_key: str
    arms: dict[Value, str]
    metrics: dict[str, str]
    row: str | None = None


QUESTIONS = {
    "prefetch_cut": Question(
        title="A prefetch that does not fit in host memory",
        axis="cache.host_gib",
        axis_label="host memory, GiB",
        arm_key="arm",
        arms={
            "cut_off": "abandoned (before)",
            "cut_on": "cut at arrival (reports 000-002)",
            "cut_at_hit": "cut when storage has answered",
            "cut_restorable": "… to the restorable prefix",
        },
        metrics={
            "prefetch/abandoned_count": "prefetches abandoned",
            "prefetch/useful_share": "pages used ÷ pages read",
            "cache/token_hit_rate": "token hit rate",
            "request/ttft_s_mean": "mean TTFT, s",
        },
        row="model",
    ),
    "prefetch_sidecars": Question(
        title="A prefetch whose state arrives after its pages",
        axis="storage.sidecar_s",
        axis_label="by which the state is late, s",
        arm_key="prefetch.await_sidecars",
        arms={False: "may stop (before)", True: "waits for its state (report 003)"},
        metrics={
            "prefetch/useful_share": "pages used ÷ pages read",
            "cache/token_hit_rate": "token hit rate",
            "request/storage_wait_s_mean": "mean wait for storage, s",
            "request/ttft_s_mean": "mean TTFT, s",
        },
        row="prefetch.stop",
    ),
    "swa_load_back_budget": Question(
        title="Charging window pages that an admitted request will load back",
        axis="cache.swa_device_share",
        axis_label="share of device memory for windows",
        arm_key="scheduler.swa_budget",
        arms={
            "no_host_term": "not charged (before)",
            "reports": "charged (report 004)",
            "sglang_0_5_23": "later formula",
            "double": "charged twice (wrong)",
        },
        metrics={
            "scheduler/prefill_oom_count": "prefills out of memory",
            "scheduler/deferred_count": "admissions deferred",
            "cache/token_hit_rate": "token hit rate",
            "request/ttft_s_p95": "95th percentile of TTFT, s",
        },
    ),
    "rank_agreement": Question(
        title="Which hit ranks with separate storages agree on",
        axis="parallel.ranks",
        axis_label="ranks",
        arm_key="parallel.hit_agreement",
        arms={
            "min_of_maxima": "minimum of the longest hits",
            "restorable": "longest prefix that all can restore",
        },
        metrics={
            "agreement/illegal_lengths_count": "lengths some rank cannot restore",
            "prefetch/useful_share": "pages used ÷ pages read",
            "cache/token_hit_rate": "token hit rate",
            "request/storage_wait_s_mean": "mean wait for storage, s",
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw one sweep; the last line is the path of the figure."""
    parser = parser_of("python -m experiments.studies.report_figures", __doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    with in_one_sentence():
        runs = load_runs([options.sweep])
        name = str(runs[0].config["name"])
        if name not in QUESTIONS:
            raise ValueError(
                f"the sweep must be of one of the experiments {', '.join(QUESTIONS)}, "
                f"got one of {name}"
            )
        figure = draw(group_runs(runs, differing_keys(runs)), QUESTIONS[name])
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / f"{name}.png"
    save(figure, path)
    print(path)


def draw(groups: Sequence[Group], question: Question) -> Figure:
    """Bars at the median, with the range over the runs of each."""
    rows: list[Value] = [None]
    if question.row is not None:
        rows = list(dict.fromkeys(group.settings[question.row] for group in groups))
    figure = Figure(figsize=(13, 0.9 + 2.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(question.metrics), squeeze=False)
    for place, (row, line) in enumerate(zip(rows, panels, strict=True)):
        members = [g for g in groups if question.row is None or g.settings[question.row] == row]
        for axes, (metric, label) in zip(line, question.metrics.items(), strict=True):
            _draw_bars(axes, members, question, metric)
            axes.set_title(label if row is None else f"{short(row)}: {label}", fontsize=10)
            if place == len(rows) - 1:
                axes.set_xlabel(question.axis_label)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    verdict = wrap(Verdicts(answer_sets(groups)).line, VERDICT_LETTERS)
    title = ": ".join(filter(None, [question.title, over_runs(groups)]))
    figure.suptitle("\n".join([title, *verdict]), x=0.5)
    figure.set_figheight(figure.get_figheight() + LINE_INCHES * len(verdict))
    return figure


def _draw_bars(axes: Axes, groups: Sequence[Group], question: Question, metric: str) -> None:
    ticks = sorted(dict.fromkeys(float(g.settings[question.axis] or 0) for g in groups))
    width = 0.8 / len(question.arms)
    for place, (arm, name) in enumerate(question.arms.items()):
        xs, middles, lows, highs = [], [], [], []
        for group in groups:
            if group.settings[question.arm_key] != arm:
                continue
            # a count of what never happened may be missing
            spread = Spread.of([run.summary.get(metric, 0.0) for run in group.runs])
            tick = ticks.index(float(group.settings[question.axis] or 0))
            xs.append(tick + (place - (len(question.arms) - 1) / 2) * width)
            middles.append(spread.middle)
            lows.append(spread.middle - spread.low)
            highs.append(spread.high - spread.middle)
        axes.bar(xs, middles, width * 0.9, label=name, color=COLOURS[place])
        axes.errorbar(xs, middles, yerr=[lows, highs], fmt="none", ecolor="#222222", capsize=2)
    axes.set_xticks(range(len(ticks)), [short(tick) for tick in ticks])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
