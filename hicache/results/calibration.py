"""Fits constants of a server to its log, and says how certain they are.

The log is one of a light load. Two kinds of requests are used. One is *alone*: no other prompt is
computed while it waits for its first token. The other one *follows*: it came while a single prompt
was computed, and is computed next. What the first token of a follower takes after that of
the request before it has no part outside the engine, which tells the time in the engine from that
before it. All other requests are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hicache.cache.kinds import MAMBA
from hicache.config import Batching, ExperimentConfig
from hicache.engine.deployment import Deployment, deploy
from hicache.engine.simulated_runtime import link_rates
from hicache.models import Figure

if TYPE_CHECKING:
    import pandas as pd

MOST_REQUESTS = 200
# a constant is known if half of its 95 % interval is less than this share of it, or less than this
# share of the median TTFT
KNOWN_SHARE, KNOWN_TTFT = 0.1, 0.02
NOISE = 0.02  # of a time, to weigh it against the unknown rest of a step of decoding
TIERS = ("device", "host", "storage")
ALTERNATING = (Batching.prefill_first, Batching.prompts_together)  # no prompt beside a decode
OUTLIER = 4.0  # robust standard deviations beyond which a request counts as disturbed
SECONDS = ("scheduler.server_s", "scheduler.begin_s")
CONSTANTS = (*SECONDS, "hardware.prefill_factor", "hardware.link_factor")
# what a log lacks if a constant cannot be told from the others
LACKS = {
    SECONDS[0]: "requests that are served alone, and some that come while another is computed",
    SECONDS[1]: "requests that come while exactly one other is computed",
    CONSTANTS[2]: "prompts of different lengths that are computed",
    CONSTANTS[3]: "hits on the host, of different lengths",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted constants, by setting, and half of the 95 % interval of each."""

    values: dict[str, float]
    plus_minus: dict[str, float]
    num_used: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """One request: what it took since it arrived, or since the first token of the one before it."""

    computed: tuple[int, int]  # prompt tokens, from and to
    host_hit: int
    took_s: float
    noise_s: float  # its noise, in units of the relative noise of a measured time
    decodes: tuple[int, ...]  # contexts of requests that decode in the same steps
    follows: bool


def fitted(config: ExperimentConfig, log: "pd.DataFrame", names: Sequence[str]) -> Calibration:
    """Fit the constants `names` to the first 200 requests of a log.

    Raises:
        ValueError: the log does not tell the constants from each other; the message says what it
            lacks. Or an engine has pipeline stages.
    """
    if config.parallel.pp > 1:
        raise ValueError(f"hicache calibrate needs parallel.pp=1, got {config.parallel.pp}")
    log = log.head(MOST_REQUESTS)
    if (longest := log["prompt_len"].max()) > config.model.max_len:
        raise ValueError(
            f"a prompt of {longest:,} tokens exceeds the {config.model.max_len:,} of "
            f"{config.model.name}: choose the model of the server"
        )
    ttft_s = (log["first_token_ns"] - log["arrival_ns"]).to_numpy() * 1e-9
    before_s = float(ttft_s.min())  # at most so much passes before the engine
    for _ in range(3):  # with a better limit, more requests are known to follow another
        seen = list(_seen(log, config, before_s))
        if len(seen) <= len(names):
            raise ValueError(
                f"the log has {len(seen)} requests that are computed alone, and {len(names)} "
                "constants need more: choose a lighter load"
            )
        values, plus_minus, num_used = _fit(config, seen, names)
        if (first := SECONDS[0]) in names:
            before_s = min(before_s, values[first] + 2 * plus_minus[first])
        else:
            before_s = min(before_s, config.scheduler.server_s)
    least_s = KNOWN_TTFT * float(np.median(ttft_s))
    unknown = [
        name
        for name, half in plus_minus.items()
        if not half < max(KNOWN_SHARE * values[name], least_s if name in SECONDS else 0.0)
    ]
    if unknown:
        lacks = "; ".join(f"{name} needs {LACKS[name]}" for name in unknown)
        others = ",".join(name for name in names if name not in unknown)
        hint = f" (--fit {others} fits the rest)" if others else ""
        raise ValueError(f"the log does not identify {', '.join(unknown)}: {lacks}{hint}")
    return Calibration(
        values=values, plus_minus=plus_minus, num_used=num_used, num_requests=len(log)
    )


def _fit(
    config: ExperimentConfig, seen: Sequence[_Seen], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, float], int]:
    # values and half intervals, by name, and the number of requests that are not outliers
    from scipy.optimize import least_squares  # slow to import

    noise_s = np.array([each.noise_s for each in seen])
    took_s = np.array([each.took_s for each in seen])
    typical_s = float(np.median(np.abs(took_s)))
    scale = np.array([typical_s if name in SECONDS else 1.0 for name in names])
    every = np.ones(len(seen), bool)

    def residuals(x: NDArray[np.float64], use: NDArray[np.bool_]) -> NDArray[np.float64]:
        told = predicted_s(config, seen, dict(zip(names, x * scale, strict=True)))
        off: NDArray[np.float64] = (told - took_s) / noise_s
        return off[use]

    use, lower = every, [0.0 if name in SECONDS else 0.01 for name in names]
    x = np.array([0.1 if name in SECONDS else 1.0 for name in names])
    for _ in range(3):
        # times are whole nanoseconds: a smaller step would see their rounding
        found = least_squares(
            residuals, x, bounds=(lower, np.inf), args=(use,), diff_step=[1e-3] * len(x)
        )  # fmt: skip
        x, off = found.x, np.abs(residuals(found.x, every))
        spread = 1.4826 * float(np.median(off[use]))
        use = off <= max(OUTLIER * spread, 1e-6)
    halves = _plus_minus(np.asarray(found.jac, float), spread) * scale
    values, plus_minus = (
        dict(zip(names, each.tolist(), strict=True)) for each in (x * scale, halves)
    )
    return values, plus_minus, int(use.sum())


