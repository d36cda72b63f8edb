"""Repeats published measurements, and compares hits, times and throughput with the simulator's.

python -m experiments.studies.published           all cases but those that need a trace
python -m experiments.studies.published A E       two of them

A case is a file of `experiments/published/`. It has the settings of its runs and the published
values. It also lists the facts that the publication leaves open, with the values considered for
each. Runs are kept in `outputs/published/runs`, by configuration and code, and are not repeated.
`outputs/published/` gets one figure and one page of tables (docs/published.md), and the traces of
cases that are batches.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations, cycle, pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from experiments.studies.kept_runs import kept_runs
from hicache.cli.command import in_one_sentence, parser_of
from hicache.results.figures import save
from hicache.results.metrics import Result
from hicache.results.requests_file import columns_of
from hicache.results.server_log import measure

CASES = Path(__file__).parents[1] / "published"
OUT = Path("outputs", "published")
DIFFERS = 0.05  # variants with closer published values are not ranked
# measures whose errors are differences, with the unit of each
POINTS = {"hits": "points", "hit_count": "requests"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    case: str
    result: str
    measure: str
    arm: str
    axis: str
    x: Sequence[float]
    theirs: Sequence[float]
    ours: Sequence[float]

    @property
    def error(self) -> float:
        """Return the mean absolute error of the simulated against the published values.

        Errors of hit rates are in percentage points, and errors of hit counts in requests. All
        other errors are in percent.
        """
        ours, theirs = np.array(self.ours), np.array(self.theirs)
        if self.measure in POINTS:
            return float(np.abs(ours - theirs).mean())
        return 100 * float(np.abs(ours / theirs - 1).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    result: Mapping[str, Any]
    runs: Sequence[tuple[str, ...]]  # overrides, one run or one for each point


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.studies.published", __doc__)
    known = sorted(path.stem for path in CASES.glob("*.yaml"))
    usual = [name for name in known if "needs" not in read_case(name)]
    told = f"cases to run, of {', '.join(known)}; default: {', '.join(usual)}"
    parser.add_argument("cases", nargs="*", help=told)
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of runs, page and figure")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        names = options.cases or usual
        if unknown := set(names) - set(known):
            raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {known}")
        cases = {each: case for name in names for each, case in variants(name)}
        series = compare(cases, options.out / "runs", jobs=options.jobs)
        text = page(cases, series)
        (options.out / "page.md").write_text(text)
        draw(cases, series, options.out / "published.png")
    print(text)
    print(options.out)


def variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    case = read_case(name)
    yield name, case
    for variant, fact in case.get("variants", {}).items():
        others = [each for each in case["facts"] if each["what"] != fact["what"]]
        title = f"{case['title']}, {variant}"
        yield f"{name} {variant}", {**case, "title": title, "facts": [*others, fact]}


def read_case(name: str) -> dict[str, Any]:
    case: Any = OmegaConf.to_container(OmegaConf.load(CASES / f"{name}.yaml"))
    return dict(case)


def arms_of(case: Mapping[str, Any]) -> Iterator[Arm]:
    for result in case["results"]:
        fixed = [*case["settings"], *result.get("settings", [])]
        for fact in case.get("facts", []):
            fixed += fact.get("settings", [])
        for name in result["theirs"]:
            chosen = {**case.get("arms", {}), **result.get("arms", {})}[name]
            runs = []
            for place, x in enumerate(result["x"] if "knobs" in result else [None]):
                more = {key: values[place] for key, values in result.get("with", {}).items()}
                if "batch" in result:
                    more["batch"] = batch_trace(hit_percent=x, **result["batch"])
                knobs = [each.format(x=x, **more) for each in (*chosen, *result.get("knobs", []))]
                runs.append((*fixed, *knobs))
            yield Arm(name=name, result=result, runs=runs)


def batch_trace(*, prompts: int, tokens: int, kept: int, begins_s: float, hit_percent: int) -> Path:
    """Write the trace of a batch in which a share of the prompts repeats earlier ones.

    First `kept` different prompts arrive, which fill the cache. `begins_s` seconds later, the batch
    of `prompts` requests arrives at once: `hit_percent` of each 100 repeat one of the prompts that
    came last. All prompts have `tokens` tokens. The result is the path of the file.
    """
    hits = {each * 100 // hit_percent for each in range(hit_percent)}
    brought = iter(range(kept, kept + prompts))
    repeated = cycle(range(kept - kept * hit_percent // 100, kept))
    wanted = [next(repeated if each % 100 in hits else brought) for each in range(prompts)]
    lines = [
        {"timestamp": time, "input_length": tokens, "output_length": 1, "hash_ids": [block]}
        for time, blocks in ((0, range(kept)), (1000 * begins_s, wanted))
        for block in blocks
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = OUT / "traces" / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.absolute()


def compare(
    cases: Mapping[str, Mapping[str, Any]], folder: Path, *, jobs: int
) -> dict[str, list[Series]]:
    arms = {name: list(arms_of(case)) for name, case in cases.items()}
    wanted = list(dict.fromkeys(run for some in arms.values() for arm in some for run in arm.runs))
    frames = dict(zip(wanted, kept_runs(wanted, frame_of, folder, jobs=jobs), strict=True))
    return {
        name: [series_of(name, arm, [frames[run] for run in arm.runs]) for arm in some]
        for name, some in arms.items()
    }


def frame_of(result: Result) -> pd.DataFrame:
    return pd.DataFrame(columns_of(result.records))


def series_of(case: str, arm: Arm, frames: Sequence[pd.DataFrame]) -> Series:
    result, theirs = arm.result, arm.result["theirs"][arm.name]
    values = []
    for frame in frames:
        part = frame.query(result["where"]) if "where" in result else frame
        found = measure(part, result["measure"], by=result.get("by"))
        values += [found[x] for x in result["x"]] if "by" in result else [found[0]]
    kept = [place for place, value in enumerate(theirs) if value is not None]
    return Series(
        case=case,
        result=result["name"],
        measure=result["measure"],
        arm=arm.name,
        axis=result["axis"],
        x=[result["x"][place] for place in kept],
        theirs=[theirs[place] for place in kept],
        ours=[values[place] for place in kept],
    )


def knees(line: Series) -> tuple[int, int] | None:
    """Return the steps at which the published and the simulated curve change most.

    The result is None if the published curve has no knee: its steepest step is less than 1.5 times
    as steep as another one that is not its neighbor.
    """
    theirs, ours = (
        [abs(log(after / before)) for before, after in pairwise(values)]
        for values in (line.theirs, line.ours)
    )
    steepest = int(np.argmax(theirs))
    others = [step for i, step in enumerate(theirs) if abs(i - steepest) > 1]
    if theirs[steepest] < 1.5 * max(others, default=0.0):
        return None
    return steepest, int(np.argmax(ours))


def ranking(lines: Sequence[Series]) -> tuple[int, int]:
    """Count how often the simulation ranks two configurations as a publication does.

    Each line has the published and the simulated values of one configuration. Two configurations
    are compared at each point of the x-axis. Published values that differ by 5 % or less are
    skipped.

    Returns:
        The number of comparisons with the published order, and the number with the opposite order.
    """
    same = other = 0
    for one, two in combinations(lines, 2):
        theirs_at, ours_at = (
            dict(zip(two.x, each, strict=True)) for each in (two.theirs, two.ours)
        )
        for x, theirs, ours in zip(one.x, one.theirs, one.ours, strict=True):
            theirs_too, ours_too = theirs_at.get(x, theirs), ours_at.get(x, ours)
            if abs(theirs - theirs_too) > DIFFERS * max(abs(theirs), abs(theirs_too)):
                agrees = (theirs - theirs_too) * (ours - ours_too) > 0
                same, other = same + agrees, other + (not agrees)
    return same, other


def gain_errors(lines: Sequence[Series]) -> list[float]:
    """Return, in percent, the simulation error of each gain over the first configuration.

    Each line has the values of one configuration. The gain of a configuration is its mean value
    divided by that of the first configuration. The error is the difference between the simulated
    and the published gain, relative to the published gain. The result has no entry for the first
    configuration.
    """

    def gain(one: Sequence[float], first: Sequence[float]) -> float:
        return float(np.mean(one) / np.mean(first))

    first = lines[0]
    return [
        100 * abs(gain(line.ours, first.ours) / gain(line.theirs, first.theirs) - 1)
        for line in lines[1:]
    ]


def page(cases: Mapping[str, Mapping[str, Any]], series: Mapping[str, Sequence[Series]]) -> str:
    parts = [errors_table(series)]
    for name, case in cases.items():
        parts.append(f"## {name}: {case['title']}\n\nSource: {case['source']}.")
        if case.get("facts"):
            parts.append(facts_table(case["facts"]))
        for result in case["results"]:
            lines = [each for each in series[name] if each.result == result["name"]]
            parts.append(points_table(result["name"], lines))
    return "\n\n".join(parts) + "\n"


def errors_table(series: Mapping[str, Sequence[Series]]) -> str:
    rows = []
    for name, lines in series.items():
        for result in dict.fromkeys(each.result for each in lines):
            some = [each for each in lines if each.result == result]
            is_points = some[0].measure in POINTS
            gains = [] if is_points or len(some) == 1 else gain_errors(some)
            same, other = ranking(some)
            off = [
                abs(pair[0] - pair[1])
                for each in some
                if not is_points and max(each.theirs) > 1.5 * min(each.theirs)
                if (pair := knees(each)) is not None
            ]
            rows.append(
                {
                    "case": name,
                    "result": result,
                    "points": sum(len(each.x) for each in some),
                    "error": f"{np.mean([each.error for each in some]):.1f} "
                    + POINTS.get(some[0].measure, "%"),
                    "worst arm": max(some, key=lambda each: each.error).arm,
                    "gains off by at most": f"{max(gains):.0f} %" if gains else "",
                    "knees off by at most": f"{max(off)} steps" if off else "",
                    "Kendall's tau": f"{(same - other) / (same + other):.2f} ({same + other} pairs)"
                    if same + other
                    else "",
                }
            )
    return pd.DataFrame(rows).to_markdown(index=False)


def facts_table(facts: Sequence[Mapping[str, Any]]) -> str:
    named = {"what": "not published", "choices": "considered", "chosen": "chosen", "why": "why"}
    rows = [{**fact, "choices": ", ".join(map(str, fact["choices"]))} for fact in facts]
    return pd.DataFrame(rows)[[*named]].rename(columns=named).to_markdown(index=False)


def points_table(title: str, lines: Sequence[Series]) -> str:
    rows = []
    for line in lines:
        for whose, values in (("published", line.theirs), ("simulated", line.ours)):
            cells = {f"{x:g}": f"{value:.3g}" for x, value in zip(line.x, values, strict=True)}
            rows.append({title: line.arm, "by " + line.axis: whose, **cells})
    return pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)


def draw(
    cases: Mapping[str, Mapping[str, Any]], series: Mapping[str, Sequence[Series]], path: Path
) -> None:
    from matplotlib.figure import Figure  # slow to import

    panels = [(name, result) for name, case in cases.items() for result in case["results"]]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained")
    for place, (name, result) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, line in enumerate(s for s in series[name] if s.result == result["name"]):
            color = f"C{number}"
            axes.plot(line.x, line.theirs, "o", ms=4, color=color)
            axes.plot(line.x, line.ours, "-", color=color, label=line.arm)
        axes.set_title(f"{name}: {result['name']}", loc="left", fontsize="small")
        axes.set_xlabel(result["axis"], fontsize="small")
        if result.get("log"):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # powers of ten would be formulas
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="x-small")
    save(figure, path)


if __name__ == "__main__":
    main()
