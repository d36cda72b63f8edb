"""Whether simulated time ranks policies as real time does: Kendall's tau over configurations.

python -m experiments.rank_fidelity --out rank.json

Storage is throttled: every batch takes `--delay-ms` longer, in real and in simulated time. Both are
ranked by mean time to first token, over the same slices.
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
# of the agents workload: long shared prefixes, and pools mostly too small for them; chosen so that
# no two are nearer than 4 % in a simulation with a made-up profile, before any was run for real
POLICIES: dict[str, tuple[str, ...]] = {
    "everything fits": ("cache.device_gib=0.03", "cache.host_gib=0.03"),
    "storage, wait for it": ("prefetch.stop=wait_complete",),
    "storage, never wait": ("prefetch.stop=best_effort", "cache.host_gib=0.0008"),
    "storage, tiny host": ("prefetch.stop=wait_complete", "cache.host_gib=0.0008"),
    "no storage": ("storage=none",),
    "no storage, small host": ("storage=none", "cache.host_gib=0.0005"),
    "small device": ("cache.device_gib=0.0009", "storage=none"),
    "small device, no host": ("cache.device_gib=0.0009", "storage=none", "cache.host_gib=0"),
}
WORKLOAD = (
    "workload=agents",
    "workload.num_sessions=20",
    "workload.limit=80",
    "workload.concurrency=8",
)


def main() -> None:
    """Run every policy both ways and compare the orders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    schema.register()
    fit = calibrate(composed(options.overrides), SLICES)
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
        return schema.to_config(compose("config", [*REAL, *WORKLOAD, *overrides]))


def run_real(config: ExperimentConfig, delay_ms: float) -> Sequence[RequestRecord]:
    """Records of a real run whose storage is slowed down."""
    with measured(storage_delay_s=delay_ms / 1000):
        return experiment.run(config).records


def run_simulated(config: ExperimentConfig, fit: Fit, delay_ms: float) -> Sequence[RequestRecord]:
    """Records of a simulated run whose storage takes as much longer."""
    config = fit.onto(config)
    storage = replace(
        config.storage,
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
