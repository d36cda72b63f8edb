"""How much host memory a model and a workload can use.

hicache size model=qwen3_next_80b workload=mooncake_conversation
hicache size model=llama3_8b --gib 0,32,64,128,256 --dollars-per-gib 4
hicache size model=gemma3_27b --all

The program simulates `experiment=sizing` with your overrides at each size of the host cache. A
model with sliding windows or Mamba states divides the host cache: one share is for windows or
states, and the rest is for full-attention KV. The knee is the smallest size with nearly all of the
gain in hit rate: at least 95 % of the highest gain over no host cache. The program searches the
share with the most hits at the knee, at the next smaller size and at the largest size. At other
sizes, it tries 0.2, and the share of the knee if hits rise there. With --all, it tries every share
at every size.

The time grows with the number of requests: workload.limit=5000 simulates the first 5,000 only.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

from rich import box
from rich.table import Table

from hicache import experiment
from hicache.cache.kinds import KIND_NAMES, MAMBA, SWA
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.console import console, show_table
from hicache.cli.curve import KNEE, SIZES_GIB, numbers
from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.models.shapes import LayerKind
from hicache.results.metrics import summarize
from hicache.results.speculation import measures_of
from hicache.results.verdict import is_overloaded
from hicache.runs.schema import config_of

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
LEAST_GAIN = 0.005  # smaller gains in hit rate do not count
WORDS = {SWA: "windows", MAMBA: "states"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The simulated results for one size of the host cache and one division of that memory.

    Attributes:
        host_gib: the size of the host cache in GiB.
        share: the fraction of the host cache for sliding-window pages or Mamba states. None if the
            model has only full-attention KV, or if the host cache is empty.
        hit_rate: prompt tokens found in the KV cache, as a fraction of all prompt tokens.
        ttft_s: the mean time to first token in seconds. None if the GPUs were overloaded.
        speculation: the measures of speculation by name; empty without speculation.
    """

    host_gib: float
    share: float | None
    hit_rate: float
    ttft_s: float | None
    speculation: Mapping[str, float] = field(default_factory=dict)


Measure = Callable[[Sequence[tuple[float, float | None]]], list[Cell]]


def shared_kind(config: ExperimentConfig) -> int | None:
    # the kind whose share of the host varies: states rather than windows; None if nothing is shared
    # out, because there is one kind or all kinds take from the same bytes
    if config.cache.pools != "split":
        return None
    return next((kind for kind in (MAMBA, SWA) if kind in deploy(config).kinds.numbers), None)


def measure(config: ExperimentConfig, place: tuple[float, float | None]) -> Cell:
    host_gib, share = place
    kind = shared_kind(config)
    host = config.cache.host
    if kind is not None and share is not None:
        host = replace(host, share={**host.share, KIND_NAMES[kind]: share})
    cache = replace(config.cache, host_gib=host_gib, host=host)
    result = experiment.run(replace(config, cache=cache))
    summary = summarize(result.records, result.measures)
    return Cell(
        host_gib=host_gib,
        share=share,
        hit_rate=summary["cache/token_hit_rate"],
        ttft_s=None if is_overloaded(summary) else summary["request/ttft_s_mean"],
        speculation=measures_of(summary),
    )


def search(
    sizes: Sequence[float],
    shares: Sequence[float | None],
    measured: Measure,
    *,
    every_share: bool = False,
) -> list[Cell]:
    """Find a good division of the host cache for each size, and the best one where it matters.

    It matters for the knee, the size from which on more memory gains little.

    A division gives sliding-window pages or Mamba states one of the fractions in `shares`. The best
    division has the highest hit rate. At first, each size is simulated with the third fraction (0.2
    by default). Then three sizes move to a neighboring fraction while their hit rate rises: the
    largest size, the knee, and the size before the knee. At last, each other size is simulated with
    the best fraction of the knee. All these searches leave out sizes at which hits hardly rise with
    size: if more memory for all kinds does not help, another division does not either.

    Args:
        sizes: sizes of the host cache in GiB, in rising order.
        shares: fractions to try, in rising order. `(None,)` means that nothing is divided.
        measured: simulates pairs of a size and a fraction, and returns their results.
        every_share: simulate all fractions at all sizes.

    Returns:
        The best result of each size.
    """
    start, places = min(2, len(shares) - 1), range(len(shares))
    new = [
        (size, place)
        for size in sizes
        for place in places
        if place == start or (every_share and size)
    ]
    tried: dict[float, dict[int, Cell]] = {size: {} for size in sizes}
    best = dict.fromkeys(sizes, start)
    while True:
        new.sort(key=lambda each: -each[0])  # the largest sizes take longest
        cells = measured([(size, shares[place] if size else None) for size, place in new])
        for (size, place), cell in zip(new, cells, strict=True):
            tried[size][place] = cell
        for size, found in tried.items():
            best[size] = max(found, key=lambda place: found[place].hit_rate)
        cells = [tried[size][place] for size, place in best.items()]
        knee = cells.index(knee_of(cells))
        rises = [after.hit_rate - cell.hit_rate for cell, after in pairwise(cells)]
        rises.append(rises[-1] if rises else LEAST_GAIN)  # nothing larger was simulated
        rising = [size for size, rise in zip(sizes, rises, strict=True) if rise >= LEAST_GAIN]
        new = [
            (size, place)
            for size in {sizes[max(knee - 1, 0)], sizes[knee], sizes[-1]}.intersection(rising)
            for place in (best[size] - 1, best[size] + 1)
            if size and place in places and place not in tried[size]
        ]
        if not new:  # the other sizes try the best division of the knee
            division = best[sizes[knee]]
            new = [(size, division) for size in rising if size and division not in tried[size]]
        if not new:
            return cells


