"""Remakes the results pages of `docs/`: their runs, tables, figures and stamps.

python -m experiments.pages --list            every page, its runs, minutes, commit and canary
python -m experiments.pages routing           the missing runs of a page, then its tables
python -m experiments.pages                   all pages
python -m experiments.pages published --long  with the programs that take an evening
python -m experiments.pages board --add       only the conditions that its results lack
python -m experiments.pages --canaries        the canaries: which pages are stale

A page is a file of `experiments/findings/`. It has the arms that are compared, the conditions under
which they are, and the claims; or it names programs (`commands`, or `long` ones with `--long`) with
the tables (`texts`) and other files (`copies`) that they write; or both. Runs are kept in
`outputs/pages`, by configuration and code. Their metrics go to `experiments/results/NAME.json`, and
tables of these to `docs/NAME.md`, between `<!-- begin -->` and `<!-- end -->`. A canary is a small
run of the page. The page is stale if its summary has changed since the page was made.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from hashlib import sha256
from itertools import chain
from os import cpu_count, times
from pathlib import Path
from shutil import copyfile
from statistics import fmean
from time import process_time
from typing import Any

import yaml
from matplotlib.figure import Figure

from experiments.studies.kept_runs import kept_runs
from hicache import experiment
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.tables.intervals import Estimate, difference, ratio
from hicache.results.figures import save
from hicache.results.metrics import Result, summarize
from hicache.results.verdict import is_overloaded
from hicache.runs.schema import config_of

ROOT = Path(__file__).parents[1]
FINDINGS, RESULTS = ROOT / "experiments" / "findings", ROOT / "experiments" / "results"
CANARIES = RESULTS / "canaries.json"  # by page, the digest of its canary's summary now
OUT = Path("outputs", "pages")
BEGIN, END = "<!-- begin -->\n", "<!-- end -->\n"
OVERLOADED, REJECTED, SECONDS = "overloaded", "rejected", "seconds"

Finding = Mapping[str, Any]
Results = Mapping[str, Any]  # by condition, arm and metric: a list of blocks, each of seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Settings under which arms are compared."""

    name: str
    settings: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    blocks: Sequence[str]  # overrides, one for each
    seeds: Sequence[int]

    def runs(self) -> Iterator[tuple[int, str, str, list[str]]]:
        """Yield the seed, block, arm and overrides of each run; all arms of a seed come first."""
        for seed in self.seeds:
            for block in self.blocks:
                for arm, own in self.arms.items():
                    yield seed, block, arm, [*self.settings, *own, *block.split(), f"seed={seed}"]


def finding_of(name: str) -> Finding:
    found: Finding = yaml.safe_load((FINDINGS / f"{name}.yaml").read_text())
    return found


def pages() -> dict[str, Finding]:
    return {path.stem: finding_of(path.stem) for path in sorted(FINDINGS.glob("*.yaml"))}


def conditions_of(finding: Finding) -> list[Condition]:
    conditions = []
    for name, own in finding.get("conditions", {}).items():
        found = {**finding, **own}
        arms = found["arms"]  # names, or arms of the condition's own
        if not isinstance(arms, Mapping):
            arms = {each: finding["arms"][each] for each in arms}
        conditions.append(
            Condition(
                name=name,
                settings=[*finding["settings"], *own.get("settings", ())],
                arms=arms,
                blocks=[f"workload.slice={each}" for each in found.get("blocks", ())] or [""],
                seeds=found["seeds"],
            )
        )
    return conditions


def measured(result: Result) -> dict[str, float]:
    summary = dict(summarize(result.records, result.measures))
    prompts = sum(record.prompt_len for record in result.records)
    rejected = summary["cache/rejected_tokens"] / prompts
    return summary | {OVERLOADED: is_overloaded(summary), REJECTED: rejected}


def _timed(began: float, result: Result) -> dict[str, float]:
    return measured(result) | {SECONDS: process_time() - began}


def run(finding: Finding, stored: Results) -> Results:
    """Run what is neither stored nor kept yet, and return the metrics of all conditions."""
    results: dict[str, Any] = {}
    for condition in conditions_of(finding):
        if condition.name in stored:
            results[condition.name] = stored[condition.name]
            continue
        arms = results[condition.name] = {}
        for seed, block, arm, overrides in condition.runs():
            measure = partial(_timed, process_time())
            (one,) = kept_runs([overrides], measure, OUT, jobs=1)
            for metric in (*finding["metrics"], OVERLOADED, REJECTED, SECONDS):
                blocks = arms.setdefault(arm, {}).setdefault(metric, {})
                blocks.setdefault(block, []).append(float(f"{one.get(metric, 0):.6g}"))
            print(condition.name, arm, block, seed, file=sys.stderr, flush=True)
        for metrics in arms.values():
            metrics.update({metric: [*blocks.values()] for metric, blocks in metrics.items()})
    return results


