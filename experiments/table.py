"""A table of runs: what was different about them, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from experiments.groups import Group, Spread, Value, baseline_of, by_question, question_key

TITLES = {
    "agreement/illegal_lengths_count": "lengths some rank\ncannot restore",
    "cache/token_hit_rate": "token hit rate",
    "gpu/prefill_seconds_per_request": "prefill GPU-s\na request",
    "gpu/seconds_per_request": "GPU-s a request",
    "prefetch/abandoned_count": "prefetches\ngiven up",
    "prefetch/cut_tokens": "tokens cut",
    "prefetch/discarded_incomplete_pages": "pages read and\nthrown away",
    "prefetch/discarded_pages": "pages\nthrown away",
    "prefetch/used_pages": "prefetched pages\nthat were used",
    "request/storage_wait_s_mean": "storage wait\nmean, s",
    "request/ttft_s_mean": "TTFT mean, s",
    "request/ttft_s_p95": "TTFT p95, s",
    "scheduler/deferred_count": "deferred",
    "scheduler/prefill_oom_count": "prefills out\nof memory",
}
RATIO_OF = "request/ttft_s_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a table of groups is made: which middle, which metrics, and the ratio of which."""

    middle: Callable[[Sequence[float]], float]
    metrics: tuple[str, ...]
    ratio_of: str = RATIO_OF


def draw_table(groups: Sequence[Group], style: Style, *, title: str) -> Table:
    """One row a group, the answers to one question together.

    The ratio is to the first group that differs in the question alone.
    """
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    num_keys = len(groups[0].settings)
    for place, heading in enumerate(_headings(groups, style)):
        is_key = place < num_keys
        table.add_column(heading, justify="left" if is_key else "right", no_wrap=is_key)
    for answers in answer_sets(groups):
        for group in answers:
            table.add_row(*_cells(group, groups, style))
        if len(answers) > 1:
            table.add_section()
    table.caption = "\n".join(warnings_of(groups))
    table.caption_justify = "left"
    return table


def markdown_table(groups: Sequence[Group], style: Style) -> str:
    """The same as text for a page."""
    rows = [_cells(group, groups, style) for answers in answer_sets(groups) for group in answers]
    num_keys = len(groups[0].settings)
    return as_markdown(_headings(groups, style), rows, num_keys, warnings_of(groups))


def as_markdown(
    headings: Sequence[str], rows: Sequence[Sequence[str]], num_left: int, notes: Sequence[str]
) -> str:
    """A table for a page, its first `num_left` columns to the left, and notes under it."""
    titles = [heading.replace("\n", " ") for heading in headings]
    rules = ["---" if place < num_left else "---:" for place in range(len(headings))]
    lines = ["| " + " | ".join(row) + " |" for row in (titles, rules, *rows)]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


def _headings(groups: Sequence[Group], style: Style) -> list[str]:
    question = question_key(groups)
    headings = [*setting_keys(groups), "runs", *(TITLES.get(each, each) for each in style.metrics)]
    if question is not None:
        name = TITLES.get(style.ratio_of, style.ratio_of).partition(",")[0]
        headings.append(f"{name}\n÷ {short(groups[0].settings[question])}'s")
    return headings


def _cells(group: Group, groups: Sequence[Group], style: Style) -> list[str]:
    cells = [short(group.settings[key]) for key in setting_keys(groups)]
    cells.append(f"{len(group.runs)}{' !' if _is_overloaded(group) else ''}")
    cells += [
        Spread.of(group.values(metric), style.middle).text(number) for metric in style.metrics
    ]
    question = question_key(groups)
    if question is not None:
        baseline = baseline_of(group, groups, question)
        ratios = [] if baseline is group else group.ratios(baseline, style.ratio_of)
        cells.append(Spread.of(ratios, style.middle).text(number) if ratios else "")
    return cells


def setting_keys(groups: Sequence[Group]) -> list[str]:
    """What tells the groups apart: the question last, beside its answers."""
    question = question_key(groups)
    return sorted(groups[0].settings, key=lambda key: key == question)


def answer_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups that answer one question with everything else equal, the baseline first."""
    question = question_key(groups)
    return [list(groups)] if question is None else by_question(groups, question)


def number(value: float) -> str:
    """Three figures, and never an exponent for what has fewer than seven digits."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def short(value: Value) -> str:
    """A setting as it would be typed."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def warnings_of(groups: Sequence[Group]) -> list[str]:
    """What a reader of a table of these groups must know."""
    warnings = []
    if any(_is_overloaded(group) for group in groups):
        warnings.append("! overloaded: no latency claim")
    repeated = [group for group in groups if len(group.runs) > 1]
    if repeated and all(_is_one_run(group) for group in repeated):
        warnings.append("Every seed gave the same run, so nothing here shows a spread.")
    return warnings


def _is_one_run(group: Group) -> bool:
    return all(run.summary == group.runs[0].summary for run in group.runs)


def _is_overloaded(group: Group) -> bool:
    return any(run.is_overloaded for run in group.runs)
