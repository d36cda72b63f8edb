"""Routers: which of several engines serves a request."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from hicache.cache.checked import PolicyError
from hicache.cache.tree.lookup import usable_len
from hicache.request import Request
from hicache.scheduler.scheduler import Scheduler


class Replica:
    """Shows a router the load and the cached prefixes of one engine.

    `catch_up` is called before the router sees what the engine's memory holds. `role` is "prefill"
    or "decode" if the engine does one of them alone, else "both".
    """

    def __init__(
        self,
        scheduler: Scheduler,
        count_requests: Callable[[], int],
        catch_up: Callable[[], None] = lambda: None,
        role: str = "both",
    ) -> None:
        self.role = role
        self._scheduler = scheduler
        self._count_requests = count_requests
        self._catch_up = catch_up
        self._cache = scheduler.cache

    @property
    def num_requests(self) -> int:
        return self._count_requests()

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_transfers(self) -> int:
        """Return how many requests wait for KV that this engine sends or receives."""
        return 0 if self.role == "both" else len(self._scheduler.started)

    @property
    def free_share(self) -> float:
        """Return the fraction of the device's full-attention KV pool that no request holds.

        The fraction is 1 if the pool is unlimited.
        """
        self._catch_up()
        cache, capacity = self._cache, self._cache.device_pages
        return 1.0 if capacity is None else cache.room() / (capacity * cache.page_size)

    def held_tokens(self, request: Request, *, on_device: bool = False) -> int:
        """Return how many prompt tokens of `request` this engine could take from its cache.

        Tokens on device and host count. With `on_device`, only tokens on the device count.
        """
        self._catch_up()
        tree = self._cache.tree
        tokens, max_len = tree.names.tokens(request), request.prompt_len - 1
        return usable_len(tree, tokens, max_len, request.namespace, on_device=on_device)


Route = Callable[[Request, Sequence[Replica]], int]


class Router(Protocol):
    def route(self, request: Request, engines: Sequence[Replica]) -> int: ...


def router_of(choose: Route, replicas: Sequence[Replica]) -> Callable[[Request], int]:
    """Return the function that picks the engine for a request, as an index into `replicas`.

    `choose` is the method `route` of a policy. The function raises PolicyError if that method
    returns an index that is too large.
    """

    def route(request: Request) -> int:
        number = choose(request, replicas)
        if number >= len(replicas):
            raise PolicyError(
                f"cache.policy: route must return a number below {len(replicas)}, got {number}"
            )
        return int(number)

    return route


class RoundRobin:
    def __init__(self) -> None:
        self._turns = count()

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        return next(self._turns) % len(engines)


class Sticky:
    """Routes all requests of a session to one engine; new sessions go to the engines in turn."""

    def __init__(self) -> None:
        self._homes: dict[int, int] = {}

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        return self._homes.setdefault(request.session_id, len(self._homes) % len(engines))


class PrefixLoad:
    """Routes a request to the engine whose cache holds the longest prefix of its prompt.

    Only some engines are considered: those with at most `slack` requests more than the engine with
    the fewest requests. Among engines with equal prefixes, the one with fewer requests wins.
    """

    slack = 8

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        loads = [each.num_requests for each in engines]

        def merit(number: int) -> tuple[int, int, int]:
            return engines[number].held_tokens(request), -loads[number], -number

        near = [each for each in range(len(engines)) if loads[each] <= min(loads) + self.slack]
        return max(near, key=merit)


class Scored:
    """Routes a request to the engine with the highest weighted sum of four scores.

    Each score lies between 0 and 1:

    - queue, with weight 2: 1 for the engine with the fewest waiting requests, 0 for the one with
      the most;
    - free memory, with weight 2: the fraction of the full-attention KV pool that no request holds;
    - device hit, with weight 1: the fraction of the prompt that the device holds;
    - cache hit, with weight 1: the fraction of the prompt that the device or the host holds.

    The scores and weights are those of the guide "tiered-prefix-cache" of llm-d (June 2026). Among
    equal engines, the least recently chosen one wins.
    """

    device_weight, cache_weight = 1, 1

    def __init__(self) -> None:
        self._turns = count(1)
        self._chosen: dict[int, int] = {}  # turn of the last choice, by engine

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        queues = [each.num_waiting for each in engines]
        spread = max(queues) - min(queues)

        def score(number: int) -> tuple[float, int]:
            replica = engines[number]
            queue = (max(queues) - queues[number]) / spread if spread else 1.0
            held = self.cache_weight * replica.held_tokens(request)
            held += self.device_weight * replica.held_tokens(request, on_device=True)
            total = 2 * queue + 2 * replica.free_share + held / request.prompt_len
            return total, -self._chosen.get(number, 0)

        best = max(range(len(engines)), key=score)
        self._chosen[best] = next(self._turns)
        return best


class ScoredDevice(Scored):
    """Routes like `Scored`, but knows only what the devices hold.

    Its scores are queue and free memory, with weight 2 each, and device hit, with weight 3, as in
    the guide "inference-scheduling" of llm-d (086f217d).
    """

    device_weight, cache_weight = 3, 0


ROUTERS: dict[str, Callable[[], Router]] = {
    "sticky": Sticky,
    "round_robin": RoundRobin,
    "prefix_load": PrefixLoad,
    "scored": Scored,
    "scored_device": ScoredDevice,
}
