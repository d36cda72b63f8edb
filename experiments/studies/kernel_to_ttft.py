"""What each copy path buys in TTFT and goodput, regime by regime, and which conclusions it turns.

hicache run experiment=kernel_to_ttft

Every path (`conf/arm/copy_*.yaml`) serves every regime with three seeds, and with the first one so
many sessions at once as it can serve in time: its goodput. Leaves `rows.csv` with all
runs, `table.md` and `kernel_to_ttft.png`. A conclusion is asked of each path by itself: does the
host tier pay, and which page size is best? Where the answers differ, the path decides.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from joblib import Parallel, delayed

from experiments.studies.copy_paths import (
    NO_HOST,
    PATHS,
    Row,
    conclusions,
    draw,
    summary_of,
    table,
    verdict_on,
)
from hicache import experiment
from hicache.cli.goodput import climb
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig, GoodputConfig
from hicache.executor.simulated.links import CopyPath, pcie_rate
from hicache.results.metrics import summarize
from hicache.results.tracking import write_json
from hicache.results.verdict import objections

NUM_SEEDS = 3
CONVERSATION = ("workload=mooncake_conversation", "parallel.tp=4")
AGENTS = ("workload=agents", "cache.device_gib=24")
NUM_RATES = 8


class Regime(NamedTuple):
    """A workload on pools and devices, and what is promised to its requests."""

    name: str
    overrides: tuple[str, ...]
    objective: GoodputConfig
    crowd: int = 1  # times as many sessions, as much denser, are more than can be served in time


SLOW = GoodputConfig(num_rates=NUM_RATES, ttft_s=2.0, tpot_s=0.05)
QUICK = GoodputConfig(num_rates=NUM_RATES, ttft_s=0.2, tpot_s=0.02)
DISTURBED = "hardware.copy_slowdown.value=2.8"
REGIMES = (
    Regime("conversation, pages of 64", (*CONVERSATION, "cache.page_size=64"), SLOW),
    Regime("conversation, pages of 16", (*CONVERSATION, "cache.page_size=16"), SLOW),
    Regime(
        "conversation, pages of 64, steps beside copies 2.8×",
        (*CONVERSATION, "cache.page_size=64", DISTURBED),
        SLOW,
    ),
    Regime("agents, pages of 64", (*AGENTS, "parallel.tp=4", "cache.page_size=64"), QUICK, 4),
    Regime("agents, pages of 16", (*AGENTS, "parallel.tp=4", "cache.page_size=16"), QUICK, 4),
    Regime(
        "agents, pages of 16 in slices of 8 ranks",
        (*AGENTS, "parallel.tp=8", "cache.page_size=16"),
        QUICK,
        8,
    ),
    Regime("agents, token pages", (*AGENTS, "parallel.tp=4", "cache.page_size=1"), QUICK, 4),
    Regime(
        "agents, pages of 16, steps beside copies 2.8×",
        (*AGENTS, "parallel.tp=4", "cache.page_size=16", DISTURBED),
        QUICK,
        4,
    ),
)


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Run all, write the table and the figure, print the table."""
    seeds = range(config.seed, config.seed + NUM_SEEDS)
    jobs = list(product(REGIMES, (*PATHS, NO_HOST), seeds))
    # the longest first
    jobs.sort(key=lambda job: (job[2] > config.seed, -job[0].crowd, "token" not in job[0].name))
    shared = _shared(config)
    rows = Parallel(n_jobs=-1)(
        delayed(measure)(shared, *job, seeks_goodput=job[2] == config.seed) for job in jobs
    )
    names = [regime.name for regime in REGIMES]
    rows.sort(key=lambda row: (names.index(row.regime), row.seed))
    pd.DataFrame(rows).to_csv(out_dir / "rows.csv", index=False)
    told = [*conclusions(rows), verdict_on(rows)]
    text = table(rows) + "\n\n" + "\n".join(f"- {line}" for line in told) + "\n"
    (out_dir / "table.md").write_text(text)
    write_json(out_dir / "summary.json", summary_of(rows))
    draw(rows).savefig(out_dir / "kernel_to_ttft.png", dpi=150)
    print(text)


def measure(
    shared: Sequence[str], regime: Regime, path: str, seed: int, *, seeks_goodput: bool
) -> Row:
    """One run, in any process, and a search for the highest rate if it `seeks_goodput`."""
    arm = "cache.host_gib=0" if path == NO_HOST else f"arm={path}"
    # what a regime says comes after what a path says: hydra takes overrides by group, then by value
    config = config_of(*shared, arm, *regime.overrides, f"seed={seed}")
    result = experiment.run(config)
    summary = summarize(result.records, result.measures)
    piece = config.model.full_layer_token_bytes * config.cache.page_size // config.tp
    goodput_per_s, goodput_share = _goodput(config, regime) if seeks_goodput else (None, None)
    return Row(
        regime=regime.name,
        path=path,
        seed=seed,
        status="" if path == NO_HOST else _status(config, piece),
        piece_bytes=piece,
        rate_gbps=_rate_gbps(config, piece),
        ttft_s=summary["request/ttft_s_mean"],
        ttft_p95_s=summary["request/ttft_s_p95"],
        load_back_s=summary["request/load_back_s_mean"],
        tpot_s=summary["request/tpot_s_mean"],
        goodput_per_s=goodput_per_s,
        goodput_share=goodput_share,
        gpu_s=summary["gpu/seconds_per_request"],
        rho=summary["load/rho_gpu"],
        host_hit_tokens=int(summary["cache/host_hit_tokens"]),
        load_back_bytes=int(summary["transfer/load_back_bytes"]),
        verdict=", ".join(each.name for each in objections([summary])),
    )


def _goodput(config: ExperimentConfig, regime: Regime) -> tuple[float, float]:
    """The highest rate that the regime's crowd may come at, and its share of the crowd's own."""
    crowd = replace(
        config.workload,
        num_sessions=regime.crowd * config.workload.num_sessions,
        session_rate=regime.crowd * config.workload.session_rate,
    )
    ladder = climb(replace(config, workload=crowd, goodput=regime.objective))
    goodput = ladder.goodput(regime.objective.share)
    return goodput, goodput / float(ladder.rates[-1])


def _shared(config: ExperimentConfig) -> list[str]:
    """What all runs take over from the experiment's own config."""
    shared = ["storage=none", f"model={config.model.name}", f"hardware={config.hardware.name}"]
    if config.data_dir is not None:
        shared.append(f"data_dir={config.data_dir}")
    if config.workload.limit is not None:
        shared.append(f"workload.limit={config.workload.limit}")
    return [*shared, f"workload.num_sessions={config.workload.num_sessions}"]


def _status(config: ExperimentConfig, piece_bytes: int) -> str:
    curve = config.hardware.kernel_to_device
    # below its first point a curve has the same time a piece
    is_beyond = curve.status == "measured" and piece_bytes < curve.size[0]
    return f"{curve.status}, extrapolated" if is_beyond else curve.status


def _rate_gbps(config: ExperimentConfig, piece_bytes: int) -> float:
    return pcie_rate(config.hardware, piece_bytes, CopyPath(config.executor.copy_path)) / 1e9
