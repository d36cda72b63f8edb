"""The information that a policy gets about its engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache.cache.prefetch.rates import RateEstimator
from hicache.config import ExperimentConfig
from hicache.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The engine of a policy, read-only. Each engine, and each rank of it, has its own policy.

    Attributes:
        page_size: tokens per page.
        seed: seed of the run, for policies that draw random numbers.
        kinds: the kinds of the model, out of full, swa and mamba.
        capacity: by tier and kind, pages (or states) of the pool; None means unlimited.
        unit_bytes: by tier and kind, bytes of a page (or state).
        window_tokens: by kind, the length of a sliding window.
        flops: FLOPs to compute the tokens [start, end) of a prompt, summed over all devices.
        seconds: time to compute these tokens alone, by the simulator's cost model.
        rates: measured rates: `compute_ns(num_tokens)`, `load_ns(prefetch)`.
        now_ns: the engine's clock. Clocks of ranks differ, but ranks must decide alike.
        config: all settings of the run.
        requests: the workload in order of arrival, so also the future; only for an oracle.
    """

    page_size: int
    seed: int
    kinds: tuple[str, ...]
    capacity: Mapping[str, Mapping[str, int | None]]
    unit_bytes: Mapping[str, Mapping[str, int]]
    window_tokens: Mapping[str, int]
    flops: Callable[[int, int], float]
    seconds: Callable[[int, int], float]
    rates: RateEstimator
    now_ns: Callable[[], int]
    config: ExperimentConfig
    requests: Sequence[Request] = ()
