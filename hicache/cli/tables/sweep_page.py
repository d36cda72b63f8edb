"""The page of a sweep: a sentence per metric, the table, and charts in which arms can be hidden."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import relpath
from pathlib import Path
from statistics import median
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import pandas as pd

from hicache.cli.tables.comparison import NO_CLAIM, TITLES, number, over_runs
from hicache.cli.tables.groups import Group, answer_sets, is_number, short
from hicache.cli.tables.paired_table import FOUND, STAR, table_of_pairs
from hicache.cli.tables.request_metrics import times
from hicache.cli.tables.result_table import ResultTable, Row
from hicache.cli.tables.sweep_figure import COLOURS
from hicache.cli.tables.verdicts import on_runs
from hicache.results.metrics import Status
from hicache.results.pages import SHARE, chart, distribution, num_places, series, write_page
from hicache.results.requests_file import has_requests, read_requests
from hicache.results.verdict import CLEAN, in_short
from hicache.runs.stored import ROWS_FILE, read_rows

COST, TTFT = "gpu/seconds_per_request", "request/ttft_s_mean"
HIT_RATE = "interval/token_hit_rate"
MOST_NAMED = 6  # comparisons in a sentence
EQUAL = "no difference shown"
LACKS = "No interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a sweep shows.

    Attributes:
        table: medians of the arms, as the terminal shows them.
        sentences: the arm to take by mean TTFT, if that is a metric; then one for each metric.
        remarks: what holds for all of them.
        paired: the differences with their intervals; None if there are no intervals.
        comparisons: each arm with its baseline, by metric: the effect with its interval, whether it
            is higher or lower, and the smallest effect that 80 % of such comparisons find. Empty
            without intervals.
    """

    table: ResultTable
    sentences: list[str]
    remarks: list[str]
    paired: ResultTable | None
    comparisons: pd.DataFrame


def write_sweep_page(
    directory: Path, groups: Sequence[Group], metrics: Sequence[str], found: Findings, title: str
) -> Path:
    """Write `sweep.html` into the directory of a sweep, and return its path.

    Args:
        directory: the directory of the sweep.
        groups: the runs of each configuration (arm).
        metrics: the metrics to compare, which all runs have.
        found: what these groups and metrics show.
        title: the heading of the page.
    """
    arms = {
        f"{place} {_name(group.settings)}": group
        for place, group in enumerate((g for each in answer_sets(groups) for g in each), 1)
    }
    colors = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(arms)}
    table = found.table
    texts, members = table.texts.itertuples(index=False), iter(arms.values())
    return write_page(
        directory / "sweep.html",
        "sweep.html.jinja",
        title=title,
        sentences=found.sentences,
        remarks=found.remarks,
        objected=not any(CLEAN in note for note in table.notes),
        over=over_runs(groups),
        table=table,
        rows_by_section=[
            [(next(texts), _links(next(members), directory)) for _ in section]
            for section in table.sections
        ],
        heats=list(_heats(groups, metrics)),
        arms=[{"name": name, "color": color} for name, color in colors.items()],
        charts=[each for each in _charts(arms, colors, metrics) if each["series"]],
    )


def findings_of(groups: Sequence[Group], metrics: Sequence[str], table: ResultTable) -> Findings:
    sections, remarks, keys = table.sections, list[str](), list(groups[0].settings)
    try:
        paired = table_of_pairs(groups, metrics)
    except (ValueError, OSError) as error:
        remarks = [f"{LACKS}: {error}."]
    else:
        notes = [note for note in paired.notes if note not in table.notes]
        remarks = [note for note in notes if note != STAR]
        rows = [row for section in paired.sections for row in section]
        if any(row.values[f"{metric} low"] is not None for row in rows for metric in metrics):
            sections = paired.sections
        else:
            remarks = [note for note in remarks if note.startswith(LACKS)]
    sentences, comparisons = [], list[dict[str, str]]()
    for metric in metrics:
        heading = TITLES.get(metric, metric)
        if sections is table.sections:
            rows = [row for section in sections for row in section]
            rows.sort(key=lambda row: cast(float, row.values[f"{metric} median"]))
            told = [f"{row.texts[heading]} ({_arm(row, keys)})" for row in rows]
            text = f"median {told[0]}" + (f" to {told[-1]}" if len(told) > 1 else "")
        else:
            found = [_against(each, heading, metric, keys) for each in sections]
            text = "; ".join(map(_told, found))
            comparisons += [each for against in found for each in against]
        sentences.append(f"{_plain(heading)}: {text}.")
    if TTFT in metrics and len(groups) > 1:
        at_all = [] if sections is table.sections else sections
        sentences.insert(0, _advice(at_all, groups, keys))
    return Findings(
        table=table,
        sentences=sentences,
        remarks=remarks,
        paired=None if sections is table.sections else replace(paired, notes=notes),
        comparisons=pd.DataFrame(comparisons),
    )


