"""How long users wait for an answer before they cancel."""

from collections.abc import Iterable
from random import Random

from hicache.clock import to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request


def patience_of(
    requests: Iterable[Request], config: WorkloadConfig, *, seed: int
) -> dict[int, int]:
    """Return how long clients wait before they cancel, in ns after arrival, by request id.

    Only requests that may be canceled are in the dict; `config.abort_share` is their fraction. Each
    request is drawn on its own. So a smaller fraction leaves requests out, and does not change the
    others.
    """
    patience_ns: dict[int, int] = {}
    if not config.abort_share:
        return patience_ns
    for request in requests:
        draws = Random(f"{seed}/{request.id}")
        if draws.random() < config.abort_share:
            patience_ns[request.id] = max(to_ns(draws.expovariate(1 / config.patience_s)), 1)
    return patience_ns
