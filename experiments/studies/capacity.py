"""The token hit rate that a workload gives at every capacity, without simulating time.

python -m experiments.studies.capacity
python -m experiments.studies.capacity model=qwen3_next_80b cache.checkpoints=every

One pass over the requests (`hicache.workload.oracle`) gives LRU's curve; for a model of full
attention alone, Belady's MIN bounds it from above at the capacities of the table. The curve is that
of one tier: what a hierarchy of tiers could hit if the largest of them had this size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from experiments.studies.command import run_study
from hicache.cache.tiers.capacity import page_bytes
from hicache.cache.tree.node import FULL, MAMBA, SWA
from hicache.cli.console import console
from hicache.cli.tables.sweep_figure import COLOURS
from hicache.config import CHECKPOINT_PLACEMENTS, ExperimentConfig
from hicache.models import GIB
from hicache.results.report import save
from hicache.results.tracking import write_json
from hicache.workload.build import load_workload
from hicache.workload.oracle import (
    CheckpointRule,
    Curve,
    Visits,
    infinite,
    lru_curve,
    min_hits,
    visits_of,
)

CAPACITIES_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Mooncake (FAST'25): the conversation trace's share of prompt tokens that a cache without limit
# hits, and of that maximum the shares it says 3 M and 50 M tokens reach ("under half", "near")
PUBLISHED_MAXIMUM = 0.40
PUBLISHED_TOKENS = (3_000_000, 50_000_000)
PUBLISHED_LABEL = "published: under half of the maximum\nat 3 M tokens, near it at 50 M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Curves of one workload and model. `token_bytes`: of full KV alone."""

    curve: Curve
    bound: float
    bounds: Sequence[float | None]  # MIN's at CAPACITIES_GIB
    token_bytes: float


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Draw the curve of the workload, model and checkpoint placement that `config` names."""
    workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    page = config.cache.page_size
    visits = visits_of(workload.requests, page)
    sizes = page_bytes(config.model, page, 1)
    found = measure(visits, sizes, placement(config, sizes))
    title = f"{workload.name}, {config.model.name}"
    if found.bounds[0] is None:
        title += f", checkpoints {config.cache.checkpoints}"
    write_json(out_dir / "summary.json", summarize(found, visits))
    draw(found, title, out_dir / "capacity.png", config.workload.kind)
    console().print(f"{workload.description}\n{title}", soft_wrap=True)
    console().print(table(found))


def placement(config: ExperimentConfig, sizes: Sequence[int]) -> CheckpointRule | None:
    """Where the model's prefixes may be continued; None: anywhere."""
    if not sizes[SWA] and not sizes[MAMBA]:
        return None
    cache = config.cache
    # a window is kept where a state is, or where a request ended
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
    """LRU's curve, and what bounds it."""
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
    """Flat keys, as a replay's summary has."""
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
    """The curve at a few capacities."""
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


def draw(found: Findings, title: str, path: Path, kind: str) -> None:
    """The curve, its bounds, and the published figures where there are any."""
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(7.2, 4.9), layout="constrained")
    axes = figure.subplots()
    grid = np.geomspace(CAPACITIES_GIB[0] / 4, CAPACITIES_GIB[-1] * 2, 400)
    rates = [found.curve.hit_rate(gib * GIB) for gib in grid]
    axes.plot(grid, rates, color=COLOURS[0], lw=1.8, label="LRU, one pass")
    if found.bounds[0] is not None:
        bounds = [float(bound) for bound in found.bounds if bound is not None]
        axes.plot(CAPACITIES_GIB, bounds, "o-", color=COLOURS[1], lw=1.2, label="MIN (a bound)")
    axes.axhline(found.bound, color="#777777", lw=1, ls="--", label="no limit, any model")
    if kind == "mooncake_conversation":
        axes.axhline(PUBLISHED_MAXIMUM, color=COLOURS[5], lw=1, ls=":", label="published maximum")
        for tokens in PUBLISHED_TOKENS:
            place = tokens * found.token_bytes / GIB
            label = PUBLISHED_LABEL if tokens == PUBLISHED_TOKENS[0] else None
            axes.axvline(place, color=COLOURS[3], lw=1, ls="-.", label=label)
            axes.annotate(
                f"{tokens // 1_000_000} M tokens",
                (place, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize="small",
                color=COLOURS[3],
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(CAPACITIES_GIB, [f"{gib:,}" for gib in CAPACITIES_GIB])
    axes.minorticks_off()
    axes.set_xlabel("capacity (GiB)")
    axes.set_ylabel("token hit rate")
    axes.set_ylim(0, None)
    axes.set_title(title, loc="left", pad=18)  # above the names of the upright lines
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", lw=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    save(figure, path)


if __name__ == "__main__":
    run_study("capacity", carry_out)