def _advice(sections: Sequence[Sequence[Row]], groups: Sequence[Group], keys: Sequence[str]) -> str:
    # which arm, by how much, and whether to trust it
    heading, ratio, told = TITLES[TTFT], f"{TTFT} ratio", list[str]()
    for rows in sections:
        pairs = list(zip(_against(rows, heading, TTFT, keys), rows[1:], strict=True))
        faster = [(each, row.values) for each, row in pairs if each["verdict"] == "lower"]
        faster.sort(key=lambda each: cast(float, each[1][ratio]))
        baseline = pairs[0][0]["against"].partition(" with ")[0]
        text = f"{baseline}, as no arm is shown to be faster"
        if faster:
            best, values = faster[0]
            end = cast(float, values[f"{ratio} high"])
            near = [
                each["arm"] for each, row in faster[1:] if cast(float, row[f"{ratio} low"]) <= end
            ]
            text = f"{best['arm']}, {best['effect']} against {baseline}"
            text += f" (interval overlaps that of {_few(near)})" if near else ""
        elif not {each["verdict"] for each, _ in pairs} <= {EQUAL, "higher", "the same"}:
            text = "none, as some arms are overloaded or have no interval"
        at = pairs[0][0]["at"]
        told.append(f"at {at} {text}" if at else text)
    text = "; ".join(told) or "none, as there are no intervals"
    return f"Recommendation by mean TTFT: {text}. Verdict on the runs: {in_short(on_runs(groups))}."


def _against(
    rows: Sequence[Row], heading: str, metric: str, keys: Sequence[str]
) -> list[dict[str, str]]:
    baseline, *others = rows
    own = [key for key in keys if any(row.values[key] != baseline.values[key] for row in others)]
    shared = [key for key in keys if key not in own]
    return [
        {
            "metric": metric,
            "at": _arm(baseline, shared) if shared else "",
            "arm": _arm(row, own),
            "effect": row.texts[heading].removesuffix(FOUND),
            "verdict": _judged(row, heading, metric),
            "smallest effect found": _least(row, metric),
            "against": f"{_arm(baseline, own)} with {baseline.texts[heading]}",
        }
        for row in others
    ]


def _least(row: Row, metric: str) -> str:
    least = row.values[f"{metric} least effect"]
    if not isinstance(least, float):
        return ""
    return number(least) if row.values[f"{metric} ratio"] is None else f"{least:.1%}"


def _told(comparisons: Sequence[Mapping[str, str]]) -> str:
    ordered = sorted(comparisons, key=lambda each: each["verdict"] == EQUAL)
    told = [f"{each['arm']} {each['effect']}, {each['verdict']}" for each in ordered]
    at = f"at {ordered[0]['at']} " if ordered[0]["at"] else ""
    return f"{at}{_few(told)}, against {ordered[0]['against']}"


def _judged(row: Row, heading: str, metric: str) -> str:
    if row.texts[heading] == NO_CLAIM:
        return "no claim under overload"
    for name, equal in ((f"{metric} ratio", 1.0), (metric, 0.0)):
        low, high = row.values[f"{name} low"], row.values[f"{name} high"]
        if isinstance(low, float) and isinstance(high, float):
            if low == high == equal:
                return "the same"
            return "higher" if low > equal else "lower" if high < equal else EQUAL
    return "no interval"


