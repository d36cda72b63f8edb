"""The figure of a sweep: its labels, points, lines and title."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hicache.cli.tables.groups import Group, StoredRun
from hicache.cli.tables.sweep_figure import draw_sweep, looks_of

METRICS = ["request/ttft_s_mean", "prefetch/a_metric_with_a_name_longer_than_its_panel_count"]


def group(settings, *values, rho=0.5):
    """Return a group of one run per value; groups differ in summaries, which hold `settings`."""
    own = {f"own/{value}": 1 for value in settings.values()}
    runs = tuple(
        StoredRun(
            path=Path("nowhere"),
            config={"seed": seed},
            summary={**dict.fromkeys(METRICS, value), "load/rho_gpu": rho, **own},
        )
        for seed, value in enumerate(values or (1.0,))
    )
    return Group(settings=settings, runs=runs)


def drawn(groups, metrics=METRICS, title="a sweep"):
    figure = draw_sweep(groups, metrics, title=title)
    figure.draw_without_rendering()
    return figure


def label_boxes(axes):
    """The places of the names on the x-axis, from left to right, in pixels."""
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    return sorted(boxes, key=lambda box: float(box.x0))


def names_on(axes):
    return [label.get_text().replace("\n", "") for label in axes.get_xticklabels()]


def hollow_points(axes):
    """The (x, y) data coordinates of the points that are filled with white."""
    lines = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    return [tuple(point) for line in lines for point in np.transpose(line.get_data())]


@pytest.mark.parametrize(
    "names",
    [
        ["storage_inclusive", "storage_selective", "storage_late", "storage_exclusive"],
        [f"my_policies:SomeLongName{number}" for number in range(5)],
        [f"my_policies:SomeLongName{number}" for number in range(30)],
        ["a", "b"],
    ],
    ids=len,
)
def test_names_on_the_axis_are_complete_and_do_not_overlap(names):
    figure = drawn([group({"arm": name}) for name in names])
    assert names_on(figure.axes[0]) == names
    panels = [label_boxes(axes) for axes in figure.axes]
    assert [len(boxes) for boxes in panels] == [len(names)] * len(METRICS)
    boxes = [box for panel in panels for box in panel]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert min(min(box.x0, box.y0) for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


@pytest.mark.parametrize(("low", "scale"), [(0.99, "log"), (1.01, "linear"), (0, "linear")])
def test_an_axis_is_logarithmic_if_its_values_span_a_factor_of_thirty(low, scale):
    groups = [group({"size": size}, value) for size, value in enumerate((low, 30))]
    assert drawn(groups).axes[0].get_yscale() == scale


@pytest.mark.parametrize(("low", "high"), [(1.6, 61), (0.08, 3), (0.003, 300), (1e-4, 1e5)])
def test_numbers_on_a_logarithmic_axis_are_plain_and_do_not_overlap(low, high):
    groups = [group({"size": size}, value) for size, value in enumerate((low, high))]
    for axes in drawn(groups).axes:
        labels = [each for each in axes.get_yticklabels(which="both") if each.get_text()]
        shown = [each for each in labels if low <= each.get_position()[1] <= high]
        assert len(shown) >= 3
        assert all(float(each.get_text()) == each.get_position()[1] for each in shown)
        boxes = [each.get_window_extent() for each in shown]
        assert all(below.y1 < above.y0 for below, above in pairwise(boxes))


@pytest.mark.parametrize(
    "names",
    [
        [(f"a{i}",) for i in range(60)],
        [(f"a{i}", f"b{j}") for i in range(7) for j in range(7)],
        [(f"a{i}", f"b{j}") for i in range(9) for j in range(4)],
        [(f"a{i}", "b", f"c{j}") for i in range(5) for j in range(6)],
        [()],
    ],
)
def test_no_two_lines_look_alike(names):
    looks = looks_of(names)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == min(len(names), 49)
    assert len({tuple(look.values()) for look in looks.values()}) == len(names)
    assert len({look["ls"] for look in [*looks.values()][:49]}) == 1


def test_points_are_medians_and_those_of_overloaded_runs_are_hollow():
    rhos = {1: 0.1, 4: 0.4, 9: 0.9, 12: 1.2}
    figure = drawn([group({"size": size}, 1.0, 2.0, 30.0, rho=rhos[size]) for size in rhos])
    for axes in figure.axes:
        assert hollow_points(axes) == [(9, 2), (12, 2)]
    assert "hollow: overloaded, no latency claim" in figure.get_suptitle()
    calm = drawn([group({"size": size}, 1.0, 2.0, 30.0) for size in (1, 2)])
    assert hollow_points(calm.axes[0]) == []
    assert list(calm.axes[0].lines[0].get_ydata()) == [2, 2]
    told = "a sweep\nmedian (lowest–highest) over 3 seeds\nverdict: no objection"
    assert calm.get_suptitle() == told


def test_the_title_names_lines_that_coincide():
    groups = [group({"size": size, "stop": stop}) for size in (1, 2) for stop in ("a", "b")]
    alike = [replace(each, runs=groups[i // 2].runs) for i, each in enumerate(groups)]
    told = drawn(alike).get_suptitle().splitlines()
    assert told[2] == "a = b (at 1, 2): identical runs, so these settings had no effect here"


def test_the_title_and_the_legend_stay_inside_the_figure():
    groups = [
        group({"size": size, "prefetch.stop": f"my_policies:SomeLongName{i}"}, 1.0, 2.0, rho=0.95)
        for size in (1, 2)
        for i in range(9)
    ]
    groups[1] = replace(groups[1], runs=groups[0].runs)
    figure = drawn(groups, METRICS[:1])
    [legend] = figure.legends
    for box in (legend.get_window_extent(), figure._suptitle.get_window_extent()):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("name", ["a$x_{$b", "_mine:Policy", "x[/b]"])
def test_settings_that_look_like_markup_are_drawn_unchanged(name):
    groups = [group({"arm": arm, "line": line}) for arm in (name, "lru") for line in (name, "fifo")]
    figure = drawn(groups, title=name)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [name, "fifo"]
    assert all(names_on(axes)[0] == name for axes in figure.axes)
