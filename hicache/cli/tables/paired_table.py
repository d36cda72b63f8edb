"""The differences request by request, as a table or as plain values."""

from collections.abc import Mapping, Sequence

from hicache.cli.tables import comparison
from hicache.cli.tables.groups import Group, answer_sets
from hicache.cli.tables.intervals import CONFIDENCE, MOST_BLOCKS, POWER
from hicache.cli.tables.paired import Difference, Pairs
from hicache.cli.tables.result_table import ResultTable, Row
from hicache.cli.tables.verdicts import Verdicts

PARTS = (
    *("of the first row", "difference", "low", "high"),
    *("ratio", "ratio low", "ratio high", "least effect", "blocks for 5 %"),
)
PAIRED = "Differences to the first row of each section"  # title
FOUND, STAR = " *", "*: the interval leaves out zero."


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
    every: list[tuple[Pairs, Mapping[str, Difference]]] = []
    for baseline, *others in answer_sets(groups):
        for other in others:
            pairs = Pairs(baseline, other)
            found = pairs.differences(metrics)
            rows = [_row(group, pairs, found, keys, verdicts) for group in (baseline, other)]
            if other is others[0]:
                sections.append(rows[:1])
            sections[-1].append(rows[1])
            every.append((pairs, found))
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
    add(f"{pairs.blocks}s", pairs.num_blocks, f"{pairs.num_blocks}")
    for metric, found in differences.items():
        parts: list[float | None] = [found.baseline, *[None] * 8]
        text = comparison.number(found.baseline)
        if not is_baseline and comparison.makes_claim(metric, *pairs.sides):
            parts[1:] = _values(found)
            text = in_words(found)
        elif not is_baseline:
            text = comparison.NO_CLAIM
        values = {f"{metric} {name}": part for name, part in zip(PARTS, parts, strict=True)}
        row.add(comparison.TITLES.get(metric, metric), text, **values)
    return row


def _values(found: Difference) -> list[float | None]:
    nothing = (None, None)
    ratio = found.relative
    return [
        found.middle,
        *(found.absolute.interval or nothing),
        None if ratio is None else 1 + ratio.middle,
        *(nothing if ratio is None or ratio.interval is None else (1 + e for e in ratio.interval)),
        found.judged.least,
        found.judged.needed,
    ]


def in_words(found: Difference) -> str:
    show = _signed if found.relative is None else _percent
    judged = found.judged
    interval = f" [{', '.join(map(show, judged.interval))}]" if judged.interval else ""
    low, high = judged.interval or (0, 0)
    return show(judged.middle) + interval + (FOUND if low > 0 or high < 0 else "")


def _power(every: Sequence[tuple[Pairs, Mapping[str, Difference]]]) -> list[str]:
    # what the comparisons could have found: the pair that finds most, and the one that finds least
    told = []
    for metric in every[0][1]:
        judged = [
            (found[metric].judged, found[metric].relative is not None, pairs.blocks)
            for pairs, found in every
            if comparison.makes_claim(metric, *pairs.sides)
        ]
        known = [each for each in judged if each[0].least]
        if known:
            known.sort(key=lambda each: each[0].least or 0)
            ends = [
                f"{each.least or 0:.1%}" if is_ratio else f"{each.least or 0:.2g}"
                for each, is_ratio, _ in (known[0], known[-1])
            ]
            estimate, _, blocks = known[-1]
            assert estimate.needed is not None
            needed = (
                "more than a million" if estimate.needed >= MOST_BLOCKS else f"{estimate.needed:,}"
            )
            name = comparison.TITLES.get(metric, metric).replace("\n", " ")
            least = " to ".join(dict.fromkeys(ends))
            told.append(f"{name} {least} (for 5 % of it: {needed} {blocks}s)")
    if not told:
        return []
    each = ", each row by its own spread" if len(every) > 1 else ""
    return [f"Smallest effects that {POWER:.0%} of such comparisons find{each}: {'; '.join(told)}."]


def _notes(
    groups: Sequence[Group], every: Sequence[tuple[Pairs, Mapping[str, Difference]]]
) -> list[str]:
    notes = [
        "Each difference is over requests that both sides finished, in the same window and seed."
    ]
    lacks = list(dict.fromkeys(pairs.lacks for pairs, _ in every))
    if None in lacks:
        blocks = " and ".join(dict.fromkeys(f"{pairs.blocks}s" for pairs, _ in every))
        notes.append(
            f"In brackets: {CONFIDENCE:.0%} intervals over {blocks}; percentages are geometric "
            f"means of their ratios."
        )
        notes.append(STAR)
    if any(pairs.is_one_trace for pairs, _ in every):
        notes.append(
            "The seeds replay one part of one trace: intervals hold for this part only "
            "(workload.slice gives others)."
        )
    notes += [f"No interval: {lack}." for lack in lacks if lack is not None]
    notes += _power(every)
    num_unpaired = sum(pairs.num_unpaired for pairs, _ in every)
    if num_unpaired:
        share = num_unpaired / (num_unpaired + sum(len(pairs) for pairs, _ in every))
        notes.append(
            f"{num_unpaired:,} requests ({share:.1%}) finished on one side only and are left out, "
            f"so the rest does not represent the whole workload."
        )
    return notes + comparison.warnings(groups)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + comparison.number(value)


def _percent(value: float) -> str:
    return f"{value:+.1%}"
