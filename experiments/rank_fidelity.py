"""Whether simulated time ranks policies as real time does: Kendall's tau over configurations.

python -m experiments.rank_fidelity --out rank.json

Storage is throttled: every call takes `--delay-ms` longer, by a knob of the real storage, and by
the same amount on the simulated one's clock. Both are ranked by mean time to first token, over the
same slices.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

from hydra import compose, initialize_config_dir

from experiments import schema
from experiments.calibrate import REAL, SLICES, Fit, calibrate
from experiments.measured import measured
from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.metrics import RequestRecord

CONF = Path(__file__).resolve().parents[1] / "conf"
POLICIES: dict[str, tuple[str, ...]] = {
    "wait_complete": ("prefetch.stop=wait_complete",),
    "best_effort": ("prefetch.stop=best_effort",),
    "timeout": ("prefetch.stop=timeout", "prefetch.timeout_base_s=0.1"),
    "no storage": ("storage=none",),
    "no storage, small host": ("storage=none", "cache.host_gib=0.0005"),
    "no storage, no host": ("storage=none", "cache.host_gib=0"),
    "large device": ("cache.device_gib=0.006", "prefetch.stop=best_effort"),
    "everything fits": ("cache.device_gib=0.03", "cache.host_gib=0.03", "storage=none"),
    "small device": ("cache.device_gib=0.001", "prefetch.stop=wait_complete"),
    "shortest first": ("scheduler.order=shortest_remaining", "prefetch.stop=wait_complete"),
    "small chunks": ("scheduler.chunk_tokens=64", "prefetch.stop=best_effort"),
    "no states kept at branches": ("cache.checkpoints=end", "prefetch.stop=wait_complete"),
}


def main() -> None:
    """Run every policy both ways and compare the orders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    schema.register()
    fit = calibrate(composed(options.overrides), SLICES, on_wall_clock=True)
    names: list[str] = []
    real_s: list[float] = []
    simulated_s: list[float] = []
    for name, knobs in POLICIES.items():
        real: list[float] = []
        simulated: list[float] = []
        for seed in options.seeds:
            config = replace(composed([*options.overrides, *knobs]), seed=seed)
            real.append(mean_ttft_s(run_real(config, options.delay_ms)))
            simulated.append(mean_ttft_s(run_simulated(config, fit, options.delay_ms)))
        names.append(name)
        real_s.append(fmean(real))
        simulated_s.append(fmean(simulated))
        print(f"{name:28} {real_s[-1]:.3f} s real  {simulated_s[-1]:.3f} s simulated", flush=True)
    tau = kendall_tau(real_s, simulated_s)
    print(f"Kendall's tau of {len(names)} policies: {tau:.2f}")
    if options.out is not None:
        rows = [
            {"policy": name, "real_s": real_mean, "simulated_s": simulated_mean}
            for name, real_mean, simulated_mean in zip(names, real_s, simulated_s, strict=True)
        ]
        options.out.write_text(json.dumps({"tau": tau, "policies": rows}, indent=1) + "\n")


def composed(overrides: Sequence[str]) -> ExperimentConfig:
    """A real run's configuration."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return schema.to_config(compose("config", [*REAL, *overrides]))


def run_real(config: ExperimentConfig, delay_ms: float) -> Sequence[RequestRecord]:
    """Records of a real run whose storage is slowed down."""
    faults = replace(config.storage.faults, delay_ms=delay_ms)
    slowed = replace(config, storage=replace(config.storage, faults=faults))
    with measured(on_wall_clock=True):
        return experiment.run(slowed).records


def run_simulated(config: ExperimentConfig, fit: Fit, delay_ms: float) -> Sequence[RequestRecord]:
    """Records of a simulated run whose storage takes as much longer."""
    config = fit.onto(config)
    storage = replace(
        config.storage,
        query_s=config.storage.query_s + delay_ms / 1000,
        operation_s=config.storage.operation_s + delay_ms / 1000,
    )
    return experiment.run(replace(config, storage=storage)).records


def mean_ttft_s(records: Sequence[RequestRecord]) -> float:
    """Of the requests that were answered."""
    return fmean(each.ttft_ns / SECOND_NS for each in records if each.ttft_ns is not None)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less pairs in opposite order, as a share of all pairs."""
    agreeing = 0
    pairs = list(combinations(range(len(first)), 2))
    for left, right in pairs:
        product = (first[left] - first[right]) * (second[left] - second[right])
        agreeing += (product > 0) - (product < 0)
    return agreeing / len(pairs)


if __name__ == "__main__":
    main()