# -- effects --------------------------------------------------------------------------------------


def _blocks(found: Mapping[str, Any], metric: str) -> list[float]:
    # with one block, the seeds are the blocks
    blocks: list[list[float]] = found[metric]
    return blocks[0] if len(blocks) == 1 else [fmean(each) for each in blocks]


def effect(arms: Mapping[str, Any], arm: str, over: str, metric: str) -> Estimate:
    """Return what `arm` has more of a metric than `over`: points, events or percent."""
    base, other = (_blocks(arms[each], metric) for each in (over, arm))
    if not _is_difference(metric) and (found := ratio(base, other)) is not None:
        return found
    return difference(base, other)


def _is_rate(metric: str) -> bool:
    return metric.endswith(("_rate", "_share"))


def _is_difference(metric: str) -> bool:
    return _is_rate(metric) or metric.endswith("_count")


def shown(found: Estimate, metric: str) -> str:
    scale = 1 if metric.endswith("_count") else 100
    middle = f"{scale * found.middle:+.1f}{'' if _is_difference(metric) else ' %'}"
    if found.interval is None:
        return middle
    return f"{middle} [{', '.join(f'{scale * end:+.1f}' for end in found.interval)}]"


def verdict(found: Estimate, wants: str | float) -> str:
    """Say whether an effect is `more` or `less` than 0, or within `wants` of it."""
    if found.interval is None:
        return "open"
    low, high = found.interval
    if isinstance(wants, str):
        if wants == "less":
            low, high = -high, -low
        return "**holds**" if low > 0 else "*reverses*" if high < 0 else "open"
    if -wants <= low and high <= wants:
        return "**holds**"
    return "*reverses*" if low > wants or high < -wants else "open"


def told(claim: Mapping[str, Any], arms: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a claim's effect and its verdict under a condition, None if it has not its arms."""
    arm, over, metric = claim["arm"], claim["over"], claim["metric"]
    if arm not in arms or over not in arms:
        return None
    found = effect(arms, arm, over, metric)
    return shown(found, metric), verdict(found, claim["wants"])


def claims_table(finding: Finding, results: Results) -> str:
    # one table for the conditions that have the arms of the same claims
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for condition, arms in results.items():
        seen = [(each["says"], " ".join(told(each, arms) or ())) for each in finding["claims"]]
        if claims := {says: cell for says, cell in seen if cell}:
            row = [condition + _limits(arms), *claims.values()]
            tables.setdefault(tuple(claims), []).append(row)
    return "\n\n".join(_markdown([["condition", *each], *rows]) for each, rows in tables.items())


def index(found: Mapping[str, Finding]) -> str:
    """Return a table of tried claims, with the conditions where they hold, are open or reverse."""
    verdicts = "**holds**", "open", "*reverses*"
    lines = [["page", "claim", *(each.strip("*") for each in verdicts)]]
    for name, finding in found.items():
        path = RESULTS / f"{name}.json"
        results = json.loads(path.read_text()).get("results", {}) if path.exists() else {}
        for claim in finding.get("claims", ()):
            where: dict[str, list[str]] = {each: [] for each in verdicts}
            for condition, arms in results.items():
                if (seen := told(claim, arms)) is not None:
                    where[seen[1]].append(condition.strip("… "))
            if any(where.values()):
                cells = ("; ".join(each) for each in where.values())
                lines.append([f"[{name}]({name}.md)", claim["says"], *cells])
    return _markdown(lines)


def _limits(arms: Mapping[str, Any]) -> str:
    most = max(max(chain.from_iterable(each[REJECTED])) for each in arms.values())
    told = ["overloaded"] if any(map(_is_late, arms.values())) else []
    told += [f"rejects {most:.0%}"] if most else []
    return f" ({', '.join(told)})" if told else ""


def _is_late(arm: Mapping[str, Any]) -> bool:
    return any(chain.from_iterable(arm[OVERLOADED]))


def arms_table(results: Results, table: Mapping[str, Any]) -> str:
    metrics, over = table["metrics"], table["over"]
    heads = [head for name in metrics.values() for head in (name, f"to {over}")]
    lines = [[table["arms"], *heads]]
    for arm, found in results[table["arms"]].items():
        cells = []
        for metric in metrics:
            mean = fmean(_blocks(found, metric))
            cells.append(f"{mean:.3f}" if _is_rate(metric) else f"{mean:.3g}")
            gain = effect(results[table["arms"]], arm, over, metric)
            is_void = _is_late(found) and metric.startswith("request/ttft")
            cells.append("" if arm == over else "overloaded" if is_void else shown(gain, metric))
        lines.append([arm, *cells])
    return _markdown(lines)


def conditions_table(results: Results, table: Mapping[str, Any]) -> str:
    """Return the means of one metric: a row for each condition, a column for each arm."""
    arms, metric = table["columns"], table["metric"]
    lines = [[table["title"], *arms]]
    for name in table["conditions"]:
        found = results[name]
        means = [fmean(_blocks(found[arm], metric)) for arm in arms]
        cells = [
            f"{mean:.3g}{' (overloaded)' if _is_late(found[arm]) else ''}"
            for arm, mean in zip(arms, means, strict=True)
        ]
        lines.append([name, *cells])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(each)} |" for each in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows])


