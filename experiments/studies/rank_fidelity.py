"""Whether simulated time ranks policies as real time does: Kendall's tau over configurations.

python -m experiments.studies.rank_fidelity --out rank.json

Storage is throttled: every batch takes `--delay-ms` longer, in real and in simulated time. Both are
ranked by mean time to first token, over the same slices.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.studies.calibrate import REAL, SLICES, Fit, fit_to
from experiments.studies.measured import Log, measured
from experiments.studies.sim_vs_real import judged
from hicache import experiment
from hicache.cli.schema import config_of
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.executor.simulated.cost import CostModel
from hicache.results.metrics import RequestRecord, Result
from hicache.results.verdict import Summary, in_short, objections

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
CALIBRATE_EVERY = 4  # runs
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
    names = list(POLICIES)
    log = Log()
    real: dict[str, list[float]] = {name: [] for name in names}
    summaries: list[Summary] = []
    steps: dict[str, Log] = {name: Log() for name in names}
    for number, seed in enumerate(options.seeds):
        # in turn and each time from another one on, so that a machine that is busier for a while is
        # so for the profile and for every policy
        for place in range(len(names)):
            name = names[(place + number * len(names) // len(options.seeds)) % len(names)]
            config = replace(composed([*options.overrides, *POLICIES[name]]), seed=seed)
            if place % CALIBRATE_EVERY == 0:
                other = SLICES[0] + number * len(names) + place
                with measured() as part:
                    experiment.run(replace(composed(options.overrides), seed=other))
                log.add(part)
            with measured(storage_delay_s=options.delay_ms / 1000) as part:
                real[name].append(mean_ttft_s(judged(experiment.run(config), summaries)))
            steps[name].add(part)
    base = composed(options.overrides)
    fit = fit_to(log, base)
    rows = []
    for name in names:
        config = composed([*options.overrides, *POLICIES[name]])
        results = [
            run_simulated(replace(config, seed=seed), fit, options.delay_ms)
            for seed in options.seeds
        ]
        found: dict[str, Any] = {
            "policy": name,
            "real_s": fmean(real[name]),
            "simulated_s": fmean(mean_ttft_s(judged(each, summaries)) for each in results),
            "step_over_fit": slowness(steps[name], fit, base),
        }
        rows.append(found)
        print(
            "{policy:28} {real_s:.3f} s real  {simulated_s:.3f} s simulated, a step took "
            "{step_over_fit:.2f} times what the fit says".format(**found),
            flush=True,
        )
    tau = kendall_tau(*([row[side] for row in rows] for side in ("real_s", "simulated_s")))
    print(f"Kendall's tau of {len(names)} policies: {tau:.2f}")
    print(f"verdict: {in_short(objections(summaries))}")
    if options.out is not None:
        options.out.write_text(json.dumps({"tau": tau, "policies": rows}, indent=1) + "\n")


def composed(overrides: Sequence[str]) -> ExperimentConfig:
    """A real run's configuration."""
    return config_of(*REAL, *WORKLOAD, *overrides)


def run_simulated(config: ExperimentConfig, fit: Fit, delay_ms: float) -> Result:
    """A simulated run whose storage takes as much longer."""
    config = fit.onto(config)
    operation_s = config.storage.operation_s + delay_ms / 1000
    storage = replace(config.storage, operation_s=operation_s)
    return experiment.run(replace(config, storage=storage))


def slowness(log: Log, fit: Fit, config: ExperimentConfig) -> float:
    """How many times longer real steps took than the fit says of the same steps.

    A policy changes which steps are taken and not how long one takes: where this differs between
    policies by more than a few percent, the machine was not the same for all of them.
    """
    cost = CostModel(config.model, fit.hardware, tp=1)
    expected_ns = sum(
        cost.forward_ns(step.extends, step.context_lens, saved_states=step.num_saves).total_ns
        for step in log.steps
    )
    return sum(step.seconds + step.between_s for step in log.steps) / (expected_ns / SECOND_NS)


def mean_ttft_s(records: Sequence[RequestRecord]) -> float:
    """Of the requests that were answered."""
    return fmean(each.ttft_ns / SECOND_NS for each in records if each.ttft_ns is not None)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less pairs in opposite order, as a share of all pairs."""
    apart, others = (np.sign(np.subtract.outer(side, side)) for side in (first, second))
    return float((apart * others).sum() / (len(first) * (len(first) - 1)))


if __name__ == "__main__":
    main()
