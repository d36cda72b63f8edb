"""What changed request by request: a table, or plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from experiments.groups import Group
from experiments.paired import CONFIDENCE, Difference, Pairs
from experiments.table import (
    TITLES,
    answer_sets,
    as_markdown,
    number,
    setting_keys,
    short,
    warnings_of,
)


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


def draw_pairs(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> Table:
    """A row for each baseline, and under it the difference of every other group to it."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"\nDifference to the first row, and its {CONFIDENCE:.0%} interval",
        title_justify="left",
        caption="\n".join(_notes(groups, comparisons)),
        caption_justify="left",
    )
    num_keys = len(setting_keys(groups))
    for place, heading in enumerate(_headings(groups, comparisons)):
        is_key = place < num_keys
        table.add_column(heading, justify="left" if is_key else "right", no_wrap=is_key)
    for rows in _sections(groups, comparisons):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def markdown_pairs(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> str:
    """The same as text for a page."""
    rows = [row for section in _sections(groups, comparisons) for row in section]
    headings, num_keys = _headings(groups, comparisons), len(setting_keys(groups))
    return as_markdown(headings, rows, num_keys, _notes(groups, comparisons))


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


def _headings(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[str]:
    titles = [TITLES.get(metric, metric) for metric in comparisons[0].differences]
    return [*setting_keys(groups), "requests", "sessions", *titles, "sooner", "later"]


def _sections(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> list[list[list[str]]]:
    keys = setting_keys(groups)
    sections: list[list[list[str]]] = []
    baseline = None
    for each in comparisons:
        pairs, differences = each.pairs, each.differences.values()
        if each.baseline is not baseline:
            baseline = each.baseline
            values = [number(difference.baseline) for difference in differences]
            sections.append([[*_settings(baseline, keys), "", "", *values, "", ""]])
        sections[-1].append(
            [
                *_settings(each.other, keys),
                f"{len(pairs):,}",
                f"{pairs.num_sessions:,}",
                *map(_text, differences),
                f"{pairs.sooner():.0%}",
                f"{pairs.later():.0%}",
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
    return notes + warnings_of(groups)


def _settings(group: Group, keys: Sequence[str]) -> list[str]:
    return [short(group.settings[key]) for key in keys]


def _text(difference: Difference) -> str:
    return f"{_signed(difference.middle)} [{_signed(difference.low)}, {_signed(difference.high)}]"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)
