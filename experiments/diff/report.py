"""A comparison as a Markdown comment, as JSON and as a figure."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments.diff.compare import HIT_KINDS, Comparison
from experiments.diff.explain import Explanation, changes_in_words, in_words, row_in_words
from experiments.diff.protocol import COMPONENTS, MOVES, TIERS

GIB = 1 << 30
# rows of the table, by prefix of a count's name
AREAS = (
    ("hit", "hits", TIERS),
    ("moved", "copied", MOVES),
    ("evicted", "evicted", TIERS[:2]),
    ("held", "held at the end", TIERS),
)
WORST_IN_JSON, WORST_IN_COMMENT = 50, 5


def to_json(
    comparison: Comparison,
    explanation: Explanation | None,
    unit_bytes: Mapping[str, int],
    about: Mapping[str, object],
) -> dict[str, Any]:
    return {
        **about,
        "base": comparison.base,
        "head": comparison.head,
        "pools": asdict(comparison.pools),
        "requests": len(comparison.rows),
        "prompt_tokens": comparison.prompt_tokens,
        "hit_rate": {side: comparison.hit_rate(side) for side in ("base", "head")},
        "totals": {side: comparison.totals(side) for side in ("base", "head")},
        "unit_bytes": dict(unit_bytes),
        "kinds": {kind.name: count for kind, count in comparison.kinds.items()},
        "failure": comparison.failure,
        "first": None if comparison.first is None else comparison.first.number,
        "first_hit": None if comparison.first_hit is None else comparison.first_hit.number,
        "explanation": None if explanation is None else in_words(explanation, names_of(comparison)),
        "worst": [
            asdict(row) | {"kind": row.kind.name, "changes": row.changes}
            for row in comparison.worst(WORST_IN_JSON)
        ],
    }


def to_markdown(
    comparison: Comparison,
    explanation: Explanation | None,
    unit_bytes: Mapping[str, int],
    question: str,
) -> str:
    base, head = names_of(comparison)
    rates = comparison.hit_rate("base"), comparison.hit_rate("head")
    differing = sum(row.kind in HIT_KINDS for row in comparison.rows)
    lines = [
        f"### Prefix cache: {head} against {base}",
        "",
        f"{question} Hit rate **{rates[0]:.2%} → {rates[1]:.2%}**"
        f" ({100 * (rates[1] - rates[0]):+.2f} points of {comparison.prompt_tokens:,} prompt"
        f" tokens); hits differ in {differing:,} of {len(comparison.rows):,} requests.",
        "",
        f"| | {base} | {head} | change |",
        "|---|---:|---:|---:|",
    ]
    totals = comparison.totals("base"), comparison.totals("head")
    for area, title, places in AREAS:
        for component in COMPONENTS:
            for place in places:
                name = f"{area}/{component}/{place}"
                pair = totals[0].get(name, 0), totals[1].get(name, 0)
                if any(pair):
                    label = f"{title}: {component} {place.replace('_', ' ')}"
                    lines.append(_table_row(label, pair, unit_bytes[component], component))
    admissions = sorted(
        {name for total in totals for name in total if name.startswith("admission/")}
    )
    for name in admissions:
        pair = totals[0].get(name, 0), totals[1].get(name, 0)
        label = f"admission: {name.removeprefix('admission/')}"
        lines.append(f"| {label} | {pair[0]:,} | {pair[1]:,} | {pair[1] - pair[0]:+,} |")
    peaks = zip((base, head, "this program"), comparison.peak_bytes, strict=False)
    measured = [f"{peak / 1e9:.2f} GB ({name})" for name, peak in peaks if peak is not None]
    lines += ["", f"Peak memory: {', '.join(measured)}."] if measured else []
    lines += ["", "| requests | |", "|---|---:|"]
    lines += [f"| {kind.value} | {count:,} |" for kind, count in comparison.kinds.items()]
    if comparison.failure is not None:
        lines += ["", f"**Not finished**: {comparison.failure}."]
    if worst := comparison.worst(WORST_IN_COMMENT):
        lines += [
            "",
            f"| request that differs most | kind of difference | amounts ({base} → {head}) |",
        ]
        lines += ["|---:|---|---|"]
        lines += [
            f"| {row.number} | {row.kind.value} | {changes_in_words(row, most=6)} |"
            for row in worst
        ]
    first, first_hit = comparison.first, comparison.first_hit
    if explanation is not None:
        said = " ".join(in_words(explanation, (base, head)))
        lines += ["", f"**First request that differs.** {said}"]
    elif first_hit is not None:
        said = " ".join(row_in_words(first_hit, (base, head)))
        lines += ["", f"**First request with different hits.** {said}"]
    told = first_hit if explanation is None else explanation.row
    if first is not None and first is not told:
        said = " ".join(row_in_words(first, (base, head)))
        lines += ["", f"**First difference of any kind.** {said}"]
    return "\n".join(lines) + "\n"


def names_of(comparison: Comparison) -> tuple[str, str]:
    names = [
        f"{about['engine']} {about['version']}" + _options_of(about)
        for about in (comparison.base, comparison.head)
    ]
    if names[0] == names[1]:
        return f"{names[0]} (base)", f"{names[1]} (head)"
    return names[0], names[1]


def write_figure(comparison: Comparison, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    base, head = names_of(comparison)
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    prompts = np.cumsum([row.prompt_len for row in comparison.rows])
    base_hits = np.cumsum([sum(row.base.hits) for row in comparison.rows])
    head_hits = np.cumsum([sum(row.head.hits) for row in comparison.rows])
    above.plot(100 * base_hits / prompts, label=base)
    above.plot(100 * head_hits / prompts, label=head, linestyle="--")
    above.set_ylabel("hit rate so far (%)")
    above.legend()
    below.plot((head_hits - base_hits) / 1e3, color="black")
    below.axhline(0, linewidth=0.5, color="grey")
    below.set_ylabel("head − base (thousand tokens)")
    below.set_xlabel("request")
    figure.savefig(path, dpi=120)


def dump(values: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=1, sort_keys=True, default=str) + "\n")


def _options_of(about: Mapping[str, str]) -> str:
    more = [
        about[key] for key in ("core", "eviction") if about.get(key) not in (None, "python", "lru")
    ]
    return f" ({', '.join(more)})" if more else ""


def _table_row(label: str, pair: tuple[int, int], unit_bytes: int, component: str) -> str:
    base, head = pair
    if head == base:
        change = "="
    elif base == 0:
        change = f"{head:+,}"
    else:
        change = f"{(head - base) / base:+.2%}"
    unit = "states" if component == "mamba" else "tokens"
    cells = [f"{amount:,} {unit} ({amount * unit_bytes / GIB:,.1f} GiB)" for amount in pair]
    return f"| {label} | {cells[0]} | {cells[1]} | {change} |"
