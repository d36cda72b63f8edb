"""Routers: which of several engines serves a request."""

from collections.abc import Callable, Sequence
from itertools import count

from hicache.cache.checked import PolicyError
from hicache.engine.loop import Engine
from hicache.request import Request


class Replica:
    """What a router sees of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def num_requests(self) -> int:
        return self._engine.num_requests

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    @property
    def free_share(self) -> float:
        """Share of the device's full KV pool that no request holds; 1 if it is unlimited."""
        cache = self._engine.cache
        capacity = cache.device_pages
        return 1.0 if capacity is None else cache.room() / (capacity * cache.page_size)

    def held_tokens(self, request: Request, *, on_device: bool = False) -> int:
        """Usable prompt tokens that device and host hold, or the device alone."""
        tree = self._engine.cache.tree
        tokens, max_len = tree.names.tokens(request), request.prompt_len - 1
        return tree.usable_len(tokens, max_len, request.namespace, on_device=on_device)


def router_of(engines: Sequence[Engine]) -> Callable[[Request], int]:
    """Return the function that numbers the engine of a request, by the first engine's policy.

    It raises PolicyError if there is no such engine.
    """
    policy, replicas = engines[0].cache.tree.policy, [Replica(each) for each in engines]

    def route(request: Request) -> int:
        number: int = policy.route(request, replicas)
        if number >= len(replicas):
            raise PolicyError(
                f"cache.policy: route must return a number below {len(replicas)}, got {number}"
            )
        return int(number)

    return route


class RoundRobin:
    def __init__(self, world: object) -> None:
        self._turns = count()

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        return next(self._turns) % len(engines)


class Sticky:
    """A session stays on its first engine; new sessions go to the engines in turn."""

    def __init__(self, world: object) -> None:
        self._homes: dict[int, int] = {}

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        return self._homes.setdefault(request.session_id, len(self._homes) % len(engines))


class PrefixLoad:
    """The longest cached prefix among engines at most `slack` requests above the least busy."""

    slack = 8

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        loads = [each.num_requests for each in engines]

        def merit(number: int) -> tuple[int, int, int]:
            return engines[number].held_tokens(request), -loads[number], -number

        near = [each for each in range(len(engines)) if loads[each] <= min(loads) + self.slack]
        return max(near, key=merit)


class Scored:
    """The highest weighted sum of scores from 0 to 1, with llm-d's scores and weights.

    The scores are: queue length, 0 for the longest and 1 for the shortest (weight 2); the share of
    full KV memory that no request holds (2); the share of the prompt that the device holds (1); the
    share that device or host hold (1). The weights are those of llm-d's guide tiered-prefix-cache
    of June 2026. Among equal engines, the least recently chosen wins.
    """

    def __init__(self, world: object) -> None:
        self._turns = count(1)
        self._chosen: dict[int, int] = {}  # turn of the last choice, by engine

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        queues = [each.num_waiting for each in engines]
        spread = max(queues) - min(queues)

        def score(number: int) -> tuple[float, int]:
            replica = engines[number]
            queue = (max(queues) - queues[number]) / spread if spread else 1.0
            held = replica.held_tokens(request) + replica.held_tokens(request, on_device=True)
            total = 2 * queue + 2 * replica.free_share + held / request.prompt_len
            return total, -self._chosen.get(number, 0)

        best = max(range(len(engines)), key=score)
        self._chosen[best] = next(self._turns)
        return best


ROUTERS: dict[str, Callable[..., object]] = {
    "sticky": Sticky,
    "round_robin": RoundRobin,
    "prefix_load": PrefixLoad,
    "scored": Scored,
}
