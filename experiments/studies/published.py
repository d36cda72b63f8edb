"""Repeats published measurements, and compares hits, times and throughput with the simulator's.

python -m experiments.studies.published           all cases but those that need a trace
python -m experiments.studies.published A E       two of them

A case is a file of `experiments/published/`. It has the settings of its runs and the published
values. It also lists the facts that the publication leaves open, with the values considered for
each. Each case with times has two results: with nothing fitted, and with one constant fitted on its
lightest stage (`fit`; the first value of the first TTFT unless the case says otherwise), which is
judged on the other points. `--seeds 5` adds where throughput saturates and where knees lie, with a
range over seeds; `--terms` adds the errors without each term of the cost of a step (`terms`). Runs
are kept in `outputs/published/runs`, by configuration and code, and are not repeated.
`outputs/published/` gets a figure, a table of errors (docs/published.md), a page with all points,
and the traces of cases that are batches.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
HEAD = """# Published and simulated points of every case

Written by `python -m experiments.studies.published`;
[docs/published.md](../../docs/published.md) says what they show."""
CLOSE = 0.005  # how close a fitted point must come
Runs = Callable[[Sequence[Sequence[str]]], list[pd.DataFrame]]
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
    seed: int
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
    parser.add_argument("--seeds", type=int, default=1, help="seeds of cases with stages")
    parser.add_argument("--terms", action="store_true", help="also leave out each term in turn")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of runs, page and figure")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        names = options.cases or usual
        if unknown := set(names) - set(known):
            raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {known}")
        folder = options.out / "runs"
        run = partial(kept_runs, measure=frame_of, folder=folder, jobs=options.jobs)
        cases = {each: case for name in names for each, case in variants(name, run)}
        series = compare(cases, run)
        (options.out / "page.md").write_text(page(cases, series))
        text = errors_table(cases, series)
        (options.out / "errors.md").write_text(text)
        if options.terms:
            text += f"\n\n{terms_table(cases, series, run)}"
        if options.seeds > 1:
            text += f"\n\n{knees_table(cases, range(options.seeds), run)}"
        draw(cases, series, options.out / "published.png")
    print(text)
    print(options.out)


def variants(name: str, run: Runs) -> Iterator[tuple[str, dict[str, Any]]]:
    case = read_case(name)
    yield name, case
    if (fit := fit_of(case)) is not None:
        value = fitted(case, fit, run)
        fact = {
            "what": fit["setting"],
            "choices": ["one number"],
            "chosen": f"{value:.4g}",
            "why": f"fitted on {fit['result']}, {fit['arm']}, {case_axis(case, fit)} {fit['x'][0]}",
            "settings": [f"{fit['setting']}={value!r}"],
        }
        title = f"{case['title']}, calibrated on its lightest stage"
        facts = [*case.get("facts", []), fact]
        yield f"{name} calibrated", {**case, "title": title, "facts": facts}


def fit_of(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is fitted in a case: a setting, and the points of an arm of a result.

    The result is None if the case has no times, or says `fit: false`.
    """
    timed = [each for each in case["results"] if each["measure"] not in POINTS]
    if not timed or case.get("fit") is False:
        return None
    first = next((each for each in timed if each["measure"] == "ttft_s"), timed[0])
    usual = {"setting": "hardware.prefill_factor.value", "result": first["name"],
             "arm": next(iter(first["theirs"])), "x": first["x"][:1]}  # fmt: skip
    return {**usual, **case.get("fit", {})}


def case_axis(case: Mapping[str, Any], fit: Mapping[str, Any]) -> str:
    return str(next(each["axis"] for each in case["results"] if each["name"] == fit["result"]))


