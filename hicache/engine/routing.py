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


ROUTERS: dict[str, Callable[[], RoundRobin | Sticky | PrefixLoad]] = {
    "sticky": Sticky,
    "round_robin": RoundRobin,
    "prefix_load": PrefixLoad,
}
