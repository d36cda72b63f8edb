"""The differences request by request, as a table or as plain values."""

from collections.abc import Mapping, Sequence

from hicache.cli.tables import comparison
from hicache.cli.tables.groups import Group, answer_sets
from hicache.cli.tables.intervals import CONFIDENCE
from hicache.cli.tables.paired import Difference, Pairs
from hicache.cli.tables.result_table import ResultTable, Row
from hicache.cli.tables.verdicts import Verdicts

PARTS = ("of the first row", "difference", "low", "high")


def table_of_pairs(groups: Sequence[Group], metrics: Sequence[str]) -> ResultTable:
    """Compare each group of runs with its baseline, request by request.

    A group holds the runs of one configuration.

    Raises:
        ValueError: there is only one configuration, or two configurations have no request in
            common, or a run lacks one of the metrics.
    """
    keys = comparison.setting_keys(groups)
    verdicts = Verdicts([[group] for group in groups])  # each alone, without SURVIVORS
    sections: list[list[Row]] = []
    every: list[Pairs] = []
    for baseline, *others in answer_sets(groups):
        for other in others:
            pairs = Pairs(baseline, other)
            found = pairs.differences(metrics)
            rows = [_row(group, pairs, found, keys, verdicts) for group in (baseline, other)]
            if other is others[0]:
                sections.append(rows[:1])
            sections[-1].append(rows[1])
            every.append(pairs)
    if not every:
        raise ValueError("--paired needs runs of at least two configurations, got one")
    notes = [*_notes(groups, every), *verdicts.notes]
    return ResultTable(sections=sections, notes=notes, num_names=len(keys))


def _row(
    group: Group,
    pairs: Pairs,
    differences: Mapping[str, Difference],
    keys: Sequence[str],
    verdicts: Verdicts,
) -> Row:
    row, is_baseline = comparison.setting_row(group, keys), group is pairs.sides[0]

    def add(name: str, value: float | None, shown: str) -> None:
        row.add(name, "" if is_baseline else shown, **{name: None if is_baseline else value})

    add("requests", len(pairs), f"{len(pairs):,}")
    row.values |= {"overloaded": comparison.is_overloaded(group), "verdict": verdicts.names(group)}
    row.texts["requests"] = verdicts.marked(row.texts["requests"], group)
    add("windows", pairs.num_windows, f"{pairs.num_windows}")
    add("sessions", pairs.num_sessions, f"{pairs.num_sessions:,}")
    for metric, found in differences.items():
        parts: list[float | None] = [found.baseline, None, None, None]
        text = comparison.number(found.baseline)
        if not is_baseline and comparison.makes_claim(metric, *pairs.sides):
            parts[1:] = [found.middle, *(found.interval or (None, None))]
            text = _told(found)
        elif not is_baseline:
            text = comparison.NO_CLAIM
        values = {f"{metric} {name}": part for name, part in zip(PARTS, parts, strict=True)}
        row.add(comparison.TITLES.get(metric, metric), text, **values)
    return row


def _told(found: Difference) -> str:
    interval = f" [{', '.join(map(_signed, found.interval))}]" if found.interval else ""
    return _signed(found.middle) + interval


def _notes(groups: Sequence[Group], every: Sequence[Pairs]) -> list[str]:
    notes = [
        "Each difference is over requests that both sides finished, in the same window and seed."
    ]
    lacks = list(dict.fromkeys(pairs.lacks for pairs in every))
    if None in lacks:
        notes.append(
            f"In brackets: {CONFIDENCE:.0%} bootstrap intervals over windows and their sessions."
        )
    notes += [f"No interval: {lack}." for lack in lacks if lack is not None]
    num_unpaired = sum(pairs.num_unpaired for pairs in every)
    if num_unpaired:
        share = num_unpaired / (num_unpaired + sum(map(len, every)))
        notes.append(
            f"{num_unpaired:,} requests ({share:.1%}) finished on one side only and are left out, "
            f"so the rest does not represent the whole workload."
        )
    return notes + comparison.warnings(groups)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + comparison.number(value)
