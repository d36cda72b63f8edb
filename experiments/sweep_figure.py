"""The figure of a sweep: one panel a metric, one line a setting, bars over the range of seeds."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from experiments.groups import Group, Spread, is_number
from experiments.table import TITLES, short

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222")
MARKERS = "osD^vP*"
LOG_SPAN = 8  # an axis that spans this factor is drawn as logarithms


def draw_sweep(groups: Sequence[Group], metrics: Sequence[str], *, title: str) -> Figure:
    """The metrics against the number that was swept, or against the choice if no number was."""
    keys = list(groups[0].settings)
    x_key = next((key for key in keys if _is_axis(groups, key)), keys[0])
    line_keys = [key for key in keys if key != x_key]
    lines: dict[str, list[Group]] = {}
    for group in groups:
        name = ", ".join(short(group.settings[key]) for key in line_keys)
        lines.setdefault(name, []).append(group)
    places = _places(groups, x_key)

    figure = Figure(figsize=(4 * len(metrics), 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(all_axes, metrics, strict=True):
        for index, (name, members) in enumerate(lines.items()):
            points = sorted((places[short(group.settings[x_key])], group) for group in members)
            spreads = [Spread.of(group.values(metric), fmean) for _, group in points]
            axes.errorbar(
                [place for place, _ in points],
                [spread.middle for spread in spreads],
                yerr=[
                    [spread.middle - spread.low for spread in spreads],
                    [spread.high - spread.middle for spread in spreads],
                ],
                label=name or None,
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                capsize=3,
                lw=1.5,
                ls="-" if _is_axis(groups, x_key) else "none",
            )
        numbers = sorted(places.values())
        if _is_axis(groups, x_key) and numbers[0] > 0 and numbers[-1] / numbers[0] >= LOG_SPAN:
            axes.set_xscale("log")
        axes.set_xticks(list(places.values()), list(places))
        axes.minorticks_off()
        axes.set_xlabel(x_key)
        axes.set_title(TITLES.get(metric, metric).replace("\n", " "), loc="left")
        highest = max(max(group.values(metric)) for group in groups)
        axes.set_ylim(0, 1.1 * highest or 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", lw=0.8)
        axes.set_axisbelow(True)
    if line_keys:
        handles, names = all_axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            title=", ".join(line_keys),
            loc="outside lower center",
            ncols=min(len(lines), 4),
            frameon=False,
        )
    num_seeds = max(len(group.runs) for group in groups)
    overloaded = any(run.is_overloaded for group in groups for run in group.runs)
    figure.suptitle(
        title
        + (f" — mean and range over {num_seeds} seeds" if num_seeds > 1 else "")
        + (" — some runs overloaded: no latency claim for them" if overloaded else ""),
        x=0.01,
        ha="left",
    )
    return figure


def _is_axis(groups: Sequence[Group], key: str) -> bool:
    return all(is_number(group.settings[key]) for group in groups)


def _places(groups: Sequence[Group], key: str) -> dict[str, float]:
    if _is_axis(groups, key):
        return {short(group.settings[key]): float(group.settings[key] or 0) for group in groups}
    names = dict.fromkeys(short(group.settings[key]) for group in groups)
    return {name: float(index) for index, name in enumerate(names)}
