"""The names of `cache.policy` and their classes; lru, the default, has none."""

from collections.abc import Callable
from functools import partial

from hicache.policies.agents import CacheTtl, Continuum, GapOracle, Hints, Mori
from hicache.policies.eviction import Fifo, Lfu, Random, UsedAgain
from hicache.policies.queues import Arc, LeCaR, PerPool, S3Fifo, Slru
from hicache.policies.values import Belady, Gdsf, Marconi, StateFlops, TinyLfu

STOCK: dict[str, Callable[..., object]] = {
    "lfu": Lfu,
    "sglang_slru": UsedAgain,
    "fifo": Fifo,
    "random": Random,
    "slru": partial(PerPool, Slru),
    "s3fifo": partial(PerPool, S3Fifo),
    "arc": partial(PerPool, Arc),
    "lecar": partial(PerPool, LeCaR),
    "gdsf": partial(PerPool, Gdsf),
    "marconi": Marconi,
    "state_flops": StateFlops,
    "hints": Hints,
    "continuum": Continuum,
    "cache_ttl": CacheTtl,
    "mori": Mori,
    "gap_oracle": GapOracle,
    "tinylfu": TinyLfu,
    "oracle": Belady,
}
