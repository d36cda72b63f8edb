"""What each choice of the simulation changes: the same run with it and without it.

python -m experiments.choices --out choices.md          (some minutes; figures in docs/validity.md)

A choice that no knob turns off is turned off by putting something simpler in its place here.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray

from experiments import schema
from hicache import experiment
from hicache.executor.cost import CostModel
from hicache.metrics import summarize

CONF = Path(__file__).resolve().parents[1] / "conf"
BASE = (
    "workload=mooncake_conversation",
    "model=llama3_8b",
    "parallel.tp=4",
    "cache.device_gib=16",
    "cache.host_gib=64",
)
HIT, TTFT, TPOT = "cache/token_hit_rate", "request/ttft_s_mean", "request/tpot_s_mean"
GPU, STALL = "gpu/seconds_per_request", "request/load_back_s_mean"
Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Something the simulation does, how to do without, and a number that shows it."""

    name: str
    metric: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    on_says: str
    off_says: str
    patch: Patch = nullcontext  # in force without it


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


CHOICES = (
    Choice(
        name="tokens reconstructed",
        metric=HIT,
        both=("model=qwen3_next_80b", "parallel.tp=null", "cache.unlimited=true"),
        off=("workload.tokens=literal",),
        on_says="reconstructed",
        off_says="literal",
    ),
    Choice(
        name="load as a ratio",
        metric=TTFT,
        both=("parallel.tp=1",),
        on=("workload.load=0.6",),
        on_says="60 % of the GPU, by sampling sessions",
        off_says="the trace's own rate, on one GPU",
    ),
    Choice(
        name="sessions sampled, time not stretched",
        metric=HIT,
        both=("storage=none",),
        on=("workload.load=0.3",),
        off=("workload.time_scale=2.3",),
        on_says="sessions sampled",
        off_says="time stretched to the same load",
    ),
    Choice(
        name="causal arrivals",
        metric=HIT,
        both=("parallel.tp=1",),
        off=("workload.arrivals=open",),
        on_says="after the parent's answer",
        off_says="whenever the trace says",
    ),
    Choice(
        name="prefill stalls decode",
        metric=TPOT,
        off=("scheduler.batching=mixed",),
        on_says="prefill_first",
        off_says="mixed",
    ),
    Choice(
        name="writes take time on the link: wait_complete",
        metric=TTFT,
        both=("storage.read_gbps=1", "storage.shared_gbps=3", "prefetch.stop=wait_complete"),
        off=("storage.write_gbps=1e6", "storage.shared_gbps=null"),
        on_says="writes at 2 GB/s, reads beside them",
        off_says="writes free and instant",
    ),
    Choice(
        name="writes take time on the link: best_effort",
        metric=TTFT,
        both=("storage.read_gbps=1", "storage.shared_gbps=3", "prefetch.stop=best_effort"),
        off=("storage.write_gbps=1e6", "storage.shared_gbps=null"),
        on_says="writes at 2 GB/s, reads beside them",
        off_says="writes free and instant",
    ),
    Choice(
        name="a bounded write queue",
        metric=HIT,
        both=("storage.write_gbps=0.5",),
        off=("storage.write_queue_gib=100000",),
        on_says="4 GiB, what comes above is dropped",
        off_says="no bound: writes pin the host",
    ),
    Choice(
        name="finite storage",
        metric=HIT,
        both=("storage.write_gbps=8",),
        on=("storage.capacity_gib=128",),
        on_says="128 GiB",
        off_says="never full",
    ),
    Choice(
        name="load-back layer by layer",
        metric=STALL,
        both=("workload.start=warm_storage", "storage.read_gbps=16"),
        on_says="each layer waits for its own bytes",
        off_says="all bytes before the first layer",
        patch=_loads_first,
    ),
    Choice(
        name="PCIe rate by piece size and copy path",
        metric=STALL,
        both=("workload.start=warm_storage", "storage.read_gbps=16", "cache.page_size=16"),
        on=("executor.copy_path=copy_engine",),
        on_says="copy engine, 16-token pages",
        off_says="kernel, 16-token pages",
    ),
    Choice(
        name="links shared fairly",
        metric=TTFT,
        both=("storage.read_gbps=2", "workload.start=warm_storage", "prefetch.stop=wait_complete"),
        on=("storage.read_workers=8",),
        off=("storage.read_workers=1",),
        on_says="8 readers share the link",
        off_says="one after the other",
    ),
    Choice(
        name="start state",
        metric=TTFT,
        both=("storage.read_gbps=8",),
        on=("workload.start=warm_storage",),
        on_says="warm storage",
        off_says="cold",
    ),
    Choice(
        name="replicas and routers",
        metric=HIT,
        both=("parallel.replicas=4", "parallel.tp=1", "storage=none"),
        off=("parallel.router=round_robin",),
        on_says="4 engines, sticky sessions",
        off_says="4 engines, round robin",
    ),
    Choice(
        name="storage shared by replicas",
        metric=HIT,
        both=("parallel.replicas=4", "parallel.tp=1", "parallel.router=round_robin"),
        off=("storage=none",),
        on_says="shared storage behind round robin",
        off_says="none behind round robin",
    ),
    Choice(
        name="copies slow computing down",
        metric=GPU,
        off=("hardware.copy_slowdown.value=1.0",),
        on_says="by the profile's factor",
        off_says="not at all",
    ),
)


def main() -> None:
    """Run every choice both ways and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=600, help="requests of the trace")
    parser.add_argument("--first", type=int, default=0, help="number of the first choice to run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    schema.register()
    lines = ["| choice | metric | with it | without it | change |", "|---|---|---|---|---|"]
    for choice in CHOICES[options.first :]:
        with_it = measure(choice, choice.on, options.limit)
        with choice.patch():
            without = measure(choice, choice.off, options.limit)
        change = f"{without / with_it - 1:+.0%}" if with_it else f"{without:+.3g}"
        lines.append(
            f"| {choice.name} | `{choice.metric}` | {with_it:.4g} ({choice.on_says}) "
            f"| {without:.4g} ({choice.off_says}) | {change} |"
        )
        print(lines[-1])
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def measure(choice: Choice, overrides: Sequence[str], limit: int) -> float:
    """The choice's metric of one run."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", [*BASE, f"workload.limit={limit}", *choice.both, *overrides])
    result = experiment.run(schema.to_config(cfg))
    return summarize(result.records, result.measures)[choice.metric]


if __name__ == "__main__":
    main()
