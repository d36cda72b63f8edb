"""Makes a table that compares runs: the settings in which they differ, and their metrics."""

from collections.abc import Sequence
from fnmatch import fnmatch
from textwrap import shorten

from hicache.cli.tables.groups import (
    Group,
    Spread,
    StoredRun,
    answer_sets,
    question_key,
    short,
)
from hicache.cli.tables.result_table import ResultTable, Row
from hicache.cli.tables.verdicts import UNSERVED, Verdicts
from hicache.results import verdict

TITLES = {
    "agreement/illegal_lengths_count": "lengths some rank\ncannot restore",
    "cache/token_hit_rate": "token hit rate",
    "goodput/jobs_per_hour": "goodput,\njobs/hour",
    "goodput/requests_per_s": "goodput,\nrequests/s",
    "gpu/prefill_seconds_per_request": "prefill GPU-s\nper request",
    "gpu/seconds_per_request": "GPU-s per request",
    "prefetch/abandoned_count": "prefetches\nabandoned",
    "prefetch/cut_tokens": "tokens cut",
    "prefetch/discarded_pages": "pages allocated,\nnot read",
    "prefetch/not_restorable_pages": "pages read, not\nrestorable",
    "prefetch/used_pages": "prefetched\npages used",
    "prefetch/useful_share": "pages used ÷\npages read",
    "request/storage_wait_s_mean": "storage wait\nmean, s",
    "request/ttft_s_mean": "TTFT mean, s",
    "request/ttft_s_p95": "TTFT p95, s",
    "request/ttft_s_p99": "TTFT p99, s",
    "scheduler/deferred_count": "deferred",
    "scheduler/prefill_oom_count": "prefills out\nof memory",
}
RATIO_OF = "request/ttft_s_mean"
LATENCY = "request/*_s_*"
# counters of what features tried; hits, times and bytes tell whether it had an effect
TRIED = ("agreement/", "computed/", "prefetch/", "recomputed/", "scheduler/", "storage/")
SPREAD_PARTS = ("median", "lowest", "highest")
NO_CLAIM = "–"
MAX_SAME = 300  # longest note on settings without effect, in characters


def table_of(
    groups: Sequence[Group], metrics: Sequence[str], *, ratio_of: str = RATIO_OF
) -> ResultTable:
    """Return a table with one row per configuration: its settings and its metrics.

    A group holds the runs of one configuration. The runs differ in random seed or in the part of
    the trace that they replay. Each cell shows the median over the runs, and the lowest and highest
    value.

    Args:
        groups: the runs of each configuration.
        metrics: names of the metrics to show.
        ratio_of: name of the metric that is also shown as a ratio to a baseline configuration.
    """
    keys = setting_keys(groups)
    question = question_key(groups)
    sections = []
    sets = answer_sets(groups)
    verdicts = Verdicts(sets)
    for answers in sets:
        rows = []
        for group in answers:
            row = setting_row(group, keys)
            count, overloaded = len(group.runs), is_overloaded(group)
            text = verdicts.marked(f"{count}", group)
            row.add("runs", text, runs=count, overloaded=overloaded, verdict=verdicts.names(group))
            for metric in metrics:
                _add_spread(row, TITLES.get(metric, metric), metric, group.values(metric))
            if question is not None:
                name = TITLES.get(ratio_of, ratio_of).partition(",")[0]
                heading = f"{name}\n÷ {_baseline_name(sets, question)}"
                ratios = _ratios(group, answers[0], ratio_of)
                _add_spread(row, heading, f"{ratio_of} ratio", ratios)
            rows.append(row)
        sections.append(rows)
    notes = [*verdicts.notes, *_unserved(groups), *warnings(groups)]
    return ResultTable(sections=sections, notes=notes, num_names=len(keys))


def _baseline_name(sets: Sequence[Sequence[Group]], question: str) -> str:
    names = {short(answers[0].settings[question]) for answers in sets}
    return f"{names.pop()}'s" if len(names) == 1 else "its baseline's"


def setting_row(group: Group, keys: Sequence[str]) -> Row:
    row = Row()
    for key in keys:
        row.add(key, short(group.settings[key]), **{key: group.settings[key]})
    return row


