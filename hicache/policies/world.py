"""What a policy may know of the engine that it decides for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache.cache.prefetch.rates import RateEstimator
from hicache.config import ExperimentConfig
from hicache.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The engine of a policy, read-only. Each engine, and each rank of it, has a policy of its own.

    Attributes:
        page_size: tokens of a page.
        seed: of the run; a policy that draws numbers starts from it.
        kinds: the kinds that the model has, of full, swa and mamba.
        capacity: by tier and kind, pages (or states) of the pool; None means never full.
        unit_bytes: by tier and kind, bytes of a page (or state).
        window_tokens: by kind, the length of a sliding window.
        flops: FLOPs of computing the tokens [start, end) of a prompt, on all devices together.
        seconds: the time that this takes alone, as the simulator prices it.
        rates: what was measured so far: `compute_ns(num_tokens)`, `load_ns(prefetch)`.
        now_ns: the engine's clock. Clocks of ranks differ, and ranks must decide alike.
        config: all settings of the run.
        requests: the workload in the order of arrival: the future, for an oracle alone.
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