def with_constants(config: ExperimentConfig, constants: dict[str, float]) -> ExperimentConfig:
    """Return the settings of `config` with the given values of some of `CONSTANTS`."""

    def held(group: str) -> dict[str, Any]:
        of_group = {name.partition("."): value for name, value in constants.items()}
        return {name: value for (own, _, name), value in of_group.items() if own == group}

    told: dict[str, Any] = {
        name: Figure(value=value, source="fitted") for name, value in held("hardware").items()
    }
    return replace(
        config,
        hardware=replace(config.hardware, **told),
        scheduler=replace(config.scheduler, **held("scheduler")),
    )


def predicted_s(
    config: ExperimentConfig, seen: Sequence[_Seen], constants: dict[str, float]
) -> NDArray[np.float64]:
    """Return what each request takes with these constants."""
    config = with_constants(config, constants)
    deployment = deploy(config)
    rate = link_rates(config, deployment)["to_device"]
    server_s, begin_s = config.scheduler.server_s, config.scheduler.begin_s
    return np.array(
        [
            begin_s + (0.0 if each.follows else server_s)
            + _engine_s(config, deployment, rate, each)
            for each in seen
        ]
    )  # fmt: skip


def _engine_s(config: ExperimentConfig, deployment: Deployment, rate: float, of: _Seen) -> float:
    cost, (start, end) = deployment.cost, of.computed
    loads, waits_s, loading_s = None, 0.0, 0.0
    if of.host_hit:
        kinds = deployment.kinds
        most = {MAMBA: 1, **kinds.window_lens}  # one state, and no more than a window
        counts = [min(of.host_hit, most.get(kind, of.host_hit))
                  for kind in range(len(kinds.page_bytes))]  # fmt: skip
        loads = cost.layer_bytes(*counts)
        loading_s = float(loads.sum()) / rate
        if not config.compat.rules.overlaps_loads:
            loads, waits_s, loading_s = None, loading_s, 0.0
    total_ns = 0
    while start < end:
        stop = min(end, start + config.scheduler.chunk_tokens)
        slowdown = config.hardware.copy_slowdown.value if loading_s else 1.0
        step = cost.forward_ns(
            [(start, stop)], of.decodes, load_layer_bytes=loads, load_rate=rate,
            slowdown=slowdown, copying_s=loading_s,
        )  # fmt: skip
        total_ns, start, loads, loading_s = total_ns + step.total_ns, stop, None, 0.0
    return waits_s + total_ns * 1e-9


def _seen(log: "pd.DataFrame", config: ExperimentConfig, before_s: float) -> Iterator[_Seen]:
    # `before_s`: an upper limit of the time before the engine
    arrival, first, finish = (
        log[f"{name}_ns"].to_numpy() * 1e-9 for name in ("arrival", "first_token", "finish")
    )
    prompts, outputs = log["prompt_len"].to_numpy(), log["output_len"].to_numpy()
    on_device, on_host, stored = (log[f"{tier}_hit_len"].to_numpy() for tier in TIERS)
    hits = np.minimum(on_device + on_host, prompts - 1)
    is_short = prompts - hits <= config.scheduler.chunk_tokens
    is_mixed = config.scheduler.batching not in ALTERNATING
    cost = deploy(config).cost
    for at in range(len(log)):
        came_s, others = arrival[at], np.arange(len(log)) != at
        near_s = OUTLIER * NOISE * (first[at] - came_s)  # first tokens of one step differ so much
        ahead = others & (arrival <= came_s) & (first > came_s)
        follows = bool(ahead.any())
        begins_s = came_s
        if follows:  # with the step in which the last of those ahead has ended
            last_s = first[ahead].max()
            last = ahead & (first > last_s - near_s)
            begins_s = float(first[last].mean())
            if came_s > begins_s - before_s or first[at] < last_s + near_s:
                continue
            if not is_short[last].all():
                continue
        decoding = others & (first <= begins_s + near_s * follows) & (finish > begins_s)
        done = (begins_s - first) / np.maximum(finish - first, 1e-9) * outputs
        contexts = tuple(np.maximum(prompts + done, prompts)[decoding].astype(int).tolist())
        waits_s = 0.0
        if contexts and not follows:  # half of a step of decoding, on average
            waits_s = 0.5e-9 * cost.forward_ns([], contexts).total_ns
        # a request that comes before the step begins would share it
        until_s = begins_s + 2 * waits_s if is_short[at] else first[at]
        if (others & (arrival > came_s) & (arrival < until_s)).any():
            continue
        if not isfinite(hits[at]) or stored[at]:
            continue
        noises = [first[at] - came_s, waits_s / NOISE]
        noises += [(first - arrival)[last].mean() / np.sqrt(last.sum())] if follows else []
        yield _Seen(
            computed=(int(hits[at]), int(prompts[at])),
            host_hit=int(on_host[at]),
            took_s=float(first[at] - begins_s - waits_s),
            noise_s=float(np.linalg.norm(noises)),
            decodes=contexts if is_mixed else (),
            follows=follows,
        )


def _plus_minus(jacobian: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    # half of the 95 % interval of each parameter; infinite if the log says nothing of it
    try:
        covariance = np.linalg.inv(jacobian.T @ jacobian)
    except np.linalg.LinAlgError:
        return np.full(jacobian.shape[1], np.inf)
    variance = np.diag(covariance)
    halves = 1.96 * spread * np.sqrt(np.where(variance > 0, variance, np.inf))
    # without noise the equations must still be independent
    halves[variance * np.sum(jacobian**2, axis=0) > 1e8] = np.inf
    return halves
