"""What changed request by request: a table, or plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.tables.groups import Group
from experiments.tables.paired import Difference, Pairs
from experiments.tables.sheet import Cell, Column, Sheet
from experiments.tables.table import (
    TITLES,
    answer_sets,
    is_overloaded,
    number,
    setting_cells,
    setting_columns,
    setting_keys,
    warnings,
)

PARTS = ("of the first row", "difference", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One group beside the baseline of its question."""

    baseline: Group
    other: Group
    pairs: Pairs
    differences: dict[str, Difference]


def compare_pairs(groups: Sequence[Group], metrics: Sequence[str]) -> list[Comparison]:
    """Every group beside the first of those that differ from it in the question alone.

    Raises:
        ValueError: there is nothing to compare, or not by these metrics.
    """
    found = []
    for baseline, *others in answer_sets(groups):
        for other in others:
            pairs = Pairs(baseline, other)
            differences = pairs.differences(metrics)
            found.append(
                Comparison(baseline=baseline, other=other, pairs=pairs, differences=differences)
            )
    if not found:
        raise ValueError("a paired comparison needs two configurations, got one")
    return found


def sheet_of_pairs(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Sheet:
    """A row for each baseline, and under it the difference of every other group to it."""
    keys = setting_keys(groups)
    columns = setting_columns(keys)
    columns.append(Column(heading="requests", names=("requests", "overloaded")))
    columns.append(Column(heading="sessions", names=("sessions",)))
    for metric in comparisons[0].differences:
        names = tuple(f"{metric} {part}" for part in PARTS)
        columns.append(Column(heading=TITLES.get(metric, metric), names=names))
    columns += [Column(heading=share, names=(share,)) for share in ("sooner", "later")]
    return Sheet(
        columns=columns, sections=_sections(comparisons, keys), notes=_notes(groups, comparisons)
    )


def describe_pairs(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """The same as plain values."""
    return [
        {
            "baseline": each.baseline.settings,
            "settings": each.other.settings,
            "requests": len(each.pairs),
            "unpaired_requests": each.pairs.num_unpaired,
            "sessions": each.pairs.num_sessions,
            "seeds": each.pairs.num_seeds,
            "sooner_share": each.pairs.sooner(),
            "later_share": each.pairs.later(),
            "metrics": {
                metric: {
                    "baseline": difference.baseline,
                    "other": difference.other,
                    "difference": difference.middle,
                    "low": difference.low,
                    "high": difference.high,
                }
                for metric, difference in each.differences.items()
            },
        }
        for each in comparisons
    ]


def _sections(comparisons: Sequence[Comparison], keys: Sequence[str]) -> list[list[list[Cell]]]:
    sections: list[list[list[Cell]]] = []
    baseline = None
    for each in comparisons:
        pairs, differences = each.pairs, each.differences.values()
        if each.baseline is not baseline:
            baseline = each.baseline
            values = [
                Cell(number(found.baseline), values=(found.baseline, "", "", ""))
                for found in differences
            ]
            first = [*setting_cells(baseline, keys), _requests_cell("", baseline), Cell("")]
            sections.append([[*first, *values, Cell(""), Cell("")]])
        sections[-1].append(
            [
                *setting_cells(each.other, keys),
                _requests_cell(len(pairs), each.other),
                Cell(f"{pairs.num_sessions:,}", values=(pairs.num_sessions,)),
                *map(_difference_cell, differences),
                Cell(f"{pairs.sooner():.0%}", values=(pairs.sooner(),)),
                Cell(f"{pairs.later():.0%}", values=(pairs.later(),)),
            ]
        )
    return sections


def _notes(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "The same requests under the same seeds; intervals by drawing whole sessions anew.",
        "sooner, later: requests whose first token came sooner, or later, than in the first row.",
    ]
    num_unpaired = sum(each.pairs.num_unpaired for each in comparisons)
    if num_unpaired:
        notes.append(f"{num_unpaired:,} requests finished on one side only, and are left out.")
    return notes + warnings(groups)


def _requests_cell(count: int | str, group: Group) -> Cell:
    text = f"{count:,}" if isinstance(count, int) else count
    overloaded = is_overloaded(group)
    return Cell(f"{text} !".strip() if overloaded else text, values=(count, overloaded))


def _difference_cell(found: Difference) -> Cell:
    return Cell(
        _signed(found.middle),
        f"[{_signed(found.low)}, {_signed(found.high)}]",
        (found.baseline, found.middle, found.low, found.high),
    )


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)
