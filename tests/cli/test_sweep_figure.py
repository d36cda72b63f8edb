from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hicache.cli.tables.groups import Group, StoredRun
from hicache.cli.tables.sweep_figure import draw_sweep, looks_of

METRICS = ["request/ttft_s_mean", "prefetch/a_metric_with_a_name_longer_than_its_panel_count"]


def group(settings, *values, rho=0.5):
    """One run a value; the settings stand in the summary too, so that no two groups are alike."""
    own = {f"own/{value}": 1 for value in settings.values()}
    runs = tuple(
        StoredRun(
            path=Path("nowhere"),
            config={"seed": seed},
            summary={**dict.fromkeys(METRICS, value), "load/rho_gpu": rho, **own},
        )
        for seed, value in enumerate(values)
    )
    return Group(settings=settings, runs=runs)


def label_boxes(figure):
    """Where the names on the x-axis of each panel are, from left to right, in pixels."""
    figure.draw_without_rendering()
    return [
        sorted(
            (label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()),
            key=lambda box: float(box.x0),
        )
        for axes in figure.axes
    ]


def hollow_points(axes):
    """The places of points whose inside is white."""
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
    ids=["four", "five long", "thirty long", "two"],
)
def test_no_name_on_the_axis_touches_the_next_or_leaves_the_figure(names):
    figure = draw_sweep([group({"arm": name}, 1.0) for name in names], METRICS, title="a sweep")
    panels = label_boxes(figure)
    assert [len(boxes) for boxes in panels] == [len(names)] * len(METRICS)
    for left, right in pairwise([box for boxes in panels for box in boxes]):
        assert left.x1 < right.x0
    for box in (box for boxes in panels for box in boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_numbers_close_together_are_not_all_named():
    sizes = [1000, 1001, 1002, 1100, 1200]
    figure = draw_sweep([group({"size": size}, 1.0) for size in sizes], METRICS, title="a sweep")
    for boxes in label_boxes(figure):
        assert 2 <= len(boxes) < len(sizes)
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize(("low", "high"), [(1.6, 61), (0.08, 3), (0.003, 300), (1e-4, 1e5)])
def test_the_numbers_on_a_tall_axis_are_plain_and_fit(low, high):
    groups = [group({"size": size}, value) for size, value in enumerate((low, high))]
    figure = draw_sweep(groups, METRICS, title="a sweep")
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [each for each in axes.get_yticklabels(which="both") if each.get_text()]
        shown = [each for each in labels if low <= each.get_position()[1] <= high]
        assert len(shown) >= 3
        assert all(float(each.get_text()) == each.get_position()[1] for each in shown)
        boxes = [each.get_window_extent() for each in shown]
        assert all(below.y1 < above.y0 for below, above in pairwise(boxes))


def test_names_keep_every_letter():
    names = ["storage_inclusive", "storage_exclusive", "storage_selective", "storage_late"]
    figure = draw_sweep([group({"arm": name}, 1.0) for name in names], METRICS, title="a sweep")
    labels = [label.get_text().replace("\n", "") for label in figure.axes[0].get_xticklabels()]
    assert labels == names


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


def test_overloaded_points_are_hollow_and_the_title_says_so():
    groups = [group({"size": size}, 1.0, rho=size / 10) for size in (1, 4, 9, 12)]
    figure = draw_sweep(groups, METRICS, title="a sweep")
    for axes in figure.axes:
        assert hollow_points(axes) == [(9, 1), (12, 1)]
    assert "hollow: overloaded, no latency claim" in figure.get_suptitle()


def test_no_point_is_hollow_where_nothing_is_overloaded():
    figure = draw_sweep([group({"size": size}, 1.0) for size in (1, 2)], METRICS, title="a sweep")
    assert hollow_points(figure.axes[0]) == []
    assert "hollow" not in figure.get_suptitle()


def test_points_are_medians():
    figure = draw_sweep(
        [group({"size": size}, 1.0, 2.0, 30.0) for size in (1, 2)], METRICS, title="a sweep"
    )
    assert list(figure.axes[0].lines[0].get_ydata()) == [2, 2]
    told = "a sweep\nmedian (lowest–highest) over 3 seeds\nverdict: no objection"
    assert figure.get_suptitle() == told


def test_lines_that_hide_each_other_are_named():
    groups = [group({"size": size, "stop": stop}, 1.0) for size in (1, 2) for stop in ("a", "b")]
    alike = [replace(each, runs=groups[i // 2].runs) for i, each in enumerate(groups)]
    told = draw_sweep(alike, METRICS, title="a sweep").get_suptitle().splitlines()
    assert told[2] == "a = b (at 1, 2): identical runs, so these settings had no effect here"


def test_the_title_and_the_legend_stay_inside_the_figure():
    groups = [
        group({"size": size, "prefetch.stop": f"my_policies:SomeLongName{i}"}, 1.0, 2.0, rho=0.95)
        for size in (1, 2)
        for i in range(9)
    ]
    groups[1] = replace(groups[1], runs=groups[0].runs)
    figure = draw_sweep(groups, METRICS[:1], title="a sweep")
    figure.draw_without_rendering()
    [legend] = figure.legends
    for box in (legend.get_window_extent(), figure._suptitle.get_window_extent()):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("name", ["a$x_{$b", "_mine:Policy", "x[/b]"])
def test_a_setting_is_named_as_it_stands_on_the_axis_and_in_the_legend(name):
    groups = [
        group({"arm": arm, "line": line}, 1.0) for arm in (name, "lru") for line in (name, "fifo")
    ]
    figure = draw_sweep(groups, METRICS, title=name)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [name, "fifo"]
    for axes in figure.axes:
        assert axes.get_xticklabels()[0].get_text().replace("\n", "") == name