def draw(finding: Finding, results: Results, path: Path) -> None:
    """Draw the effect of each arm on each metric, with its interval."""
    over = finding["figure"]["over"]
    metrics = finding["figure"]["metrics"]
    first: dict[str, Any] = {}  # by arm, the first condition that has it and can serve it
    for arms in results.values():
        if over in arms:
            first = {arm: arms for arm in arms if arm != over and not _is_late(arms[arm])} | first
    figure = Figure(figsize=(9, 1 + 0.28 * len(first)), layout="constrained")
    for axes, (metric, title) in zip(
        figure.subplots(1, len(metrics), sharey=True), metrics.items(), strict=True
    ):
        for y, (arm, arms) in enumerate(first.items()):
            gain = effect(arms, arm, over, metric)
            low, high = gain.interval or (gain.middle, gain.middle)
            axes.plot([100 * low, 100 * high], [y, y], color="C0")
            axes.plot(100 * gain.middle, y, "o", color="C0")
        axes.axvline(0, color="gray", lw=0.8)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_yticks(range(len(first)), list(first))
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


# -- pages ----------------------------------------------------------------------------------------


def text_of(name: str, finding: Finding, stored: Mapping[str, Any], canary: str) -> str:
    """Return what stands on a page between its two marks."""
    results, made = stored.get("results", {}), stored["made"]
    parts = [*stored.get("texts", ())]
    for table in finding.get("tables", ()):
        by_arm = "columns" not in table
        parts.append(arms_table(results, table) if by_arm else conditions_table(results, table))
    if "claims" in finding:
        parts.append(claims_table(finding, results))
    stamp = f"Made at {made['commit']} on {made['date']}, {made['machine']}"
    stamp += f", {made['minutes']:.0f} min of processor time" if made["minutes"] else ""
    option = " --long" if made.get("is_long") else ""
    stamp += f": `python -m experiments.pages {name}{option}`."
    if canary != made["canary"]:
        stamp += " **Stale:** its canary's summary has changed since."
    return "\n\n".join([*parts, stamp]) + "\n"


def with_text(page: str, text: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN.strip()} with an {END.strip()}")
    return before + BEGIN + text + END + after


def canary_of(finding: Finding) -> str:
    """Run the canary of a page, and return the digest of its summary."""
    summaries = []
    for overrides in finding["canary"]:
        result = experiment.run(config_of(*overrides.split()))
        summary = summarize(result.records, result.measures)
        summaries.append({key: f"{value:.6g}" for key, value in sorted(summary.items())})
    return sha256(json.dumps(summaries).encode()).hexdigest()[:8]


