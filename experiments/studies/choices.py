"""What each choice of the simulation changes: the same run with it and without it.

python -m experiments.studies.choices --out choices.md   (some minutes; figures in docs/validity.md)

A choice that no knob turns off is turned off by putting something simpler in its place here.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from experiments.launch.schema import config_of
from hicache import experiment
from hicache.executor.simulated.cost import CostModel
from hicache.results.metrics import summarize
from hicache.results.verdict import in_short, objections

BASE = (
    "workload=mooncake_conversation model=llama3_8b parallel.tp=4 "
    "cache.device_gib=16 cache.host_gib=64"
)
HIT, TTFT, TPOT = "cache/token_hit_rate", "request/ttft_s_mean", "request/tpot_s_mean"
GPU, STALL = "gpu/prefill_seconds_per_request", "request/load_back_s_mean"
WARM = "workload.start=warm_storage"
REPLICAS = "parallel.replicas=4 parallel.tp=1 cache.device_gib=16 cache.host_gib=16"
BEST_RATES = (
    "hardware.gemm_bf16.size=[1] hardware.gemm_bf16.rate=[740e12] "
    "hardware.attention_d128.size=[1] hardware.attention_d128.rate=[631e12]"
)
Patch = Callable[[], AbstractContextManager[object]]


class Run(NamedTuple):
    """One of the two: what a table says of it, and its overrides."""

    says: str
    overrides: str = ""
    patch: Patch = nullcontext  # in force while it runs


class Choice(NamedTuple):
    """Something the simulation does, and a number that shows what it does."""

    name: str
    metric: str
    both: str  # overrides
    with_it: Run
    without: Run


def _loads_first() -> AbstractContextManager[object]:
    # every byte before the first layer: computing and loading one after the other
    inside = CostModel.layer_bytes

    def at_once(
        self: CostModel, num_full: int, num_swa: int, num_states: int
    ) -> NDArray[np.float64]:
        layers = inside(self, num_full, num_swa, num_states)
        total = np.zeros_like(layers)
        total[0] = layers.sum()
        return total

    return mock.patch.object(CostModel, "layer_bytes", at_once)


def _free_writes(stop: str) -> Choice:
    return Choice(
        f"writes take time on the link: {stop}",
        TTFT,
        f"storage.read_gbps=1 storage.shared_gbps=3 prefetch.stop={stop}",
        Run("writes at 2 GB/s, reads beside them"),
        Run("writes free and instant", "storage.write_gbps=1e6 storage.shared_gbps=null"),
    )


def _slow_copies(says: str, factor: float) -> Choice:
    return Choice(
        f"copies slow computing down: {says}",
        TPOT,
        "cache.page_size=16 executor.copy_path=copy_engine",
        Run("steps beside copies are slower", f"hardware.copy_slowdown.value={factor}"),
        Run("they are not", "hardware.copy_slowdown.value=1"),
    )


CHOICES = (
    Choice(
        "load as a ratio",
        TTFT,
        "parallel.tp=1",
        Run("60 % of the GPU, by sampling sessions", "workload.load=0.6"),
        Run("the trace's own rate, on one GPU"),
    ),
    Choice(
        "sessions sampled, time not stretched",
        HIT,
        "storage=none",
        Run("sessions sampled", "workload.load=0.3"),
        Run("time stretched to the same load", "workload.time_scale=2.3"),
    ),
    Choice(
        "tokens reconstructed",
        HIT,
        "model=qwen3_next_80b parallel.tp=null cache.unlimited=true",
        Run("reconstructed"),
        Run("literal", "workload.tokens=literal"),
    ),
    Choice(
        "causal arrivals",
        HIT,
        "parallel.tp=1",
        Run("after the parent's answer"),
        Run("whenever the trace says", "workload.arrivals=open"),
    ),
    Choice(
        "the trace's own arrivals",
        TTFT,
        "",
        Run("causal"),
        Run("32 sessions at once", "workload.arrivals=closed workload.concurrency=32"),
    ),
    Choice(
        "start state",
        HIT,
        WARM,
        Run("storage warm"),
        Run("cold", "workload.start=cold"),
    ),
    Choice(
        "a warm-up is not counted",
        HIT,
        "",
        Run("counted from the 90th second on", "workload.warm_up_s=90"),
        Run("from the first request on"),
    ),
    Choice(
        "weights are read once a step",
        TPOT,
        "",
        Run("at the profile's bandwidth"),
        Run("for nothing", "hardware.weight_bandwidth.value=1e30"),
    ),
    Choice(
        "rates depend on sizes",
        TTFT,
        "",
        Run("the profile's tables"),
        Run("their best rates at every size", BEST_RATES),
    ),
    Choice(
        "rates of experts depend on their tokens",
        TTFT,
        "model=qwen3_next_80b",
        Run("the profile's table"),
        Run("its best rate", "hardware.moe_narrow.size=[1] hardware.moe_narrow.rate=[245e12]"),
    ),
    Choice(
        "devices wait for each other",
        TPOT,
        "",
        Run("all-reduces at 4 devices"),
        Run("none", "hardware.all_reduce_s.value=0 hardware.link_bandwidth.value=1e30"),
    ),
    Choice(
        "prefill stalls decode",
        TPOT,
        "",
        Run("prefill_first"),
        Run("mixed", "scheduler.batching=mixed"),
    ),
    Choice(
        "states at branches",
        HIT,
        "model=qwen3_next_80b parallel.tp=null cache.unlimited=true",
        Run("at ends and branches", "cache.checkpoints=end_branch"),
        Run("at ends", "cache.checkpoints=end"),
    ),
    Choice(
        "load-back layer by layer",
        STALL,
        f"{WARM} storage.read_gbps=16",
        Run("each layer waits for its own bytes"),
        Run("all bytes before the first layer", patch=_loads_first),
    ),
    _slow_copies("the profile's 5 %", 1.05),
    _slow_copies("the worst case, 2.8 times", 2.8),
    Choice(
        "PCIe rate by piece size and copy path",
        STALL,
        f"{WARM} storage.read_gbps=16 cache.page_size=16",
        Run("copy engine, 16-token pages", "executor.copy_path=copy_engine"),
        Run("kernel, 16-token pages"),
    ),
    Choice(
        "links are shared",
        TTFT,
        f"{WARM} storage.read_gbps=2 prefetch.stop=wait_complete",
        Run("8 readers share the link", "storage.read_workers=8"),
        Run("one after the other", "storage.read_workers=1"),
    ),
    Choice(
        "storage takes time to answer",
        TTFT,
        f"{WARM} prefetch.stop=wait_complete cache.page_size=16",
        Run(
            "5 ms a query, 2 ms a batch of 128 pages",
            "storage.query_s=0.005 storage.operation_s=0.002",
        ),
        Run("at once", "storage.query_s=0 storage.operation_s=0"),
    ),
    Choice(
        "batches are not pre-empted",
        HIT,
        f"{WARM} storage.read_gbps=2 prefetch.stop=best_effort",
        Run("128 pages a batch", "storage.batch_pages=128"),
        Run("a page a batch", "storage.batch_pages=1"),
    ),
    _free_writes("wait_complete"),
    _free_writes("best_effort"),
    Choice(
        "a bounded write queue",
        HIT,
        "storage.write_gbps=0.5",
        Run("4 GiB, what comes above is dropped"),
        Run("no bound: writes pin the host", "storage.write_queue_gib=100000"),
    ),
    Choice(
        "finite storage",
        HIT,
        "storage.write_gbps=8",
        Run("128 GiB", "storage.capacity_gib=128"),
        Run("never full"),
    ),
    Choice(
        "replicas have tiers of their own",
        HIT,
        "workload.time_scale=3 storage=none",  # so that no engine is overloaded
        Run("four engines, a quarter of the room each", f"{REPLICAS} parallel.router=round_robin"),
        Run("one engine, all of it", "cache.device_gib=64 cache.host_gib=64"),
    ),
    Choice(
        "routers",
        HIT,
        f"{REPLICAS} storage=none",
        Run("sticky sessions"),
        Run("round robin", "parallel.router=round_robin"),
    ),
    Choice(
        "storage shared by replicas",
        HIT,
        f"{REPLICAS} parallel.router=round_robin",
        Run("shared"),
        Run("none", "storage=none"),
    ),
    Choice(
        "GPU-seconds beside TTFT: the one",
        TTFT,
        f"{WARM} storage.read_gbps=2",
        Run("wait_complete", "prefetch.stop=wait_complete"),
        Run("best_effort", "prefetch.stop=best_effort"),
    ),
    Choice(
        "GPU-seconds beside TTFT: the other",
        GPU,
        f"{WARM} storage.read_gbps=2",
        Run("wait_complete", "prefetch.stop=wait_complete"),
        Run("best_effort", "prefetch.stop=best_effort"),
    ),
    Choice(
        "decode steps taken at once (must change nothing)",
        TTFT,
        "",
        Run("up to 64"),
        Run("one by one", "engine.jump=false"),
    ),
)


def main() -> None:
    """Run every choice both ways and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=600, help="requests of the trace")
    parser.add_argument("--only", help="choices whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    headings = ("choice", "metric", "with it", "without it", "change", "verdict")
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for choice in CHOICES:
        if options.only is not None and options.only not in choice.name:
            continue
        summaries = [
            measure(choice, run, options.limit) for run in (choice.with_it, choice.without)
        ]
        with_it, without = (summary[choice.metric] for summary in summaries)
        change = f"{without / with_it - 1:+.1%}" if with_it else f"{without:+.3g}"
        verdict = in_short(objections(summaries))
        lines.append(
            f"| {choice.name} | `{choice.metric}` | {with_it:.4g} ({choice.with_it.says}) "
            f"| {without:.4g} ({choice.without.says}) | {change} | {verdict} |"
        )
        print(lines[-1])
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def measure(choice: Choice, run: Run, limit: int) -> dict[str, float | int]:
    """The summary of one of the choice's runs."""
    overrides = f"{BASE} workload.limit={limit} {choice.both} {run.overrides}".split()
    config = config_of(*overrides)
    with run.patch():
        result = experiment.run(config)
    return summarize(result.records, result.measures)


if __name__ == "__main__":
    main()
