"""The information that a policy gets about its engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache.cache.prefetch.rates import RateEstimator
from hicache.config import ExperimentConfig
from hicache.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a policy knows about its engine; read-only.

    Each engine has a policy object of its own. If an engine has several ranks, each rank has one.

    Attributes:
        page_size: tokens per page.
        seed: seed of the run, for policies that draw random numbers.
        kinds: names of the kinds of data that the model caches, such as "full" (full-attention KV),
            "swa" (sliding window) and "mamba".
        capacity: by tier and kind, the pages (or Mamba states) that fit in the pool. None means
            unlimited. If kinds share the bytes of a tier (`cache.pools`), each kind's number is
            that of the whole tier.
        unit_bytes: by tier and kind, the bytes of a page (or Mamba state).
        window_tokens: by kind, the tokens in a sliding window.
        flops: function that returns the FLOPs to compute the tokens [start, end) of a prompt,
            summed over all devices.
        seconds: function that returns the time in seconds to compute the tokens [start, end) alone,
            as the simulator estimates it.
        rates: measured rates; `compute_ns(num_tokens)` and `load_ns(prefetch)` return times in
            nanoseconds.
        now_ns: function that returns the time of the engine in nanoseconds. Clocks of ranks differ,
            but ranks must decide alike.
        config: all settings of the run.
        requests: the whole workload in order of arrival, also the future. Only an oracle may use
            it.
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