def _few(told: Sequence[str]) -> str:
    more = len(told) - MOST_NAMED
    return "; ".join(told[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _charts(
    arms: dict[str, Group], colors: dict[str, str], metrics: Sequence[str]
) -> Iterator[dict[str, Any]]:
    samples = {name: values for name, group in arms.items() if (values := _ttfts(group)).size}
    if samples:
        low = min(values[values > 0].min(initial=np.inf) for values in samples.values())
        yield distribution("TTFT of all requests", "TTFT, s", samples, colors, float(low))
    yield _trade(arms, colors)
    rates = {name: rate for name, group in arms.items() if (rate := _hit_rates(group, len(arms)))}
    lines = [series(name, colors[name], *rate) for name, rate in rates.items()]
    y = {"label": "token hit rate", **SHARE}
    yield chart("Hit rate over time, first run of each arm", {"label": "time, min"}, y, lines)
    for metric in metrics:
        lines = []
        for place, (name, group) in enumerate(arms.items(), 1):
            seeds = group.values(metric)
            aside = 0.5 * (np.arange(len(seeds)) + 0.5) / len(seeds) - 0.25
            lines.append(series(name, colors[name], place + aside, seeds, dots=7))
        heading = _plain(TITLES.get(metric, metric))
        x = {"label": "arm", "whole": True, "hidden": True, "from": 0.5, "to": len(arms) + 0.5}
        yield chart(f"{heading}, a dot per run", x, {"label": heading}, lines)


def _trade(arms: dict[str, Group], colors: dict[str, str]) -> dict[str, Any]:
    points = {
        name: (median(group.values(COST)), median(group.values(TTFT)))
        for name, group in arms.items()
        if all({COST, TTFT} <= run.summary.keys() for run in group.runs)
    }
    # an arm is in the Pareto set if no other is at least as good in both and better in one
    best = sorted(
        point
        for point in set(points.values())
        if not any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points.values())
    )
    lines = [
        series(name, colors[name], point[0], point[1], dots=12 if point in best else 7)
        for name, point in points.items()
    ]
    if lines:
        places, heights = zip(*best, strict=True)
        lines.append(series("Pareto set", "#222222", places, heights, dash=[4, 4]))
    title = "TTFT against GPU time, medians (large dots: Pareto set)"
    return chart(title, {"label": "GPU-s per request"}, {"label": "TTFT mean, s"}, lines)


def _ttfts(group: Group) -> np.ndarray[Any, np.dtype[np.float64]]:
    tables = [read_requests(run.path) for run in group.runs if has_requests(run.path)]
    parts = [times(rows[rows["status"] == Status.finished.value], "ttft") for rows in tables]
    return np.concatenate([[], *parts])


def _hit_rates(group: Group, num_arms: int) -> tuple[list[float], list[float]] | None:
    path = group.runs[0].path
    rows = read_rows(path) if (path / ROWS_FILE).is_file() else []
    rows = rows[:: -(-len(rows) // num_places(num_arms)) or 1]
    if not rows:
        return None
    return [row["time_s"] / 60 for row in rows], [row.get(HIT_RATE, np.nan) for row in rows]


def _heats(groups: Sequence[Group], metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    keys = list(groups[0].settings)
    if len(keys) != 2 or not all(is_number(v) for g in groups for v in g.settings.values()):
        return
    down, across = ({float(group.settings[key] or 0) for group in groups} for key in keys)
    for metric in metrics:
        found = {tuple(g.settings.values()): median(g.values(metric)) for g in groups}
        low, span = min(found.values()), max(found.values()) - min(found.values())

        def cell(*place: float) -> tuple[str, float]:
            value = found.get(place)  # noqa: B023
            if value is None:
                return "", 0.0
            return number(value), 0.7 * (value - low) / (span or 1)  # noqa: B023

        yield {
            "title": _plain(TITLES.get(metric, metric)),
            "down": keys[0],
            "across": keys[1],
            "columns": [short(value) for value in sorted(across)],
            "rows": [(short(x), [cell(x, y) for y in sorted(across)]) for x in sorted(down)],
        }


def _links(group: Group, directory: Path) -> list[tuple[str, str]]:
    pages = [
        page if (page := run.path / "report.html").is_file() else run.path for run in group.runs
    ]
    return [
        (quote(Path(relpath(page, directory)).as_posix()), run.path.name.partition("_")[0])
        for page, run in zip(pages, group.runs, strict=True)
    ]


def _name(settings: Mapping[str, Any]) -> str:
    told = (
        value if isinstance(value, str) else f"{key.rpartition('.')[2]}={short(value)}"
        for key, value in settings.items()
    )
    return ", ".join(told) or "all runs"


def _arm(row: Row, keys: Sequence[str]) -> str:
    return _name({key: row.values[key] for key in keys})


def _plain(heading: str) -> str:
    return heading.replace("\n", " ")
