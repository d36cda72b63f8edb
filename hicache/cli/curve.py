"""The hit rate at every size of the cache, counted in one pass, without simulated time.

hicache curve model=llama3_8b workload=mooncake_conversation
hicache curve model=llama3_8b workload.path=mine.jsonl --gib 16,64,256 --figure mine.png

The requests come one after another, in order of arrival. The program counts the tokens that each
finds in the cache, for LRU and for Belady's optimum, which evicts what is needed last. The size is
that of the largest tier, which holds what smaller tiers hold, as the host does by default. The knee
is the smallest size with at least 95 % of LRU's highest hit rate.

A replay (hicache run) also counts what requests hold while they run. Models with sliding windows or
Mamba states divide their memory: see hicache size.
"""

import json
from argparse import ArgumentTypeError
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.console import console, show_numbers
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.experiment import workload_of
from hicache.knob import LEAST_FLOAT, MOST_FLOAT
from hicache.models import GIB
from hicache.runs.schema import config_of
from hicache.workload.reuse import Column, reuse

SIZES_GIB = (0.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
KNEE = 0.95
NUM_POINTS = 60  # sizes in the figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The token hit rates of a workload at each size of the cache.

    Attributes:
        lru: (GiB) returns the hit rate of LRU.
        belady: (GiB) returns the hit rate of Belady's optimum.
        full_gib: the size that holds all pages that are used again.
        knee_gib: the smallest size with at least 95 % of LRU's highest hit rate.
        description: the workload in words.
    """

    lru: Callable[[float], float]
    belady: Callable[[float], float]
    full_gib: float
    knee_gib: float
    description: str


def curve_of(config: ExperimentConfig) -> Curve:
    """Return the hit rates of full-attention KV in the workload of `config`.

    Requests that exceed the model's length limit do not count, nor does the warm-up.

    Raises:
        ValueError: no request counts.
    """
    deployment = deploy(config)
    page, most = config.cache.page_size, config.model.max_len
    workload = workload_of(config, deployment.cost, [])
    requests = [each for each in workload.requests if each.prompt_len + each.output_len <= most]
    warm_ns = config.workload.warm_up_s * SECOND_NS
    is_counted = np.array([each.arrival_ns >= warm_ns for each in requests])
    num_tokens = int(np.array([each.prompt_len for each in requests]) @ is_counted)
    if not num_tokens:
        raise ValueError("no request counts: all exceed the model's length or are in the warm-up")
    used, dropped = reuse(requests, page, config.overlap), config.draft_key == "drop_block"

    def rate(hits: Column) -> float:
        return int(np.maximum(hits - dropped, 0) @ is_counted) * page / num_tokens

    def lru(num_pages: int) -> float:
        return rate(used.lru(num_pages))

    full = used.full_pages
    page_bytes = deployment.host_kinds.page_bytes[0]
    return Curve(
        lru=lambda gib: lru(int(gib * GIB) // page_bytes),
        belady=lambda gib: rate(used.belady(int(gib * GIB) // page_bytes)),
        full_gib=full * page_bytes / GIB,
        knee_gib=bisect_left(range(full), KNEE * lru(full), key=lru) * page_bytes / GIB,
        description=workload.description,
    )


def draw(curve: Curve, sizes: Sequence[float], title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # takes half a second

    from hicache.results.figures import label_log_axis, save

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    least = min(filter(None, sizes), default=1.0) / 4
    places = np.geomspace(least, max(curve.full_gib, *sizes, 2 * least), NUM_POINTS).tolist()
    for name, rate, color in (("Belady", curve.belady, "#0072B2"), ("LRU", curve.lru, "#E69F00")):
        axes.plot(places, [rate(gib) for gib in places], color=color, label=name)
    axes.axvline(curve.knee_gib, color="#999999", ls=":", label=f"knee, {curve.knee_gib:,.0f} GiB")
    axes.set(xscale="log", xlabel="cache, GiB", ylabel="token hit rate", ylim=(0, None))
    label_log_axis(axes.xaxis, "{x:,g}")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache curve", __doc__)
    add = parser.add_argument
    add("overrides", nargs="*", help="settings, as for hicache run")
    add("--gib", type=numbers, default=SIZES_GIB, help="sizes of the cache in the table")
    add("--figure", type=Path, default=Path("curve.png"), help="where the figure is stored")
    add("--json", action="store_true", help="print an object, and draw no figure")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        config = config_of(*options.overrides)
        if deploy(config).host_kinds.aux:
            raise ValueError(
                f"hicache curve counts full attention only, and {config.model.name} also caches "
                "windows or states: use hicache size"
            )
        curve = curve_of(config)
        rows = [(gib, curve.lru(gib), curve.belady(gib)) for gib in options.gib]
        if options.json:
            sizes = [dict(zip(("gib", "lru", "belady"), row, strict=True)) for row in rows]
            ends = {"knee_gib": curve.knee_gib, "full_gib": curve.full_gib}
            print(json.dumps({"sizes": sizes, **ends}, indent=2))
            return
        terminal = console()
        terminal.print(f"{config.model.name}, {curve.description}")
        table = [[f"{gib:,g}", f"{lru:.3f}", f"{belady:.3f}"] for gib, lru, belady in rows]
        show_numbers(terminal, ("cache, GiB", "LRU", "Belady"), table)
        terminal.print(
            f"knee of LRU: {curve.knee_gib:,.0f} GiB; {curve.full_gib:,.0f} GiB hold all that is "
            f"used again (token hit rate {curve.lru(curve.full_gib):.3f})"
        )
        draw(curve, options.gib, f"{config.model.name}, {config.workload.kind}", options.figure)
        terminal.print(str(options.figure), soft_wrap=True)


def numbers(text: str) -> list[float]:
    found = [float(each) for each in text.split(",")]
    if not all(each == 0 or LEAST_FLOAT <= each <= MOST_FLOAT for each in found):
        raise ArgumentTypeError(f"a size is 0, or from {LEAST_FLOAT} to {MOST_FLOAT:g}: {text}")
    return found
