"""The board: which eviction policy is best for which load, and how far from the optimum.

python -m experiments.studies.board                              missing runs, then the table
python -m experiments.studies.board none oracle mine:Policy      other rows; a class is a row
python -m experiments.studies.board --windows 0 --jobs 4

A cell is one combination of workload, model and host size in `experiment=leaderboard`. Finished
runs are kept in `outputs/leaderboard` and not repeated. For each cell, the table shows the token
hit rate of each policy, and its difference to LRU in the same window (part of the trace): the mean,
the smallest and the largest. It also shows the share of the oracle's gain over LRU. Policies in a
cell are ranked by token hit rate, without the oracle. `figure.png` shows the mean differences.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

import pandas as pd
import yaml
from matplotlib.figure import Figure

from experiments.studies.kept_runs import kept_runs
from hicache.cli.command import in_one_sentence, parser_of
from hicache.results.figures import save
from hicache.results.metrics import Result, summarize
from hicache.results.verdict import is_overloaded
from hicache.runs.schema import CONF

OUT = Path("outputs", "leaderboard")
LRU, ORACLE = "none", "oracle"
HITS, OVERLOADED = "cache/token_hit_rate", "overloaded"
KEPT = (HITS, "request/ttft_s_mean", "gpu/prefill_seconds_per_request", "transfer/back_up_bytes")
POLICY, SLICE = "cache.policy", "workload.slice"

Row = Sequence[Mapping[str, float]]  # of a policy, window by window
Board = Mapping[str, Mapping[str, Row]]  # by cell and policy


def main(arguments: Sequence[str] | None = None) -> None:
    grid = _grid()
    parser = parser_of("python -m experiments.studies.board", __doc__)
    parser.add_argument(
        "policies", nargs="*", default=grid.pop(POLICY), help="cache.policy of each row"
    )
    parser.add_argument("--slices", nargs="+", default=grid.pop(SLICE), help="workload.slice")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    cells = [
        [f"{key}={each}" for key, each in zip(grid, choice, strict=True)]
        for choice in product(*grid.values())
    ]
    wanted = [
        ("experiment=leaderboard", *cell, f"{POLICY}={policy}", f"{SLICE}={part}")
        for cell, policy, part in product(cells, options.policies, options.slices)
    ]
    with in_one_sentence():
        runs = iter(kept_runs(wanted, measured, OUT, jobs=options.jobs))
    board = {
        " ".join(part.partition("=")[2] for part in cell): {
            policy: [next(runs) for _ in options.slices] for policy in options.policies
        }
        for cell in cells
    }
    print(table(board))
    save(figure(board), OUT / "figure.png")


def _grid() -> dict[str, list[str]]:
    written = yaml.safe_load((CONF / "experiment" / "leaderboard.yaml").read_text())
    params: dict[str, object] = written["hydra"]["sweeper"]["params"]
    return {key: str(values).split(",") for key, values in params.items()}


def measured(result: Result) -> dict[str, float]:
    summary = summarize(result.records, result.measures)
    return {name: summary[name] for name in KEPT} | {OVERLOADED: is_overloaded(summary)}


def gains_of(row: Row, rows: Mapping[str, Row]) -> list[float]:
    return [ours[HITS] - base[HITS] for ours, base in zip(row, rows[LRU], strict=True)]


def table(board: Board) -> str:
    lines = []
    for cell, rows in board.items():
        ranked = sorted(rows, key=lambda name: -mean(each[HITS] for each in rows[name]))
        places = [name for name in ranked if name != ORACLE]
        most = mean(gains_of(rows[ORACLE], rows)) if ORACLE in rows else 0
        for name in ranked:
            gains = gains_of(rows[name], rows)
            hits, ttft_s, gpu_s, written = (mean(each[key] for each in rows[name]) for key in KEPT)
            is_late = any(each[OVERLOADED] for each in rows[name])
            lines.append(
                {
                    "cell": cell,
                    "rank": "" if name == ORACLE else places.index(name) + 1,
                    "policy": name,
                    "token hits": f"{hits:.3f}",
                    "to LRU (windows)": f"{mean(gains):+.3f} "
                    f"({min(gains):+.3f} to {max(gains):+.3f})",
                    "of the oracle's gain": f"{mean(gains) / most:.0%}" if most > 0 else "",
                    "TTFT mean": "overloaded" if is_late else f"{ttft_s:.2f} s",
                    "GPU s/request": f"{gpu_s:.3f}",
                    "backed up, GiB": f"{written / 2**30:.0f}",
                }
            )
    return pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)


def figure(board: Board) -> Figure:
    policies = [name for name in next(iter(board.values())) if name != LRU]
    points = [
        [100 * mean(gains_of(rows[name], rows)) for name in policies] for rows in board.values()
    ]
    made = Figure(figsize=(3 + 0.7 * len(policies), 1 + 0.35 * len(board)), layout="constrained")
    axes = made.subplots()
    axes.imshow(points, cmap="RdBu", vmin=-15, vmax=15, aspect="auto")
    for y, row in enumerate(points):
        for x, gain in enumerate(row):
            axes.text(x, y, f"{gain:+.1f}", ha="center", va="center")
    axes.set_xticks(range(len(policies)), policies)
    axes.set_yticks(range(len(board)), list(board))
    axes.tick_params(length=0)
    axes.set_title("points of token hits above LRU, mean of the windows", loc="right", fontsize=10)
    return made


if __name__ == "__main__":
    main()