def setting_keys(groups: Sequence[Group]) -> list[str]:
    question = question_key(groups)
    return sorted(groups[0].settings, key=lambda key: key == question)


def over_runs(groups: Sequence[Group]) -> str:
    sizes = {len(group.runs) for group in groups}
    if sizes == {1}:
        return ""
    numbers = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    windows, seeds = ({run.served[place] for g in groups for run in g.runs} for place in (0, 1))
    word = "runs" if len(windows) > 1 < len(seeds) else "windows" if len(windows) > 1 else "seeds"
    if any(len({run.served for run in group.runs}) < len(group.runs) for group in groups):
        word = "runs"
    return f"median (lowest–highest) over {numbers} {word}"


def number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def warnings(groups: Sequence[Group]) -> list[str]:
    notes = []
    repeated = [group for group in groups if len(group.runs) > 1]
    if repeated and all(
        run.summary == group.runs[0].summary for group in repeated for run in group.runs
    ):
        notes.append("All seeds gave the same run, so the table shows no spread.")
    return notes + same_runs(groups)


def same_runs(groups: Sequence[Group]) -> list[str]:
    """Name the groups with the same hits, times and bytes, whatever a feature tried in vain."""
    alike: dict[frozenset[object], list[Group]] = {}
    for group in groups:
        results = frozenset((run.served, *_outcomes(run)) for run in group.runs)
        alike.setdefault(results, []).append(group)
    # by equal settings, the values of the other settings at which they are equal
    places: dict[str, list[str]] = {}
    varying = _varying(groups)
    for members in (members for members in alike.values() if len(members) > 1):
        own = _varying(members)
        others = [key for key in varying if key not in own]
        names = " = ".join(_values(group, own) for group in members)
        places.setdefault(names, []).append(_values(members[0], others))
    told = "; ".join(
        names + (f" (at {', '.join(at)})" if any(at) else "") for names, at in places.items()
    )
    if not told:
        return []
    return [f"{shorten(told, MAX_SAME)}: identical runs, so these settings had no effect here"]


def _outcomes(run: StoredRun) -> list[tuple[str, float]]:
    return sorted(
        (key, value)
        for key, value in run.summary.items()
        if key in run.metrics or not key.startswith(TRIED)
    )


def is_overloaded(group: Group) -> bool:
    return any(verdict.is_overloaded(run.summary) for run in group.runs)


def makes_claim(metric: str, *groups: Group) -> bool:
    return not (fnmatch(metric, LATENCY) and any(is_overloaded(group) for group in groups))


def _add_spread(row: Row, heading: str, name: str, values: Sequence[float] | str) -> None:
    # `values`: a word if the metric is missing
    if isinstance(values, str):
        row.add(heading, values, **{f"{name} {part}": None for part in SPREAD_PARTS})
        return
    spread = Spread.of(values)
    parts = zip(SPREAD_PARTS, spread, strict=True)
    row.add(heading, spread.text(number), **{f"{name} {part}": value for part, value in parts})


def _ratios(group: Group, baseline: Group, metric: str) -> Sequence[float] | str:
    if baseline is group:
        return ""
    if not makes_claim(metric, group, baseline):
        return NO_CLAIM
    return group.ratios(baseline, metric) or ""


def _unserved(groups: Sequence[Group]) -> list[str]:
    notes = []
    for key, what in UNSERVED.items():
        counts = [sorted(run.summary.get(key, 0) for run in group.runs) for group in groups]
        if any(each != counts[0] for each in counts):
            summaries = [run.summary for group in groups for run in group.runs]
            of_all = [each["request/count"] for each in summaries if "request/count" in each]
            total = f" of {_extent(of_all)}" if of_all else ""
            notes.append(f"requests {what}: {_extent([n for c in counts for n in c])}{total}")
    return ["; ".join([*notes, "the rows cover different requests"])] if notes else []


def _extent(counts: Sequence[float]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _varying(groups: Sequence[Group]) -> list[str]:
    keys = setting_keys(groups)
    return [key for key in keys if len({repr(group.settings[key]) for group in groups}) > 1]


def _values(group: Group, keys: Sequence[str]) -> str:
    return " ".join(short(group.settings[key]) for key in keys)
