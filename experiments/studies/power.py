"""What paired comparisons claim: of equal configurations, and of ones that differ by 5 %.

python -m experiments.studies.power                  missing runs, then the table
python -m experiments.studies.power chat --pairs 10

All arms evict pages in random order. Equal arms draw other random numbers, so any difference
between them is chance. A third arm has less host memory. In a copy of the second arm, every TTFT is
5 % longer. Each comparison has runs of its own, and is the one of `hicache compare --paired`.
Finished comparisons are kept in `experiments/results/power.csv`, with the ends of their intervals.

For each workload and second arm, the table shows the ratio of the mean TTFT over all comparisons,
in how many of them the interval is above or below 1, and the smallest effect that they name
(median). Beside it is the effect that 80 % of them would find if all TTFTs of one arm were
multiplied. The last columns count the intervals of two other metrics that leave out no effect.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from shutil import copyfile, rmtree
from typing import Any

import numpy as np
import pandas as pd

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.tables.groups import compared_groups
from hicache.cli.tables.intervals import POWER
from hicache.cli.tables.paired_table import table_of_pairs
from hicache.results.requests_file import FILES, read_requests
from hicache.runs import provenance
from hicache.runs.job import run_job
from hicache.runs.schema import config_of
from hicache.runs.stored import CONFIG_FILE, SUMMARY_FILE

OUT, KEPT = Path("outputs", "power"), Path(__file__).parents[1] / "results" / "power.csv"
METRICS = ("request/ttft_s_mean", "request/ttft_s_p95", "cache/token_hit_rate")
TTFT, P95, HITS = METRICS
VALUES = (  # of a second arm, that are kept
    *(f"{TTFT} ratio", f"{TTFT} ratio low", f"{TTFT} ratio high", f"{TTFT} least effect"),
    *(f"{P95} ratio low", f"{P95} ratio high", f"{HITS} low", f"{HITS} high"),
)
LONGER = 1.05
COLUMNS = (
    *("workload", "second arm", "comparisons", "TTFT ratio", "longer", "shorter"),
    *("effect named", "effect found by 80 %", "claims on p95", "claims on hits"),
)
NUM_WINDOWS, WINDOWS, SEEDS = 40, 8, 5  # of a trace, of a comparison; seeds of a generated workload
FIRST, EQUAL, LESS, SCALED = "first", "equal", "less", "scaled"  # arms
ALL = (
    *("model=llama3_8b", "storage=none", "tracker.wandb_mode=disabled"),
    "cache.policy=experiments.studies.drawn:Drawn",
)
CASES = {  # overrides, and GiB of the device, of the host, and of the host of the third arm
    "chat": ("workload.num_sessions=100 workload.session_rate=0.7", (60, 100, 74)),
    "weka_agentic": (
        "workload.limit=12000 workload.max_context=65536 workload.concurrency=16 "
        "workload.stagger_s=0 parallel.tp=1",
        (20, 24, 21),
    ),
    "mooncake_synthetic": ("workload.time_scale=1.3 workload.warm_up_s=80", (60, 400, 350)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.studies.power", __doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="workloads")
    parser.add_argument("--pairs", type=int, default=100, help="comparisons of each workload")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        for name in options.cases:
            print(
                pd.DataFrame(rows_of(name, found_of(name, options.pairs))).to_markdown(index=False)
            )


def found_of(name: str, pairs: int) -> pd.DataFrame:
    """Run the missing comparisons of a workload; return what all have found, a row a second arm."""
    if not KEPT.exists():
        KEPT.write_text(",".join(("workload", "number", "arm", *VALUES)) + "\n")
    kept = pd.read_csv(KEPT)
    for number in sorted({*range(pairs)} - {*kept["number"][kept["workload"] == name]}):
        arms = compared(name, number)
        told = [(name, number, arm, *(arms[arm][key] for key in VALUES)) for arm in arms]
        pd.DataFrame(told).to_csv(KEPT, mode="a", header=False, index=False, float_format="%.5f")
        rmtree(OUT / name / f"{number}")
    kept = pd.read_csv(KEPT)
    return kept[(kept["workload"] == name) & (kept["number"] < pairs)]


def compared(name: str, number: int) -> dict[str, Mapping[str, Any]]:
    """Run the arms of one comparison; return the differences of each second arm from the first."""
    folder, (overrides, (device_gib, *host_gib)) = OUT / name / f"{number}", CASES[name]
    own = {FIRST: host_gib[0], EQUAL: host_gib[0], LESS: host_gib[1]}
    for place, (arm, gib) in enumerate(own.items()):
        sizes = (f"cache.device_gib={device_gib}", f"cache.host_gib={gib}")
        draw = f"cache.policy_args.draw={len(own) * number + place}"
        for block, served in enumerate(blocks_of(name, number)):
            told = (f"workload={name}", *ALL, *overrides.split(), *sizes, draw, served)
            run_job(config_of(*told), folder / arm / f"{block}", is_job=True)
            if arm == EQUAL:
                _scale(folder / arm / f"{block}", folder / SCALED / f"{block}")
    pairs = {arm: compared_groups([folder / FIRST, folder / arm]) for arm in (EQUAL, SCALED, LESS)}
    return {arm: table_of_pairs(pair, METRICS).sections[0][1].values for arm, pair in pairs.items()}


def blocks_of(name: str, number: int) -> list[str]:
    """Return the overrides of the blocks: seeds of its own, or windows drawn without replacement.

    A round of comparisons uses each window once.
    """
    if name == "chat":
        return [f"seed={SEEDS * number + place}" for place in range(SEEDS)]
    turn, place = divmod(number, NUM_WINDOWS // WINDOWS)
    windows = Random(turn).sample(range(NUM_WINDOWS), NUM_WINDOWS)
    ours = windows[place * WINDOWS : (place + 1) * WINDOWS]
    return [f"workload.slice={window}/{NUM_WINDOWS}" for window in ours]


def _scale(run: Path, copy: Path) -> None:
    copy.mkdir(parents=True, exist_ok=True)
    for file in (CONFIG_FILE, SUMMARY_FILE, provenance.FILE):
        copyfile(run / file, copy / file)
    rows = read_requests(run)
    rows["first_token_ns"] += (rows["first_token_ns"] - rows["arrival_ns"]) * (LONGER - 1)
    rows.to_parquet(copy / FILES[0])


def rows_of(name: str, comparisons: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of one workload: what its comparisons found for each second arm."""
    rows = []
    for arm in (EQUAL, SCALED, LESS):
        found = comparisons[comparisons["arm"] == arm]
        low, high, ratio = (found[f"{TTFT} ratio{part}"] for part in (" low", " high", ""))
        truth = np.exp(np.log(ratio).mean())
        # if the effect were larger by some factor, so would be the lower ends
        found_by_most = np.quantile(truth / low.dropna(), POWER, method="higher")
        claims = [
            int(((found[f"{key} low"] > equal) | (found[f"{key} high"] < equal)).sum())
            for key, equal in ((f"{P95} ratio", 1), (HITS, 0))
        ]
        row = [name, arm, low.count(), f"{truth:.3f}", (low > 1).sum(), (high < 1).sum()]
        row += [f"{found[f'{TTFT} least effect'].median():.1%}", f"{found_by_most - 1:.1%}"]
        rows.append(dict(zip(COLUMNS, row + claims, strict=True)))
    return rows


if __name__ == "__main__":
    main()
