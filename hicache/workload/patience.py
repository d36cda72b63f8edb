"""How long users wait for an answer before they cancel."""

from collections.abc import Iterable
from random import Random

from hicache.clock import to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request


def patience_of(
    requests: Iterable[Request], config: WorkloadConfig, *, seed: int
) -> dict[int, int]:
    """Return by request id the patience in ns after arrival, for requests that may be canceled.

    Drawn for each request independently: with a smaller share fewer requests are canceled, at the
    same times.
    """
    patience_ns: dict[int, int] = {}
    if not config.abort_share:
        return patience_ns
    for request in requests:
        draws = Random(f"{seed}/{request.id}")
        if draws.random() < config.abort_share:
            patience_ns[request.id] = max(to_ns(draws.expovariate(1 / config.patience_s)), 1)
    return patience_ns
