"""What changed request by request: a table, or plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.tables.groups import Group
from experiments.tables.paired import Difference, Pairs
from experiments.tables.sheet import Row, Sheet
from experiments.tables.table import (
    TITLES,
    answer_sets,
    is_overloaded,
    number,
    setting_keys,
    setting_row,
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
    sections: list[list[Row]] = []
    baseline = None
    for each in comparisons:
        if each.baseline is not baseline:
            baseline = each.baseline
            sections.append([_baseline_row(each, keys)])
        sections[-1].append(_difference_row(each, keys))
    return Sheet(sections=sections, notes=_notes(groups, comparisons), num_names=len(keys))


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


def _baseline_row(each: Comparison, keys: Sequence[str]) -> Row:
    row = setting_row(each.baseline, keys)
    overloaded = is_overloaded(each.baseline)
    row.add("requests", "!" if overloaded else "", requests="", overloaded=overloaded)
    row.add("sessions", "", sessions="")
    for metric, found in each.differences.items():
        values = dict.fromkeys((f"{metric} {part}" for part in PARTS), "") | {
            f"{metric} {PARTS[0]}": found.baseline
        }
        row.add(TITLES.get(metric, metric), number(found.baseline), **values)
    row.add("sooner", "", sooner="")
    row.add("later", "", later="")
    return row


def _difference_row(each: Comparison, keys: Sequence[str]) -> Row:
    row, pairs = setting_row(each.other, keys), each.pairs
    overloaded = is_overloaded(each.other)
    text = f"{len(pairs):,}{' !' if overloaded else ''}"
    row.add("requests", text, requests=len(pairs), overloaded=overloaded)
    row.add("sessions", f"{pairs.num_sessions:,}", sessions=pairs.num_sessions)
    for metric, found in each.differences.items():
        text = f"{_signed(found.middle)} [{_signed(found.low)}, {_signed(found.high)}]"
        parts = (found.baseline, found.middle, found.low, found.high)
        values = {f"{metric} {part}": value for part, value in zip(PARTS, parts, strict=True)}
        row.add(TITLES.get(metric, metric), text, **values)
    row.add("sooner", f"{pairs.sooner():.0%}", sooner=pairs.sooner())
    row.add("later", f"{pairs.later():.0%}", later=pairs.later())
    return row


def _notes(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "The same requests under the same seeds; intervals by drawing whole sessions anew.",
        "sooner, later: requests whose first token came sooner, or later, than in the first row.",
    ]
    num_unpaired = sum(each.pairs.num_unpaired for each in comparisons)
    if num_unpaired:
        notes.append(f"{num_unpaired:,} requests finished on one side only, and are left out.")
    return notes + warnings(groups)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)
