"""How much host memory a model and a workload can use.

hicache size model=qwen3_next_80b workload=mooncake_conversation
hicache size model=llama3_8b --gib 0,32,64,128,256 --dollars-per-gib 4
hicache size model=gemma3_27b --all

The program simulates `experiment=sizing` with your overrides at some sizes of the host cache. A
model with sliding windows or Mamba states divides the host cache: one share is for windows or
states, and the rest is for full-attention KV. The knee is the smallest size with nearly all of the
gain in hit rate: at least 95 % of the highest gain over no host cache. The program simulates the
smallest size, the largest, and sizes around the knee of full-attention KV (hicache curve) until it
has the knee. Then it searches the share with the most hits at the knee, at the next smaller size
and at the largest size, but for shares that cannot gain by that curve. With --all, it tries every
share at every size.

The time grows with the number of requests: workload.limit=5000 simulates the first 5,000 only.
"""

import json
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context

from hicache import experiment
from hicache.cache.kinds import KIND_NAMES, MAMBA, SWA
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.console import console, machines_of, show_numbers
from hicache.cli.curve import KNEE, SIZES_GIB, curve_of, numbers
from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.models import GIB
from hicache.models.shapes import LayerKind
from hicache.results.metrics import summarize
from hicache.results.speculation import measures_of
from hicache.results.verdict import is_overloaded
from hicache.runs.schema import config_of

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
LEAST_GAIN = 0.005  # smaller gains in hit rate do not count
JOBS = {
    "job completion mean, s": "jobs/completion_s_mean",
    "jobs in time per hour": "jobs/in_time_per_hour",
}
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
        evicts_aux: True if the host has evicted what the share is for. What is never evicted needs
            no larger fraction.
        speculation: the measures of speculation by name; empty without speculation.
        jobs: the measures of jobs by name; empty without jobs.
    """

    host_gib: float
    share: float | None
    hit_rate: float
    ttft_s: float | None
    evicts_aux: bool = True
    speculation: Mapping[str, float] = field(default_factory=dict)
    jobs: Mapping[str, float] = field(default_factory=dict)


Measure = Callable[[Sequence[tuple[float, float | None]]], list[Cell]]
Bound = Callable[[float, float | None], float]


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
        evicts_aux=kind is not None and summary[f"evict/host_{KIND_NAMES[kind]}_pages"] > 0,
        speculation=measures_of(summary),
        jobs={name: summary[key] for name, key in JOBS.items() if key in summary},
    )


def search(
    sizes: Sequence[float],
    shares: Sequence[float | None],
    measured: Measure,
    bound: Bound,
    *,
    every_cell: bool = False,
) -> list[Cell]:
    """Find the knee, and a good division of the host cache there, with few simulations.

    A division gives sliding-window pages or Mamba states one of the fractions in `shares`. The best
    division has the highest hit rate. The search starts with the third fraction (0.2 by default) at
    the smallest size, the largest, and the knee of `bound`. It goes on beside that size, and then
    halves the sizes between the knee and the next smaller size that was simulated, until they are
    neighbors. Then three sizes move to a neighboring fraction while their hit rate rises: the knee,
    the size before it, and the largest size. A fraction that cannot gain 0.5 % of the prompt tokens
    by `bound` is left out. The search goes on if the knee has moved.

    Args:
        sizes: sizes of the host cache in GiB, in rising order.
        shares: fractions to try, in rising order. `(None,)` means that nothing is divided.
        measured: simulates pairs of a size and a fraction, and returns their results.
        bound: returns the highest hit rate that a size and a fraction allow.
        every_cell: simulate all fractions at all sizes.

    Returns:
        The best result of each simulated size.
    """
    start, last = min(2, len(shares) - 1), len(sizes) - 1
    rates = [bound(size, shares[start]) for size in sizes]
    guess = bisect_left(rates, _threshold(rates))
    tried: dict[int, dict[int, Cell]] = {}  # by the places of the size and of the fraction
    new = {(size, start) for size in (0, guess, last)}
    if every_cell:
        new |= {(x, y) for x, size in enumerate(sizes) for y in range(len(shares)) if size}
    while new:
        order = sorted(new, key=lambda each: (-each[0], each[1]))  # large sizes take longest
        found = measured([(sizes[x], shares[y] if sizes[x] else None) for x, y in order])
        for (x, y), cell in zip(order, found, strict=True):
            tried.setdefault(x, {})[y] = cell
        best = {x: max(ys, key=lambda y: ys[y].hit_rate) for x, ys in sorted(tried.items())}
        cells = [tried[x][y] for x, y in best.items()]
        at = cells.index(knee_of(cells))
        knee, before = [*best][at], [*best][max(at - 1, 0)]
        if knee - before > 1:
            beside = {guess - 1, guess + 1}.intersection(range(before + 1, knee))
            new = {(beside.pop() if beside else (before + knee) // 2, best[knee])}
        else:
            # if more memory of all kinds hardly adds hits, another division does not either
            rises = cells[at].hit_rate - tried[before][best[before]].hit_rate >= LEAST_GAIN
            new = {
                (x, y)
                for x in {before if rises else knee, knee, last}
                for y in {best[x] - 1, best[x] + 1}.intersection(range(len(shares))) - {*tried[x]}
                if _most_gain(tried[x][best[x]], shares[y], bound) >= LEAST_GAIN
            }
    return cells


def _threshold(rates: Sequence[float]) -> float:
    return rates[0] + KNEE * (max(rates) - rates[0])


def _most_gain(cell: Cell, share: float | None, bound: Bound) -> float:
    # what another share may add to the hit rate: a smaller one at most the hits of the
    # full-attention KV that it adds; a larger one leaves less of it, which bounds all hits
    if cell.share is None or share is None or (share > cell.share and not cell.evicts_aux):
        return 0.0
    now = bound(cell.host_gib, cell.share)
    if cell.hit_rate > now:
        return 1.0  # the bound does not hold, as it counts requests that the engine has rejected
    return bound(cell.host_gib, share) - (cell.hit_rate if share > cell.share else now)


def knee_of(cells: Sequence[Cell]) -> Cell:
    """Return the result of the smallest host cache that gains nearly all possible cache hits.

    The gain is the rise in hit rate over the first result. The returned size reaches at least 95 %
    (`KNEE`) of the highest gain. `cells` are results sorted by size.
    """
    least = _threshold([cell.hit_rate for cell in cells])
    return next(cell for cell in cells if cell.hit_rate >= least)


def bound_of(config: ExperimentConfig) -> Bound:
    """Return a function that bounds the hit rate at a size of the host cache and a division of it.

    The hits of full-attention KV alone, without simulated time, are the bound. All engines together
    have one cache here: what their devices and hosts hold.
    """
    curve, deployment = curve_of(config), deploy(config)
    device_pages = deployment.device.full_pages or 0
    more_gib = device_pages * deployment.host_kinds.page_bytes[0] / GIB
    if config.storage.kind != "none":
        more_gib = curve.full_gib
    rate = curve.lru if config.cache.policy == "lru" else curve.belady

    @cache
    def bound(host_gib: float, share: float | None) -> float:
        return rate(config.parallel.num_engines * (more_gib + host_gib * (1 - (share or 0))))

    return bound


def find(config: ExperimentConfig, options: Namespace) -> list[Cell]:
    sizes = sorted({0.0, *options.gib})
    shares = options.shares if shared_kind(config) is not None else (None,)
    # joblib would start a process for each core, also for three runs
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        return search(
            sizes,
            shares,
            lambda places: list(pool.map(partial(measure, config), places)),
            bound_of(config),
            every_cell=options.all,
        )


def show(config: ExperimentConfig, cells: Sequence[Cell], dollars_per_gib: float | None) -> None:
    kind, knee, terminal = shared_kind(config), knee_of(cells), console()
    workload = config.workload
    some = f", its first {workload.limit:,} requests" if workload.limit else ""
    terminal.print(f"{config.model.name} on {machines_of(config)}, workload {workload.kind}{some}")
    if config.parallel.prefill:
        both = config.parallel.decode_cache == "tiers" and config.parallel.sparse_tokens is None
        each = "engine" if both and not config.parallel.decode_own else "prefill engine"
        terminal.print(f"host memory is that of each {each}, hits are those of prefill engines")
    elif config.parallel.replicas > 1:
        terminal.print("each engine has a host of its own")
    gain = max(cell.hit_rate for cell in cells) - cells[0].hit_rate
    still_rises = knee is cells[-1] and gain >= LEAST_GAIN
    rows = [_row(cell, kind, dollars_per_gib) for cell in cells]
    marks = ["← knee" if cell is knee and not still_rises else "" for cell in cells]
    table = [[*row.values(), mark] for row, mark in zip(rows, marks, strict=True)]
    show_numbers(terminal, [*rows[0], ""], table)
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
    if any(cell.ttft_s is None for cell in cells):
        terminal.print(
            "–: the engine is overloaded at this size, so TTFT grows until the trace ends: set "
            "workload.load below 1, or give it more device memory (cache.device_gib)"
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
        name.replace("_", " "): f"{round(count, 2):,}"
        for name, count in {**cell.speculation, **cell.jobs}.items()
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
