"""Fits a machine's profile to real runs of the reference model.

The cost model is linear in six numbers once nothing else binds: what a step costs by itself, a
token's matrices, a pair of query and key, a state, a key read while decoding, a sequence extended.
The reference model multiplies whole pages of each sequence, however few rows of one are wanted; so
a page is the profile's tile. The six are fitted to the steps of `experiments.studies.measured` by
least squares on errors relative to the fit, none below zero; what the scheduler takes between two
steps is added to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.studies.measured import Call, Log, features, measured
from hicache import experiment
from hicache.config import ExperimentConfig, StorageConfig
from hicache.models import Figure, HardwareConfig, ModelConfig, RateTable

SLICES = (101, 102, 103)  # seeds
ROUNDS = 8  # of fitting, each with the weights that follow from the last
FREE = 1e30  # a rate that never binds
REAL = ("experiment=sim_vs_real",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A profile, the storage's numbers, and how far the fit is from what it was fitted to."""

    hardware: HardwareConfig
    read_gbps: float
    write_gbps: float
    query_s: float
    operation_s: float
    median_step_error: float
    num_steps: int

    def onto(self, config: ExperimentConfig) -> ExperimentConfig:
        """The configuration of a real run, for simulated time on this machine."""
        return replace(
            config,
            hardware=self.hardware,
            executor=replace(config.executor, kind="simulated"),
            storage=self.storage(config.storage),
        )

    def storage(self, config: StorageConfig) -> StorageConfig:
        """A storage of keys that takes as long as the real one."""
        kind = "none" if config.kind == "none" else "memory"
        return replace(
            config,
            kind=kind,
            root=None,
            read_gbps=min(config.read_gbps, self.read_gbps),
            write_gbps=min(config.write_gbps, self.write_gbps),
            query_s=self.query_s,
            operation_s=self.operation_s,
        )


def calibrate(config: ExperimentConfig, seeds: Sequence[int]) -> Fit:
    """A profile fitted to real runs of `config` with these seeds."""
    config = replace(config, executor=replace(config.executor, kind="torch"))
    log = Log()
    for seed in seeds:
        with measured() as part:
            experiment.run(replace(config, seed=seed))
        log.add(part)
    return fit_to(log, config)


def fit_to(log: Log, config: ExperimentConfig) -> Fit:
    """The profile whose steps come closest to the log's."""
    model = config.model
    tile = config.cache.page_size
    rows = np.array([features(step, model, tile) for step in log.steps])
    seconds = np.array([step.seconds for step in log.steps])
    rates = least_squares(rows, seconds)
    errors = np.abs(rows @ rates - seconds) / seconds
    rates[0] += np.mean([step.between_s for step in log.steps])
    page = config.cache.page_size * (model.full_token_bytes + model.swa_token_bytes)
    operation_s, read_rate = line(log.reads, page)
    _, write_rate = line(log.writes, page)
    return Fit(
        hardware=profile(rates, model, config.hardware, tile),
        read_gbps=read_rate / 1e9,
        write_gbps=write_rate / 1e9,
        query_s=float(np.median([call.seconds for call in log.queries] or [0.0])),
        operation_s=operation_s,
        median_step_error=float(np.median(errors)),
        num_steps=len(log.steps),
    )


def least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[K] coefficients, none below zero, with the least sum of squared relative errors.

    Relative to the fit, found in rounds: errors relative to what was measured would count a slow
    step for less than a fast one, and the fit would be too fast.
    """
    scale = seconds
    found = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        chosen = np.ones(rows.shape[1], bool)
        while True:
            found = np.zeros(rows.shape[1])
            found[chosen] = np.linalg.lstsq(
                rows[:, chosen] / scale[:, None], seconds / scale, rcond=None
            )[0]
            if (found >= 0).all():
                break
            chosen &= found > 0
        scale = np.maximum(rows @ found, 1e-9)
    return found


def line(calls: Sequence[Call], page_bytes: int) -> tuple[float, float]:
    """Seconds of a call by itself, and bytes a second, of the calls as they were."""
    if not calls:
        return 0.0, FREE
    rows = np.array([[1.0, call.num_pages] for call in calls])
    seconds = np.array([max(call.seconds, 1e-7) for call in calls])
    once, each = least_squares(rows, seconds)
    return float(once), page_bytes / each if each > 0 else FREE


def profile(
    rates: NDArray[np.float64], model: ModelConfig, base: HardwareConfig, tile: int
) -> HardwareConfig:
    """Fitted seconds as a profile: everything that was not fitted is free."""
    step_s, token_s, pair_s, state_s, key_s, extend_s = np.maximum(rates, 1e-15).tolist()
    source = "experiments.calibrate"

    def figure(value: float) -> Figure:
        return Figure(value=value, source=source, status="measured")

    def table(rate: float) -> RateTable:
        return RateTable(size=(1.0,), rate=(rate,), source=source, status="measured")

    def assumed(value: float) -> Figure:
        why = "not fitted: never binds" if value == FREE else "not fitted"
        return Figure(value=value, source=why, status="modelled")

    def assumed_table(rate: float) -> RateTable:
        return RateTable(size=(1.0,), rate=(rate,), source=assumed(rate).source, status="modelled")

    # of one layer, in the units of hicache.executor.simulated.cost
    pair_flops = 2 * model.num_query_heads * 2 * model.head_dim
    state_bytes = 2 * model.mamba_slot_bytes
    return replace(
        base,
        name="fitted",
        num_devices=1,
        step_s=figure(step_s),
        extend_s=figure(extend_s),
        tile_tokens=tile,
        gemm_bf16=table(2 * model.dense_params / token_s),
        gemm_fp8=table(2 * model.dense_params / token_s),
        weight_bandwidth=assumed(FREE),
        attention_d64=table(pair_flops / pair_s),
        attention_d128=table(pair_flops / pair_s),
        attention_window=table(pair_flops / pair_s),
        decode_bandwidth=table(model.full_layer_token_bytes / key_s),
        delta_rate=assumed(FREE),
        mamba_rate=assumed(FREE),
        conv_rate=assumed(FREE),
        state_bandwidth=figure(state_bytes / max(state_s, 1e-12)),
        copy_engine=assumed_table(FREE),
        kernel_to_device=assumed_table(2e9),
        kernel_to_host=assumed_table(2e9),
        pcie_bandwidth=assumed(2e9),
        copy_slowdown=assumed(1.0),
    )
