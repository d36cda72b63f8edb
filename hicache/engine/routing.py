"""Which of several engines serves a request. Fixed rules: routing is not what is studied here."""

from collections.abc import Callable, Sequence
from itertools import count

from hicache.engine.loop import Engine
from hicache.request import Request


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def route(self, request: Request, engines: Sequence[Engine]) -> int:
        """The engine after the last one."""
        return next(self._turns) % len(engines)


class Sticky:
    """A session stays where it began; sessions are dealt out evenly."""

    def __init__(self) -> None:
        self._homes: dict[int, int] = {}

    def route(self, request: Request, engines: Sequence[Engine]) -> int:
        """The session's engine."""
        return self._homes.setdefault(request.session_id, len(self._homes) % len(engines))


class PrefixLoad:
    """The longest match, unless that engine has much more to do than the idlest one."""

    def __init__(self, *, slack: int = 8) -> None:
        self._slack = slack

    def route(self, request: Request, engines: Sequence[Engine]) -> int:
        """The best match among engines at most `slack` requests busier than the least busy."""
        loads = [each.num_requests for each in engines]
        tokens = engines[0].cache.tree.names.tokens(request)

        def merit(number: int) -> tuple[int, int, int]:
            tree = engines[number].cache.tree
            held_len = tree.usable_len(tokens, request.prompt_len - 1, request.namespace)
            return held_len, -loads[number], -number

        near = [each for each in range(len(engines)) if loads[each] <= min(loads) + self._slack]
        return max(near, key=merit)


class Scored:
    """The highest weighted sum of scores from 0 to 1, with llm-d's scores and weights.

    The scores are how short the queue is, from 0 for the longest to 1 for the shortest (weight 2),
    the share of full KV memory that no request holds (2), the share of the prompt that the device
    holds (1), and the share that device or host hold (1). The weights are those of llm-d's guide
    tiered-prefix-cache of June 2026. Of equal engines the one chosen longest ago is taken.
    """

    def __init__(self) -> None:
        self._turns = count(1)
        self._chosen: dict[int, int] = {}  # by engine: the turn

    def route(self, request: Request, engines: Sequence[Engine]) -> int:
        """The engine of the highest score."""
        queues = [len(each.scheduler.waiting) for each in engines]
        spread = max(queues) - min(queues)
        names = engines[0].cache.tree.names
        prompt = names.tokens(request), request.prompt_len - 1, request.namespace

        def score(number: int) -> tuple[float, int]:
            cache = engines[number].cache
            capacity = cache.device_pages
            free = 1.0 if capacity is None else cache.room() / (capacity * cache.page_size)
            queue = (max(queues) - queues[number]) / spread if spread else 1.0
            held = cache.tree.usable_len(*prompt) + cache.tree.usable_len(*prompt, on_device=True)
            total = 2 * queue + 2 * free + held / request.prompt_len
            return total, -self._chosen.get(number, 0)

        best = max(range(len(engines)), key=score)
        self._chosen[best] = next(self._turns)
        return best


ROUTERS: dict[str, Callable[[], RoundRobin | Sticky | PrefixLoad | Scored]] = {
    "sticky": Sticky,
    "round_robin": RoundRobin,
    "prefix_load": PrefixLoad,
    "scored": Scored,
}
