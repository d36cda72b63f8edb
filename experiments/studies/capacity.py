"""The token hit rate that a workload gives at every cache capacity, without simulating time.

python -m experiments.studies.capacity
python -m experiments.studies.capacity model=qwen3_next_80b cache.checkpoints=every

One pass over the requests gives the hit rate of LRU as a function of capacity. For a model with
full attention only, Belady's MIN gives an upper bound at the capacities of the table. The cache has
one tier: its hit rate is that of a hierarchy whose largest tier has this capacity.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich import box
from rich.table import Table

from hicache.cache.kinds import FULL, MAMBA, SWA, model_kinds
from hicache.cli.command import in_one_sentence
from hicache.cli.console import console
from hicache.cli.schema import config_of
from hicache.config import CHECKPOINT_PLACEMENTS, ExperimentConfig
from hicache.models import GIB
from hicache.results.tracking import write_json
from hicache.workload.oracle import (
    CheckpointRule,
    Curve,
    Visits,
    infinite,
    lru_curve,
    min_hits,
    visits_of,
)
from hicache.workload.workload import load_workload

CAPACITIES_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Mooncake (FAST'25): 3 M tokens hit under half of the maximum, 50 M nearly all of it
PUBLISHED_TOKENS = (3_000_000, 50_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    curve: Curve
    bound: float
    bounds: Sequence[float | None]  # MIN's at CAPACITIES_GIB
    token_bytes: float


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    page = config.cache.page_size
    visits = visits_of(workload.requests, page)
    sizes = model_kinds(config.model, page, 1).page_bytes
    found = measure(visits, sizes, placement(config, sizes))
    title = f"{workload.name}, {config.model.name}"
    if found.bounds[0] is None:
        title += f", checkpoints {config.cache.checkpoints}"
    write_json(out_dir / "summary.json", summarize(found, visits))
    console().print(f"{workload.description}\n{title}", soft_wrap=True)
    console().print(table(found))


def placement(config: ExperimentConfig, sizes: Sequence[int]) -> CheckpointRule | None:
    if not sizes[SWA] and not sizes[MAMBA]:
        return None
    cache = config.cache
    # a window is kept at states and at ends of requests
    window_pages = -(-config.model.window_len // cache.page_size)
    if cache.checkpoints not in CHECKPOINT_PLACEMENTS:
        raise ValueError(
            f"experiments.studies.capacity needs cache.checkpoints to be one of "
            f"{', '.join(CHECKPOINT_PLACEMENTS)}, got {cache.checkpoints}"
        )
    every = cache.checkpoints == "every"
    return CheckpointRule(
        num_bytes=sizes[MAMBA] + window_pages * sizes[SWA],
        branch=cache.checkpoints != "end",
        every=cache.checkpoint_tokens // cache.page_size if every else 0,
    )


def measure(visits: Visits, sizes: Sequence[int], checkpoints: CheckpointRule | None) -> Findings:
    bounds: list[float | None] = [None] * len(CAPACITIES_GIB)
    if checkpoints is None:
        bounds = [
            min_hits(visits, int(gib * GIB) // sizes[FULL]) / visits.prompt_tokens
            for gib in CAPACITIES_GIB
        ]
    return Findings(
        curve=lru_curve(visits, page_bytes=sizes[FULL], checkpoints=checkpoints),
        bound=infinite(visits) / visits.prompt_tokens,
        bounds=bounds,
        token_bytes=sizes[FULL] / visits.page_size,
    )


def summarize(found: Findings, visits: Visits) -> dict[str, float | int]:
    summary: dict[str, float | int] = {
        "request/count": len(visits.visits),
        "workload/prompt_tokens": visits.prompt_tokens,
        "oracle/infinite_token_hit_rate": found.bound,
        "oracle/lru_maximum_token_hit_rate": found.curve.maximum,
    }
    for gib, bound in zip(CAPACITIES_GIB, found.bounds, strict=True):
        summary[f"oracle/lru_{gib}_gib_token_hit_rate"] = found.curve.hit_rate(gib * GIB)
        if bound is not None:
            summary[f"oracle/min_{gib}_gib_token_hit_rate"] = bound
    for tokens in PUBLISHED_TOKENS:
        rate = found.curve.hit_rate(tokens * found.token_bytes)
        summary[f"oracle/lru_{tokens // 1_000_000}_m_tokens_token_hit_rate"] = rate
    return summary


def table(found: Findings) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("capacity", justify="right")
    made.add_column("tokens of full KV", justify="right")
    made.add_column("LRU", justify="right")
    if found.bounds[0] is not None:
        made.add_column("MIN", justify="right")
    for gib, bound in zip(CAPACITIES_GIB, found.bounds, strict=True):
        cells = [f"{gib:,} GiB", f"{gib * GIB / found.token_bytes / 1e6:,.2f} M"]
        cells.append(f"{found.curve.hit_rate(gib * GIB):.3f}")
        made.add_row(*cells, *([] if bound is None else [f"{bound:.3f}"]))
    made.add_row("no limit", "", f"{found.curve.maximum:.3f}")
    made.add_row("no limit, any model", "", f"{found.bound:.3f}")
    return made


if __name__ == "__main__":
    with in_one_sentence():
        config = config_of("experiment=capacity", *sys.argv[1:])
        out_dir = Path("outputs", config.name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
        out_dir.mkdir(parents=True)
        carry_out(config, out_dir)
    print(out_dir)