def knee_of(cells: Sequence[Cell]) -> Cell:
    """Return the result of the smallest host cache that gains nearly all possible cache hits.

    The gain is the rise in hit rate over the first result. The returned size reaches at least 95 %
    (`KNEE`) of the highest gain. `cells` are results sorted by size.
    """
    first, highest = cells[0].hit_rate, max(cell.hit_rate for cell in cells)
    return next(cell for cell in cells if cell.hit_rate >= first + KNEE * (highest - first))


def find(config: ExperimentConfig, options: Namespace) -> list[Cell]:
    sizes = sorted({0.0, *options.gib})
    shares = options.shares if shared_kind(config) is not None else (None,)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        return search(
            sizes,
            shares,
            lambda places: list(pool.map(partial(measure, config), places)),
            every_share=options.all,
        )


def show(config: ExperimentConfig, cells: Sequence[Cell], dollars_per_gib: float | None) -> None:
    kind, knee, terminal = shared_kind(config), knee_of(cells), console()
    workload = config.workload
    some = f", its first {workload.limit:,} requests" if workload.limit else ""
    engines = config.parallel.replicas
    each = f"{engines} engines, each with its own host, on" if engines > 1 else "on"
    terminal.print(
        f"{config.model.name} {each} {config.tp} x {config.hardware.name}, workload "
        f"{workload.kind}{some}"
    )
    gain = max(cell.hit_rate for cell in cells) - cells[0].hit_rate
    still_rises = knee is cells[-1] and gain >= LEAST_GAIN
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    rows = [_row(cell, kind, dollars_per_gib) for cell in cells]
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    table.add_column("")
    for cell, row in zip(cells, rows, strict=True):
        table.add_row(*row.values(), "← knee" if cell is knee and not still_rises else "")
    show_table(terminal, table, wraps=True)
    if kind is not None:
        kinds = deploy(config).kinds
        sizes = [size / kinds.units[each] for each, size in enumerate(kinds.page_bytes)]
        what = "state" if kind == MAMBA else "token of windows"
        terminal.print(
            f"one {what} takes {sizes[kind] / 2**10:,.0f} KiB, as much as the full KV of "
            f"{sizes[kind] / sizes[0]:,.1f} tokens ({sizes[0] / 2**10:,.1f} KiB each)"
        )
    copies = config.model.kv_copies(LayerKind.full, config.tp)
    if copies > 1:
        terminal.print(
            f"its {config.tp} devices hold {copies} copies of the KV, which is not divided further "
            "(parallel.tp)"
        )
    if gain < LEAST_GAIN:
        terminal.print(
            f"the host adds {gain:.2%} of the prompt tokens to the hits: no size pays off"
        )
    elif still_rises:
        terminal.print(
            f"no knee: hits still rise at {knee.host_gib:g} GiB; try larger sizes with --gib "
            "(`hicache run cache.unlimited=true` shows the most there are)"
        )
    if all(cell.ttft_s is None for cell in cells):
        terminal.print(
            "–: the engine is overloaded at every size: set workload.load below 1, or give it more "
            "device memory (cache.device_gib)"
        )
    elif any(cell.ttft_s is None for cell in cells):
        terminal.print(
            "–: the engine is overloaded at this size, so TTFT grows until the trace ends"
        )


def _row(cell: Cell, kind: int | None, dollars_per_gib: float | None) -> dict[str, str]:
    row = {"host, GiB": f"{cell.host_gib:,.0f}"}
    if kind is not None:
        share = cell.share or 0.0
        row[f"for {WORDS[kind]}"] = f"{share:.0%}"
        row[f"{WORDS[kind]}, GiB"] = f"{share * cell.host_gib:,.0f}"
        row["KV, GiB"] = f"{(1 - share) * cell.host_gib:,.0f}"
    row["token hit rate"] = f"{cell.hit_rate:.3f}"
    row["TTFT mean, s"] = "–" if cell.ttft_s is None else f"{cell.ttft_s:.3g}"
    row |= {
        name.replace("_", " "): f"{round(count, 2):,}" for name, count in cell.speculation.items()
    }
    if dollars_per_gib is not None:
        row["dollars"] = f"{cell.host_gib * dollars_per_gib:,.0f}"
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache size", __doc__)
    add = parser.add_argument
    add("overrides", nargs="*", help="settings, as for hicache run")
    add("--gib", type=numbers, default=SIZES_GIB, help="sizes of the host tier")
    add("--shares", type=numbers, default=SHARES, help="shares of the host for windows or states")
    add("--all", action="store_true", help="try every share at every size")
    add("--dollars-per-gib", type=float, help="price of host memory")
    add("--workers", type=int, help="parallel runs; by default one per core")
    add("--json", action="store_true", help="print a list of objects")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        config = config_of("experiment=sizing", *options.overrides)
        if config.cache.unlimited:
            raise ValueError("cache.unlimited=true has no size to find: leave it out")
        cells = find(config, options)
        if options.json:
            print(json.dumps([asdict(cell) for cell in cells], indent=2))
        else:
            show(config, cells, options.dollars_per_gib)
