"""Requests a second as the trace, the host and the number of engines grow, in one figure.

    python -m experiments.bench.scale FOLDER

A tenth of the conversation trace, three tenths, and all of it; of three tenths, hosts of 24, 240
and 2,400 GiB, and 1 to 16 replicas. Processor seconds of whole runs that read the trace as it is
kept, each in a process of its own, in turns; the median of them counts. The folder gets
`scale.json`, in which what the other build has left stays, plain or compiled, and `scale.png`.
Peaks are no less than what this process takes itself.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from experiments.bench.replay import ROOT, Told, one_run
from hicache.cli.command import in_one_sentence
from hicache.compiled import is_compiled
from hicache.results.report import save

BASE = (
    *("workload=mooncake_conversation", "model=llama3_8b", "storage=memory"),
    "storage.write_queue_gib=4",
)
MIDDLE = {"workload.limit": 3_609, "cache.host_gib": 24, "parallel.replicas": 1}
# of each axis: the knob, and its value at each place
AXES = {
    "times the trace": ("workload.limit", {1: 1_203, 3: 3_609, 10: 12_031}),
    "times the host": ("cache.host_gib", {1: 24, 10: 240, 100: 2_400}),
    "replicas": ("parallel.replicas", {1: 1, 2: 2, 4: 4, 8: 8, 16: 16}),
}
COLOURS = {"plain": "#0072B2", "compiled": "#D55E00"}


def main() -> None:
    """Measure this build, and draw what is there of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    build = "compiled" if is_compiled() else "plain"
    for place in places("times the trace"):  # what is kept of a trace does not count
        measure(overrides("times the trace", place))
    told: dict[tuple[str, ...], list[Told]] = {
        overrides(axis, place): [] for axis in AXES for place in places(axis)
    }
    for _ in range(options.turns):
        for knobs, runs in told.items():
            runs.append(measure(knobs))
    kept = folder / "scale.json"
    builds = json.loads(kept.read_text()) if kept.is_file() else {}
    builds[build] = {
        axis: [row(place, told[overrides(axis, place)]) for place in places(axis)] for axis in AXES
    }
    kept.write_text(json.dumps(builds, indent=1) + "\n")
    save(draw(builds), folder / "scale.png")
    print(table(builds[build]))


def places(axis: str) -> list[int]:
    """Where an axis is measured."""
    return list(AXES[axis][1])


def overrides(axis: str, place: int) -> tuple[str, ...]:
    """The knobs of one measurement: the middle of all, but for the axis's own."""
    knob, values = AXES[axis]
    return tuple(f"{name}={value}" for name, value in (MIDDLE | {knob: values[place]}).items())


def measure(knobs: tuple[str, ...]) -> Told:
    """One run of this checkout."""
    return one_run(ROOT, [*BASE, *knobs], dict(os.environ))


def row(place: int, runs: list[Told]) -> dict[str, float]:
    """What equal runs took, and what there was to do."""
    summary = runs[0]["summary"]
    num_requests = summary["request/count"]
    return {
        "place": place,
        "requests_per_s": num_requests / median(run["processor_s"] for run in runs),
        "steps_per_request": summary["engine/steps_count"] / num_requests,
        "nodes": summary["tree/nodes_count"],
        "peak_mb": max(run["peak_mb"] for run in runs),
    }


def table(axes: dict[str, list[dict[str, float]]]) -> str:
    """One line a measurement, in Markdown."""
    lines = ["| | requests a second | steps a request | nodes at the end | peak |"]
    lines.append("|---|---:|---:|---:|---:|")
    for axis, rows in axes.items():
        lines += [
            f"| {each['place']} {axis} | {each['requests_per_s']:,.0f} |"
            f" {each['steps_per_request']:.1f} | {each['nodes']:,.0f} | {each['peak_mb']:.0f} MB |"
            for each in rows
        ]
    return "\n".join(lines)


def draw(builds: dict[str, dict[str, list[dict[str, float]]]]) -> Figure:
    """A panel an axis, a line a build, and 20 % to both sides of its first place."""
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        for build, axes in builds.items():
            x = [each["place"] for each in axes[axis]]
            y = [each["requests_per_s"] for each in axes[axis]]
            panel.plot(x, y, "o-", color=COLOURS[build], label=build)
            panel.axhspan(0.8 * y[0], 1.2 * y[0], color=COLOURS[build], alpha=0.1, linewidth=0)
        panel.set(xscale="log", xlabel=axis, ylim=(0, None))
        panel.set_xticks(places(axis), [str(place) for place in places(axis)])
        panel.minorticks_off()
    panels[0].set_ylabel("requests a second of processor time")
    panels[0].legend(loc="lower left", frameon=False)
    return figure


if __name__ == "__main__":
    with in_one_sentence():
        main()
