"""Pages in HTML, each complete in one file, with charts that show values and hide series.

uPlot draws the charts (`uplot/`); `charts.html.jinja` holds the script around it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import ArrayLike

FOLDER = Path(__file__).parent
ALARM = "#B00020"
UPLOT = {
    "uplot_js": "uPlot.iife.min.js",
    "uplot_css": "uPlot.min.css",
    "uplot_license": "LICENSE",
}
SHARE = {"percent": True, "from": 0, "to": 1.02}  # of an axis
NUM_PLACES = 160  # most points of a line


def write_page(path: Path, template: str, **values: Any) -> Path:
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= values.pop("filters", {})
    scripts = {name: (FOLDER / "uplot" / file).read_text() for name, file in UPLOT.items()}
    page = environment.get_template(template).render(alarm=ALARM, **scripts, **values)
    path.write_text(page, encoding="utf-8")
    return path


def series(name: str, color: str, x: ArrayLike, y: ArrayLike, **looks: Any) -> dict[str, Any]:
    """Return a series of a chart: a line, or dots of the size `dots` in pixels."""
    return {"name": name, "color": color, "x": _short(x), "y": _short(y), **looks}


def chart(
    title: str, x: Mapping[str, Any], y: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {"title": title, "x": x, "y": y, "series": lines}


def distribution(
    title: str, label: str, samples: Mapping[str, ArrayLike], colors: Mapping[str, str], low: float
) -> dict[str, Any]:
    """Return a chart with the share of each sample that is at most x, for x from `low` on."""
    ordered = {name: np.sort(np.asarray(sample, float)) for name, sample in samples.items()}
    high = max((values[-1] for values in ordered.values()), default=low)
    grid = np.geomspace(low, max(high, low * 1.01), num_places(len(ordered)))
    grid[-1] = max(high, low * 1.01)
    lines = [
        series(name, colors[name], grid, np.searchsorted(values, grid, side="right") / len(values))
        for name, values in ordered.items()
    ]
    return chart(title, {"label": label, "log": True}, {"label": "share", **SHARE}, lines)


def num_places(num_lines: int) -> int:
    """Return how many points each line of a chart has, so that a page stays small."""
    return max(20, min(NUM_PLACES, 30_000 // max(num_lines, 1)))


def _short(values: ArrayLike) -> list[float | None]:
    # five digits, more than a chart shows; NaN is no value
    numbers = [float(f"{value:.5g}") for value in np.asarray(values, float).ravel()]
    return [None if np.isnan(value) else value for value in numbers]
