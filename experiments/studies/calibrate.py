"""Fits a machine's profile to real runs of the reference model.

The cost model is linear in six numbers once nothing else binds: what a step costs by itself, a
token's matrices, a pair of query and key, a state, a key read while decoding, a sequence extended.
The reference model multiplies whole pages of each sequence, however few rows of one are wanted; so
a page is the profile's tile. The six are fitted to the steps of `experiments.studies.measured` by
least squares on errors relative to the fit, none below zero; what the scheduler takes between two
steps is added to the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.studies.measured import Call, Log, features, measured
from hicache import experiment
from hicache.config import ExperimentConfig
from hicache.models import Figure, HardwareConfig, ModelConfig, RateTable

SLICES = (101, 102, 103)  # seeds
ROUNDS = 8  # of fitting, each with the weights that follow from the last
FREE = 1e30  # a rate that never binds
REAL = ("experiment=sim_vs_real",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A profile, knobs of the storage, and how far the fit is from what it was fitted to."""

    hardware: HardwareConfig
    storage: dict[str, Any]
    median_step_error: float
    num_steps: int

    def onto(self, config: ExperimentConfig) -> ExperimentConfig:
        """The configuration of a real run, for simulated time on this machine."""
        real = config.storage
        # keys alone, which take as long as the real one's pages
        storage = replace(
            real, kind="none" if real.kind == "none" else "memory", root=None, **self.storage
        )
        return replace(
            config,
            hardware=self.hardware,
            executor=replace(config.executor, kind="simulated"),
            storage=replace(
                storage,
                read_gbps=min(real.read_gbps, storage.read_gbps),
                write_gbps=min(real.write_gbps, storage.write_gbps),
            ),
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
        storage={
            "read_gbps": read_rate / 1e9,
            "write_gbps": write_rate / 1e9,
            "query_s": float(np.median([call.seconds for call in log.queries] or [0.0])),
            "operation_s": operation_s,
        },
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
    fitted = {"source": "experiments.calibrate", "status": "measured"}
    assumed = {"source": "not fitted", "status": "modelled"}
    free = assumed | {"source": "not fitted: never binds"}
    never_binds = Figure(value=FREE, **free)

    def curve(rate: float, told: Mapping[str, str] = fitted) -> RateTable:
        return RateTable(size=(1.0,), rate=(rate,), **told)

    # of one layer, in the units of hicache.executor.simulated.cost
    pair_flops = 2 * model.num_query_heads * 2 * model.head_dim
    state_bytes = 2 * model.mamba_slot_bytes
    return replace(
        base,
        name="fitted",
        num_devices=1,
        step_s=Figure(value=step_s, **fitted),
        extend_s=Figure(value=extend_s, **fitted),
        kernel_s=Figure(value=0.0, **assumed),
        tile_tokens=tile,
        gemm_bf16=curve(2 * model.dense_params / token_s),
        gemm_fp8=curve(2 * model.dense_params / token_s),
        weight_bandwidth=never_binds,
        attention_d64=curve(pair_flops / pair_s),
        attention_d128=curve(pair_flops / pair_s),
        attention_window=curve(pair_flops / pair_s),
        decode_bandwidth=curve(model.full_layer_token_bytes / key_s),
        delta_rate=never_binds,
        mamba_rate=never_binds,
        conv_rate=never_binds,
        short_bandwidth=never_binds,
        state_bandwidth=Figure(value=state_bytes / max(state_s, 1e-12), **fitted),
        copy_engine=curve(FREE, free),
        kernel_to_device=curve(2e9, assumed),
        kernel_to_host=curve(2e9, assumed),
        pcie_bandwidth=Figure(value=2e9, **assumed),
        copy_slowdown=Figure(value=1.0, **assumed),
    )
