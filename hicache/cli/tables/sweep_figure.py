"""The figure of a sweep: a panel per metric, a line per setting, bars for the range over seeds."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hicache.cli.tables.comparison import TITLES, is_overloaded, over_runs, same_runs
from hicache.cli.tables.groups import Group, Spread, answer_sets, is_number, short
from hicache.cli.tables.verdicts import Verdicts
from hicache.results.figures import label_log_axis, literal

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222")
MARKERS = "osD^vP*"
DASHES = ("-", "--", "-.", ":")
LOG_SPAN = 8  # horizontal axes with at least this ratio of values are logarithmic
TALL_SPAN = 30  # likewise for vertical axes
PANEL_INCHES = (4.0, 3.8)
PLACE_INCHES = 0.3  # space on an axis for a vertical label
LINE_INCHES = 0.2  # height of a line of the title or the legend
LABEL_GAP = 0.05  # inches between two labels of an axis
MARGIN_INCHES = 0.8  # space next to a panel for the numbers on its vertical axis
LETTER_INCHES = 0.085  # wider than most letters at the legend's font size
TITLE_LETTERS = 34  # letters that fit above a panel
TITLE_LETTER_INCHES = 0.105


@literal
def draw_sweep(groups: Sequence[Group], metrics: Sequence[str], *, title: str) -> Figure:
    keys = list(groups[0].settings)
    x_key = next((key for key in keys if _is_axis(groups, key)), keys[0])
    line_keys = [key for key in keys if key != x_key]
    lines: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        name = tuple(short(group.settings[key]) for key in line_keys)
        lines.setdefault(name, []).append(group)
    places, is_axis = _places(groups, x_key), _is_axis(groups, x_key)

    width, height = PANEL_INCHES
    if not is_axis:  # every name needs room, if necessary as a vertical label
        width = max(width, 1.5 + len(places) * PLACE_INCHES)
    width *= len(metrics)
    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    looks, upright_inches = looks_of(list(lines)), 0.0
    for axes, metric in zip(all_axes, metrics, strict=True):
        for name, members in lines.items():
            points = [(places[short(group.settings[x_key])], group) for group in members]
            points.sort(key=lambda point: point[0])
            look = looks[name] | ({} if is_axis else {"ls": "none"})
            _draw_line(axes, points, metric, ", ".join(name), look)
        numbers = sorted(places.values())
        if is_axis and numbers[0] > 0 and numbers[-1] / numbers[0] >= LOG_SPAN:
            axes.set_xscale("log")
        axis_width = width / len(metrics) - MARGIN_INCHES
        if _name_places(axes, places, axis_width, is_axis=is_axis):
            upright_inches = max(map(len, places)) * LETTER_INCHES
        axes.minorticks_off()
        axes.set_xlabel("\n".join(wrapped(x_key, TITLE_LETTERS)))
        heading = TITLES.get(metric, metric).replace("\n", " ")
        axes.set_title("\n".join(wrapped(heading, TITLE_LETTERS)), loc="left")
        _set_heights(axes, [value for group in groups for value in group.values(metric)])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", lw=0.8)
        axes.set_axisbelow(True)
    if line_keys:
        height += LINE_INCHES * _draw_legend(figure, list(lines), ", ".join(line_keys))
    told = [title, over_runs(groups), Verdicts(answer_sets(groups)).line]
    if any(map(is_overloaded, groups)):
        told.append("hollow: overloaded, no latency claim")
    letters = int(width / TITLE_LETTER_INCHES)
    told += same_runs(groups)  # equal settings draw the same line
    told = [line for text in told if text for line in wrapped(text, letters)]
    figure.suptitle("\n".join(told), x=0.01, ha="left")
    figure.set_figheight(height + upright_inches + LINE_INCHES * len(told))
    return figure


def _draw_legend(figure: Figure, lines: Sequence[tuple[str, ...]], title: str) -> int:
    # including names that matplotlib would hide, such as `_mine`
    handles: list[Any] = list(figure.axes[0].containers)
    names = [", ".join(name) for name in lines]
    room = int(figure.get_figwidth() / (max(map(len, names)) * LETTER_INCHES + 0.6))
    num_columns = max(1, min(len(lines), 4, room))
    figure.legend(
        handles, names, title=title, loc="outside lower center", ncols=num_columns, frameon=False
    )
    return -(-len(lines) // num_columns)


def looks_of(names: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], dict[str, Any]]:
    found = {}
    for index, name in enumerate(names):
        turn, colour = divmod(index, len(COLOURS))
        found[name] = {
            "color": COLOURS[colour],
            "marker": MARKERS[(colour + turn) % len(MARKERS)],
            "ls": DASHES[turn // len(MARKERS) % len(DASHES)],
            "markersize": 5,
        }
    return found


def _set_heights(axes: Axes, values: Sequence[float]) -> None:
    lowest, highest = min(values), max(values)
    if lowest > 0 and highest / lowest >= TALL_SPAN:  # on a linear axis most lines would lie near 0
        axes.set_yscale("log")
        label_log_axis(axes.yaxis, "{x:g}", most=1e4)
    else:
        axes.set_ylim(0, 1.1 * highest or 1)


def _name_places(axes: Axes, places: dict[str, float], width: float, *, is_axis: bool) -> bool:
    # returns True if the labels are vertical; `width` is in inches
    names, letters = list(places), max(map(len, places)) * LETTER_INCHES
    is_upright = not is_axis and letters > width / len(names)
    if is_axis:
        at = np.array(list(places.values()))
        at = np.log(at) if axes.get_xscale() == "log" else at
        last = -np.inf
        for index, inches in enumerate((at - at[0]) / ((at[-1] - at[0]) or 1) * width):
            if inches < last + letters + LABEL_GAP:
                names[index] = ""
            else:
                last = inches
    axes.set_xticks(list(places.values()), names, rotation=90 if is_upright else 0)
    return is_upright


def _draw_line(
    axes: Axes, points: Sequence[tuple[float, Group]], metric: str, name: str, look: dict[str, Any]
) -> None:
    places = np.array([place for place, _ in points])
    spreads = [Spread.of(group.values(metric)) for _, group in points]
    middles, lows, highs = np.array(spreads).T
    around = [middles - lows, highs - middles]
    axes.errorbar(places, middles, around, label=name or None, capsize=3, lw=1.5, **look)
    hollow = [is_overloaded(group) for _, group in points]
    if any(hollow):
        shown = look | {"ls": "none", "markerfacecolor": "white"}
        axes.plot(places[hollow], middles[hollow], zorder=3, **shown)


def _is_axis(groups: Sequence[Group], key: str) -> bool:
    return all(is_number(group.settings[key]) for group in groups)


def _places(groups: Sequence[Group], key: str) -> dict[str, float]:
    if _is_axis(groups, key):
        numbers = {short(group.settings[key]): float(group.settings[key] or 0) for group in groups}
        return dict(sorted(numbers.items(), key=lambda item: item[1]))
    names = dict.fromkeys(short(group.settings[key]) for group in groups)
    return {name: float(index) for index, name in enumerate(names)}


def wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for atom in re.split(r"(?<=[ /_.:])", text):
        if lines[-1] and len((lines[-1] + atom).rstrip()) > width:
            lines.append("")
        lines[-1] += atom
    return [line.rstrip() for line in lines]