def fitted(case: Mapping[str, Any], fit: Mapping[str, Any], run: Runs) -> float:
    """Return the value of a constant with which the fitted points have the published mean.

    A constant in seconds is at least 0, even if the simulation is too slow without it.
    """
    arm = next(
        each for each in arms_of(case)
        if (each.result["name"], each.name) == (fit["result"], fit["arm"])
    )  # fmt: skip
    result = {**arm.result, "x": fit["x"]}
    places = [arm.result["x"].index(x) for x in fit["x"]]
    theirs = [arm.result["theirs"][arm.name][place] for place in places]
    runs = [arm.runs[place] for place in places] if len(arm.runs) > 1 else arm.runs

    def ratio(value: float) -> float:
        told = [f"{fit['setting']}={value!r}", *fit.get("settings", [])]
        frames = run([(*each, *told) for each in runs])
        part = Arm(name=arm.name, result={**result, "theirs": {arm.name: theirs}}, runs=runs)
        ours = series_of("", part, frames).ours
        is_rate = result["measure"].endswith("per_s")
        return float(np.mean([a / b for a, b in zip(ours, theirs, strict=True)])) ** (
            -1 if is_rate else 1
        )

    is_factor = "factor" in fit["setting"]
    value, other = (1.0, 1.1) if is_factor else (0.0, 0.01)
    found, next_found = ratio(value), ratio(other)
    for _ in range(4):
        if abs(next_found - 1) < CLOSE or next_found == found:
            break
        slope = (next_found - found) / (other - value)
        value, found = other, next_found
        other = max(other + (1 - next_found) / slope, 0.05 if is_factor else 0.0)
        next_found = ratio(other)
    return other


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
    cases: Mapping[str, Mapping[str, Any]], run: Runs, *, told: Sequence[str] = (), seed: int = 0
) -> dict[str, list[Series]]:
    """Run all cases, with further settings `told`, and return one series for each arm.

    A case with `draws` is run with so many seeds from `seed` on, and its values are their means.
    """
    arms = {name: list(arms_of(case)) for name, case in cases.items()}
    seeds = {name: range(seed, seed + case.get("draws", 1)) for name, case in cases.items()}
    wanted = {
        (words, own): (*words, *told, *([f"seed={own}"] if own else []))
        for name, some in arms.items()
        for arm in some
        for words in arm.runs
        for own in seeds[name]
    }
    frames = dict(zip(wanted, run(list(wanted.values())), strict=True))

    def mean(name: str, arm: Arm) -> Series:
        drawn = [
            series_of(name, arm, [frames[words, own] for words in arm.runs], seed)
            for own in seeds[name]
        ]
        return replace(drawn[0], ours=np.mean([each.ours for each in drawn], axis=0).tolist())

    return {name: [mean(name, arm) for arm in some] for name, some in arms.items()}


def frame_of(result: Result) -> pd.DataFrame:
    return pd.DataFrame(columns_of(result.records))


def series_of(case: str, arm: Arm, frames: Sequence[pd.DataFrame], seed: int = 0) -> Series:
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
        seed=seed,
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


def knees_table(
    cases: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], run: Runs
) -> str:  # fmt: skip
    """Return a table of saturation throughput and knees of the cases with stages, over seeds."""
    staged = {name: case for name, case in cases.items() if case.get("stages")}
    rows = []
    by_seed = [compare(staged, run, seed=seed) for seed in seeds]
    for name, lines in compare(staged, run).items():
        for place, line in enumerate(lines):
            others = [each[name][place] for each in by_seed]
            row = {"case": name, "result": line.result, "arm": line.arm}
            if line.measure.endswith("per_s"):
                row["what"], theirs = "saturation", max(line.theirs)
                ours = [max(each.ours) for each in others]
            elif line.measure not in POINTS and (pair := knees(line)) is not None:
                row["what"], theirs = f"knee, {line.axis}", line.x[pair[0] + 1]
                ours = [each.x[(knees(each) or pair)[1] + 1] for each in others]
            else:
                continue
            middle, least, most = np.median(ours), min(ours), max(ours)
            row |= {"published": f"{theirs:,.4g}", "simulated": f"{middle:,.4g}",
                    f"range over {len(seeds)} seeds": f"{least:,.4g} to {most:,.4g}"}  # fmt: skip
            rows.append(row)
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def terms_table(
    cases: Mapping[str, Mapping[str, Any]], series: Mapping[str, Sequence[Series]], run: Runs
) -> str:
    """Return a table of the errors of each result with all terms, and without each of them."""
    rows = []
    for name, case in cases.items():
        if name.endswith("calibrated"):
            continue
        for term, told in case.get("terms", {}).items():
            without = compare({name: case}, run, told=told)[name]
            for result in dict.fromkeys(each.result for each in series[name]):
                both = [
                    np.mean([each.error for each in lines if each.result == result])
                    for lines in (series[name], without)
                ]
                row = {"case": name, "result": result, "without": term}
                rows.append(row | {"error": f"{both[0]:.1f}", "error without": f"{both[1]:.1f}"})
    return pd.DataFrame(rows).to_markdown(index=False)


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
    parts = [HEAD]
    for name, case in cases.items():
        parts.append(f"## {name}: {case['title']}\n\nSource: {case['source']}.")
        if case.get("facts"):
            parts.append(facts_table(case["facts"]))
        for result in case["results"]:
            lines = [each for each in series[name] if each.result == result["name"]]
            parts.append(points_table(result["name"], lines))
    return "\n\n".join(parts) + "\n"


def without_fitted(line: Series, fit: Mapping[str, Any] | None) -> Series:
    """Return a series without the points on which a constant was fitted."""
    if fit is None or (line.result, line.arm) != (fit["result"], fit["arm"]):
        return line
    kept = [place for place, x in enumerate(line.x) if x not in fit["x"]]
    x, theirs, ours = (
        [values[place] for place in kept] for values in (line.x, line.theirs, line.ours)
    )
    return replace(line, x=x, theirs=theirs, ours=ours)


def errors_table(
    cases: Mapping[str, Mapping[str, Any]], series: Mapping[str, Sequence[Series]]
) -> str:
    rows = []
    for name, lines in series.items():
        fit = fit_of(cases[name]) if name.endswith("calibrated") else None
        lines = [without_fitted(each, fit) for each in lines]
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
