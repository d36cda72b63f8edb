"""Figures of the bench: bandwidth by page size, and the roofline of the contest.

matplotlib is imported on use, because the kernels alone do not need it.
"""

import math
from typing import Any

from hicache.workbench.bench.session import Session

TITLES = {"device": "within the device", "to_device": "load-back", "to_host": "back-up"}
MARKERS = "osD^vP*Xh<>"


def sweep_figure(session: Session) -> Any:
    figure, panels = _panels()
    for panel, (direction, title) in zip(panels, TITLES.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in session.records:
            parameters = record.parameters
            if record.op != "sweep" or record.case != direction or parameters["contiguous"]:
                continue
            name = f"rows of {parameters['row_bytes']} B"
            if parameters["num_programs"]:
                name += f", {parameters['num_programs']} programs"
            lines.setdefault(name, []).append((int(parameters["page_size"]), record.gb_per_s))
        for name, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        _draw_ceilings(panel, session, direction, at=1)
        panel.set(title=title, xlabel="page size (tokens)", ylabel="GB/s arriving")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        if lines:
            panel.legend(fontsize="small")
    return figure


def roofline_figure(session: Session) -> Any:
    """Plot each kernel's bandwidth over the transfer size, one panel per direction.

    A dotted line shows the roofline. Its flat part is the best bandwidth measured in that
    direction. Its sloped part is a constant time, the shortest that our kernel took.
    """
    figure, panels = _panels()
    names = list(dict.fromkeys(cell.kernel for cell in session.cells))
    for panel, (direction, title) in zip(panels, TITLES.items(), strict=True):
        timed = [c for c in session.cells if c.direction == direction and math.isfinite(c.p50_s)]
        for number, name in enumerate(names):
            points = [(cell.num_bytes, cell.gb_per_s) for cell in timed if cell.kernel == name]
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    linewidth=2 if name == "ours" else 1,
                    label=name,
                )
        panel.set(title=title, xlabel="bytes of a transfer", ylabel="GB/s arriving")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        if timed:
            _draw_roof(panel, session, direction, [cell.num_bytes for cell in timed],
                       min(cell.p50_s for cell in timed))  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
    return figure


def _draw_roof(
    panel: Any, session: Session, direction: str, sizes: list[int], shortest_s: float
) -> None:
    _draw_ceilings(panel, session, direction, at=min(sizes))
    known = [session.ceilings.get(name, math.nan) for name in _ceilings_of(direction)]
    best = max((ceiling for ceiling in known if math.isfinite(ceiling)), default=math.nan)
    if math.isnan(best):
        return
    low, high = min(sizes), max(sizes)
    ridge = min(max(best * 1e9 * shortest_s, low), high)
    heights = [size / shortest_s / 1e9 for size in (low, ridge)]
    panel.plot([low, ridge, high], [*heights, best], color="black", linestyle=":", label="roof")


def _draw_ceilings(panel: Any, session: Session, direction: str, *, at: float) -> None:
    for name in _ceilings_of(direction):
        ceiling = session.ceilings.get(name, math.nan)
        if math.isfinite(ceiling):
            panel.axhline(ceiling, linestyle="--", color="grey", linewidth=0.8)
            panel.annotate(name.removesuffix(f"_{direction}"), (at, ceiling), va="bottom")


def _ceilings_of(direction: str) -> list[str]:
    return ["device"] if direction == "device" else [f"engine_{direction}", f"sm_{direction}"]


def _panels() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, 3, figsize=(13, 4.5), layout="constrained")
