"""Policies of the literature by their names, for `cache.policy`."""

from collections.abc import Callable
from functools import partial

from hicache.policies.queues import Arc, LeCaR, PerPool, S3Fifo, Slru
from hicache.policies.values import Belady, Gdsf, Hints, Marconi, TinyLfu

STOCK: dict[str, Callable[..., object]] = {
    "slru": partial(PerPool, Slru),
    "s3fifo": partial(PerPool, S3Fifo),
    "arc": partial(PerPool, Arc),
    "lecar": partial(PerPool, LeCaR),
    "gdsf": partial(PerPool, Gdsf),
    "marconi": Marconi,
    "hints": Hints,
    "tinylfu": TinyLfu,
    "oracle": Belady,
}