def made_now(minutes: float, canary: str) -> dict[str, Any]:
    git, code = ["git", "-C", str(ROOT)], ("hicache", "conf", "experiments/findings")
    command = [*git, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if subprocess.run([*git, "diff", "HEAD", "--quiet", "--", *code], check=False).returncode:
        commit += " with changes"
    machine = f"{cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    today = date.today().isoformat()
    return {"commit": commit, "date": today, "machine": machine, "minutes": minutes,
            "canary": canary}  # fmt: skip


def remake(name: str, finding: Finding, *, long: bool = False) -> None:
    """Run what a page needs, and write its results, figure, tables and stamp."""
    began = sum(times()[:4])  # with what has run as other processes
    for command in finding.get("long" if long and "long" in finding else "commands", ()):
        subprocess.run([sys.executable, "-m", *command.split()], check=True)
    minutes = (sum(times()[:4]) - began) / 60
    stored: dict[str, Any] = {
        "texts": [Path(each).read_text().strip() for each in finding.get("texts", ())]
    }
    for source, target in finding.get("copies", {}).items():
        copyfile(source, ROOT / target)
    if "conditions" in finding:
        stored["results"] = run(finding, {})
        minutes += _minutes(stored["results"])
    made = made_now(round(minutes, 1), canary_of(finding))
    _store(name, finding, stored, made | ({"is_long": True} if long else {}))


def add(name: str, finding: Finding) -> None:
    """Run the conditions without results. The stamp names the commits of old and new ones."""
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    before, canary = stored["made"], canary_of(finding)
    if canary != before["canary"]:
        raise ValueError(f"{name}: the stored results are stale, so make the page without --add")
    stored["results"] = run(finding, stored.get("results", {}))
    made = made_now(round(before["minutes"] + _minutes(stored["results"]), 1), canary)
    _store(name, finding, stored, made | {"commit": f"{made['commit']} and {before['commit']}"})


def _minutes(results: Results) -> float:
    # of processor time, also of runs that were kept; conditions of earlier calls have no times
    new = [arm.pop(SECONDS) for arms in results.values() for arm in arms.values() if SECONDS in arm]
    seconds = [*chain.from_iterable(chain.from_iterable(new))]
    known = [each for each in seconds if each]
    return fmean(known) * len(seconds) / 60 if known else 0


def _store(name: str, finding: Finding, stored: dict[str, Any], made: Mapping[str, Any]) -> None:
    if "figure" in finding:
        draw(finding, stored["results"], ROOT / "docs" / finding["figure"]["path"])
    _write(RESULTS / f"{name}.json", {**stored, "made": made})
    _write(CANARIES, {**_canaries(), name: made["canary"]})
    fill(name, finding)


def fill(name: str, finding: Finding) -> None:
    """Write tables and stamp of the stored results into a page, and all claims into their index."""
    path = ROOT / "docs" / "findings.md"
    path.write_text(with_text(path.read_text(), index(pages()) + "\n"))
    path = ROOT / "docs" / f"{name}.md"
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    path.write_text(with_text(path.read_text(), text_of(name, finding, stored, _canaries()[name])))


def _canaries() -> dict[str, str]:
    found: dict[str, str] = json.loads(CANARIES.read_text()) if CANARIES.exists() else {}
    return found


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content) + "\n")


def listed(found: Mapping[str, Finding]) -> str:
    lines = [["page", "runs", "minutes on this machine", "made at", "on", "canary"]]
    for name, finding in found.items():
        path, now = RESULTS / f"{name}.json", _canaries().get(name)
        made = json.loads(path.read_text())["made"] if path.exists() else {}
        runs = sum(len([*each.runs()]) for each in conditions_of(finding))
        state = "not made" if not made else "unchanged" if made["canary"] == now else "**stale**"
        commands = (*finding.get("commands", ()), *finding.get("long", ()))
        told = "; ".join([*commands, *([f"{runs} runs"] if runs else ())])
        stamp = (str(made.get(key, "")) for key in ("minutes", "commit", "date"))
        lines.append([name, told, *stamp, state])
    return _markdown(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.pages", __doc__)
    found = pages()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(found))
    parser.add_argument("--list", action="store_true", help="print a table of all pages")
    parser.add_argument("--canaries", action="store_true", help="run canaries, and no page")
    parser.add_argument("--long", action="store_true", help="run the long programs of a page")
    parser.add_argument("--add", action="store_true", help="only run conditions without results")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        if unknown := {*options.names} - {*found}:
            raise ValueError(f"pages are {', '.join(found)}, got {', '.join(sorted(unknown))}")
        for name in () if options.list else options.names or found:
            if options.canaries:
                _write(CANARIES, {**_canaries(), name: canary_of(found[name])})
                fill(name, found[name])
            elif options.add:
                add(name, found[name])
            else:
                remake(name, found[name], long=options.long)
        print(listed(found))


if __name__ == "__main__":
    main()
