"""The board: which eviction policy is best for which load, and how far from the optimum.

python -m experiments.studies.board                              missing runs, then the table
python -m experiments.studies.board none oracle mine:Policy      other rows; a class is a row
python -m experiments.studies.board --windows 0 --jobs 4

A cell is one combination of workload, model and host size in `experiment=leaderboard`. Finished
runs are kept in `outputs/leaderboard/DIGEST.jsonl` and not repeated. DIGEST is a digest of
hicache's sources. For each cell, the table shows the token hit rate of each policy, and its
difference to LRU in the same window (part of the trace): the mean, the smallest and the largest. It
also shows the share of the oracle's gain over LRU. Policies in a cell are ranked by token hit rate,
without the oracle. `figure.png` shows the differences.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import yaml
from matplotlib.figure import Figure

from hicache.cli.command import in_one_sentence
from hicache.cli.schema import CONF, config_of
from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.results.report import save
from hicache.results.verdict import is_overloaded

OUT = Path("outputs", "leaderboard")
LRU, ORACLE = "none", "oracle"
HITS, TTFT = "cache/token_hit_rate", "request/ttft_s_mean"
KEPT = (HITS, TTFT, "gpu/prefill_seconds_per_request", "transfer/back_up_bytes")
POLICY, WINDOW = "cache.policy", "workload.window"

Cell = tuple[str, ...]  # overrides other than policy and window
Row = Sequence[Mapping[str, float]]  # of a policy, window by window
Runs = dict[tuple[Cell, str, str], Mapping[str, float]]  # by cell, policy and window


def main(arguments: Sequence[str] | None = None) -> None:
    grid = _grid()
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.board",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "policies", nargs="*", default=grid[POLICY], help="cache.policy of each row"
    )
    parser.add_argument("--windows", nargs="+", default=grid[WINDOW], help="workload.window")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    axes = {key: values for key, values in grid.items() if key not in (POLICY, WINDOW)}
    cells = [
        tuple(f"{key}={each}" for key, each in zip(axes, choice, strict=True))
        for choice in product(*axes.values())
    ]
    with in_one_sentence():
        runs = _carried_out(cells, options.policies, options.windows, options.jobs)
    print(table(runs))
    save(figure(runs), OUT / "figure.png")


def _grid() -> dict[str, list[str]]:
    written = yaml.safe_load((CONF / "experiment" / "leaderboard.yaml").read_text())
    params: dict[str, object] = written["hydra"]["sweeper"]["params"]
    return {key: str(values).split(",") for key, values in params.items()}


def _carried_out(
    cells: Sequence[Cell], policies: Sequence[str], windows: Sequence[str], jobs: int
) -> Runs:
    asked = [(cell, policy, window) for window in windows for cell in cells for policy in policies]
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{_digest()}.jsonl"
    runs: Runs = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cell, policy, window, found = json.loads(line)
        runs[tuple(cell), policy, window] = found
    missing = [key for key in asked if key not in runs]
    # new processes: forks of one with threads may hang
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        path.open("a") as kept,
    ):
        for key, found in zip(missing, pool.map(_measured, missing), strict=True):
            runs[key] = found
            kept.write(json.dumps([*key, found]) + "\n")
            kept.flush()
    return {key: runs[key] for key in asked}


def _digest() -> str:
    digest = sha256()
    for path in sorted([*CONF.rglob("*.yaml"), *CONF.parent.rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _measured(key: tuple[Cell, str, str]) -> dict[str, float]:
    cell, policy, window = key
    overrides = (*cell, f"{POLICY}={policy}", f"{WINDOW}={window}")
    result = run(config_of("experiment=leaderboard", *overrides))
    summary = summarize(result.records, result.measures)
    return {name: summary[name] for name in KEPT} | {"overloaded": float(is_overloaded(summary))}


def _by_cell(runs: Runs) -> Iterator[tuple[Cell, dict[str, list[Mapping[str, float]]]]]:
    # of each cell, the runs of each policy, window by window
    for cell in dict.fromkeys(key[0] for key in runs):
        rows: dict[str, list[Mapping[str, float]]] = {}
        for (of, policy, _), found in runs.items():
            if of == cell:
                rows.setdefault(policy, []).append(found)
        yield cell, rows


def gains_of(row: Row, rows: Mapping[str, Row]) -> list[float]:
    return [ours[HITS] - base[HITS] for ours, base in zip(row, rows[LRU], strict=True)]


def reached(row: Row, rows: Mapping[str, Row]) -> float | None:
    """Return what fraction of the oracle's gain over LRU an eviction policy reaches.

    The oracle is the policy that knows future requests. The gain of a policy is its mean token hit
    rate minus that of LRU. None means that the oracle gains nothing.

    Args:
        row: the metrics of the policy in each part of the trace.
        rows: the metrics of every policy, including LRU and the oracle, by name of the policy.
    """
    low, high, ours = (mean(each[HITS] for each in of) for of in (rows[LRU], rows[ORACLE], row))
    return (ours - low) / (high - low) if high > low else None


def table(runs: Runs) -> str:
    lines = [
        "| cell | rank | policy | token hits | to LRU (windows) | of the oracle's gain "
        "| TTFT mean | GPU s/request | backed up, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, rows in _by_cell(runs):
        ranked = sorted(rows, key=lambda name: -mean(each[HITS] for each in rows[name]))
        places = [name for name in ranked if name != ORACLE]
        for name in ranked:
            row = rows[name]
            gains = gains_of(row, rows)
            share = reached(row, rows) if ORACLE in rows else None
            hits, ttft, gpu, written = (mean(each[key] for each in row) for key in KEPT)
            late = any(each["overloaded"] for each in row)
            lines.append(
                f"| {_name(cell)} "
                f"| {'' if name == ORACLE else places.index(name) + 1} | {name} | {hits:.3f} "
                f"| {mean(gains):+.3f} ({min(gains):+.3f} to {max(gains):+.3f}) "
                f"| {'' if share is None else f'{share:.0%}'} "
                f"| {'overloaded' if late else f'{ttft:.2f} s'} | {gpu:.3f} "
                f"| {written / 2**30:.0f} |"
            )
    return "\n".join(lines)


def figure(runs: Runs) -> Figure:
    cells = list(_by_cell(runs))
    policies = [name for name in cells[0][1] if name != LRU]
    made = Figure(figsize=(8, 0.5 * len(cells) + 1.2), layout="constrained")
    axes = made.subplots()
    for place, name in enumerate(policies):
        gains = [[100 * gain for gain in gains_of(rows[name], rows)] for _, rows in cells]
        middles = [mean(each) for each in gains]
        ends = [
            [middle - min(each) for middle, each in zip(middles, gains, strict=True)],
            [max(each) - middle for middle, each in zip(middles, gains, strict=True)],
        ]
        heights = [number + 0.8 * place / len(policies) for number in range(len(cells))]
        color = "lightgray" if name == ORACLE else None
        axes.barh(
            heights,
            middles,
            0.7 / len(policies),
            xerr=ends,
            error_kw={"linewidth": 0.7},
            color=color,
            label=name,
        )
    axes.set_yticks([number + 0.3 for number in range(len(cells))], map(_name, dict(cells)))
    axes.invert_yaxis()
    axes.set_xlabel("points of token hits above LRU: mean and range of the windows")
    axes.axvline(0, color="black", linewidth=0.8)
    if policies:
        axes.legend(ncols=len(policies), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return made


def _name(cell: Cell) -> str:
    return " ".join(part.partition("=")[2] for part in cell)


if __name__ == "__main__":
    main()
