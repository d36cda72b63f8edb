"""Measure this machine and write its profile.

python -m experiments.calibrate mine                 writes conf/hardware/mine.yaml
hicache run hardware=mine model=tiny_hybrid parallel.tp=1

The program times real runs of the small reference model step by step and fits the cost model to
them. Arguments after NAME change these runs (model=..., workload.limit=...). docs/machines.md says
what is fitted, what is not, and how to use curves that you measured in another way.
"""

# The cost model is linear in six numbers if nothing else binds: the cost of a step, of a token's
# matrices, of a (query, key) pair, of a state, of a key read while decoding, of an extended
# sequence. The reference model multiplies whole pages of each sequence, so a page is the profile's
# tile. Least squares on errors relative to the fit, none below zero; the scheduler's time between
# two steps is added to the first number.

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from experiments.step_log import Call, Log, features, measured
from hicache import experiment
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.schema import CONF, config_of
from hicache.config import ExperimentConfig
from hicache.models import Figure, HardwareConfig, ModelConfig, RateTable

SLICES = (101, 102, 103)  # seeds
ROUNDS = 8  # of fitting, each weighted by the result of the one before
FREE = 1e30  # a rate that never binds
REAL = ("experiment=calibrate",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    hardware: HardwareConfig
    storage: dict[str, Any]
    median_step_error: float
    num_steps: int


def calibrate(config: ExperimentConfig, seeds: Sequence[int]) -> Fit:
    config = replace(config, executor=replace(config.executor, kind="torch"))
    log = Log()
    for seed in seeds:
        with measured() as part:
            experiment.run(replace(config, seed=seed))
        log.add(part)
    return fit_to(log, config)


def fit_to(log: Log, config: ExperimentConfig) -> Fit:
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
    """Fit non-negative coefficients x, so that `rows @ x` approximates `seconds`.

    The fit minimizes the sum of the squared relative errors, where each error is divided by the
    fitted value.

    Args:
        rows: [N, K], the quantities that determine each time.
        seconds: [N], the measured times.

    Returns:
        [K], the coefficients.
    """
    # errors relative to the measurement would weigh slow steps less than fast ones, and the fit
    # would be too fast; so each round scales by the fit of the one before
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
    if not calls:
        return 0.0, FREE
    rows = np.array([[1.0, call.num_pages] for call in calls])
    seconds = np.array([max(call.seconds, 1e-7) for call in calls])
    once, each = least_squares(rows, seconds)
    return float(once), page_bytes / each if each > 0 else FREE


def profile(
    rates: NDArray[np.float64], model: ModelConfig, base: HardwareConfig, tile: int
) -> HardwareConfig:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.calibrate", __doc__)
    parser.add_argument("name", help="name of the new profile, for use as hardware=NAME")
    parser.add_argument(
        "overrides", nargs="*", help="settings of the real runs, as for experiments.run"
    )
    parser.add_argument(
        "--seed", type=int, action="append", help="random seed of a real run; repeatable"
    )
    parser.add_argument(
        "--folder", type=Path, default=CONF / "hardware", help="directory for the profile"
    )
    options = parser.parse_intermixed_args(arguments)
    file = options.folder / f"{options.name}.yaml"
    with in_one_sentence():
        if not options.name.isidentifier():
            raise ValueError(f"the name of a machine must be a single word, got {options.name!r}")
        if file.exists():
            raise ValueError(f"{file} already exists: choose another name, or remove it")
        fit = calibrate(config_of(*REAL, *options.overrides), options.seed or SLICES)
        file.write_text(as_yaml(fit, options.name))
    print(
        f"timed {fit.num_steps} steps; the median error of the fit is {fit.median_step_error:.1%}\n"
        f"{file}\n\n"
        f"hicache run hardware={options.name} model=tiny_hybrid parallel.tp=1 "
        f"{_storage_knobs(fit)}"
    )


def _storage_knobs(fit: Fit) -> str:
    used = {name: value for name, value in fit.storage.items() if value < FREE / 1e9}
    return " ".join(f"storage.{name}={value:.2g}" for name, value in used.items())


def as_yaml(fit: Fit, name: str) -> str:
    profile = asdict(replace(fit.hardware, name=name))
    return (
        f"# Fitted by experiments.calibrate to {fit.num_steps} steps of the reference model.\n"
        f"defaults:\n  - schema\n  - _self_\n\n{OmegaConf.to_yaml(OmegaConf.create(profile))}"
    )


if __name__ == "__main__":
    main()
