"""Routers: which of several engines serves a request."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from inspect import signature
from itertools import count, islice
from typing import Protocol

from hicache.cache.checked import PolicyError
from hicache.cache.tree.lookup import usable_len
from hicache.cache.tree.node import make_root
from hicache.cache.tree.sequence import Sequence
from hicache.request import TOKEN_BYTES, Request
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
    def device_blocks(self) -> tuple[int, int | None]:
        """Return the tokens of a page, and how many pages the device has; None means unlimited."""
        return self._cache.page_size, self._cache.device_pages

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

    def keys(self, request: Request) -> tuple[int, ...]:
        """Return the keys (`Entry.key`) of the whole pages of a prompt, without its last token."""
        tree, most = self._cache.tree, (request.prompt_len - 1) // self._cache.page_size
        root, prompt = make_root(request.namespace, 1), Sequence(tree.names.tokens(request))
        return tuple(tree.names.contents(tree.names.of_span(root, prompt, most)))


Route = Callable[[Request, Items[Replica]], int]


class Router(Protocol):
    def route(self, request: Request, engines: Items[Replica]) -> int: ...


def router_of(choose: Route, replicas: Items[Replica]) -> Callable[[Request], int]:
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

    def route(self, request: Request, engines: Items[Replica]) -> int:
        return next(self._turns) % len(engines)


class Sticky:
    """Routes all requests of a session to one engine; new sessions go to the engines in turn."""

    def __init__(self) -> None:
        self._homes: dict[int, int] = {}

    def route(self, request: Request, engines: Items[Replica]) -> int:
        return self._homes.setdefault(request.session_id, len(self._homes) % len(engines))


class PrefixLoad:
    """Routes a request to the engine whose cache holds the longest prefix of its prompt.

    Only some engines are considered: those with at most `slack` requests more than the engine with
    the fewest requests. Among engines with equal prefixes, the one with fewer requests wins.
    """

    def __init__(self, *, slack: float = 8) -> None:
        self._slack = slack

    def route(self, request: Request, engines: Items[Replica]) -> int:
        loads = [each.num_requests for each in engines]

        def merit(number: int) -> tuple[int, int, int]:
            return engines[number].held_tokens(request), -loads[number], -number

        near = [each for each in range(len(engines)) if loads[each] <= min(loads) + self._slack]
        return max(near, key=merit)


class Scored:
    """Routes a request to the engine with the highest weighted sum of four scores.

    Each score lies between 0 and 1, and each argument is the weight of one:

    - queue: 1 for the engine with the fewest waiting requests, 0 for the one with the most;
    - memory: the fraction of the full-attention KV pool that no request holds;
    - device: the fraction of the prompt that the device holds;
    - cache: the fraction of the prompt that the device or the host holds.

    The scores and weights are those of the guide "tiered-prefix-cache" of llm-d (June 2026). Among
    equal engines, the least recently chosen one wins.
    """

    def __init__(
        self, *, queue: float = 2, memory: float = 2, device: float = 1, cache: float = 1
    ) -> None:
        self._queue, self._memory = queue, memory
        self._device, self._cache = device, cache
        self._turns = count(1)
        self._chosen: dict[int, int] = {}  # turn of the last choice, by engine

    def held_score(self, request: Request, engines: Items[Replica]) -> list[float]:
        """Return the weighted scores of each engine for what it holds of the prompt."""
        scores = []
        for each in engines:
            held = self._cache * each.held_tokens(request) if self._cache else 0
            held += self._device * each.held_tokens(request, on_device=True)
            scores.append(held / request.prompt_len)
        return scores

    def route(self, request: Request, engines: Items[Replica]) -> int:
        queues = [each.num_waiting for each in engines]
        spread = max(queues) - min(queues)
        held = self.held_score(request, engines)

        def score(number: int) -> tuple[float, int]:
            queue = (max(queues) - queues[number]) / spread if spread else 1.0
            free = self._memory * engines[number].free_share
            total = self._queue * queue + free + held[number]
            return total, -self._chosen.get(number, 0)

        best = max(range(len(engines)), key=score)
        self._chosen[best] = next(self._turns)
        return best


class Approximate(Scored):
    """Routes like `Scored`, but estimates what an engine holds from the prompts it has sent there.

    It keeps two indexes, and no engine reports what it evicts. That of `device` has the pages of
    the device, in number and size. That of `cache` remembers, for each engine, the last `blocks`
    blocks of `block_tokens` tokens. Both look at the first `most_blocks` blocks of a prompt.

    The defaults are those of llm-d's configuration "tiered-prefix-cache-cpu" (41,000 blocks, weight
    2 of queue and memory) and of its plugin approximateprefix (blocks of 16 tokens, 256 a prompt).
    """

    def __init__(
        self, *, queue: float = 2, memory: float = 2, device: float = 1, cache: float = 1,
        blocks: float = 41000, block_tokens: float = 16, most_blocks: float = 256,
    ) -> None:  # fmt: skip
        super().__init__(queue=queue, memory=memory, device=device, cache=cache)
        self._blocks = int(block_tokens), int(blocks)
        self._most_blocks = int(most_blocks)
        self._indexes: list[tuple[OrderedDict[int, None], ...]] = []  # by engine: device, cache

    def held_score(self, request: Request, engines: Items[Replica]) -> list[float]:
        self._indexes = self._indexes or [(OrderedDict(), OrderedDict()) for _ in engines]
        sizes = engines[0].device_blocks[0], self._blocks[0]
        self._keys = [[*islice(block_keys(request, size), self._most_blocks)] for size in sizes]
        weights = self._device, self._cache
        return [
            sum(
                weight * next((i for i, key in enumerate(keys) if key not in index), len(keys))
                / max(len(keys), 1)
                for weight, keys, index in zip(weights, self._keys, indexes, strict=True)
            )
            for indexes in self._indexes
        ]  # fmt: skip

    def route(self, request: Request, engines: Items[Replica]) -> int:
        best = super().route(request, engines)
        most = engines[best].device_blocks[1], self._blocks[1]
        for keys, index, limit in zip(self._keys, self._indexes[best], most, strict=True):
            for key in keys:
                index[key] = None
                index.move_to_end(key)
            while limit is not None and len(index) > limit:
                index.popitem(last=False)
        return best


def block_keys(request: Request, block_tokens: int) -> Iterator[int]:
    """Yield a key for each whole block of a prompt, which depends on all tokens up to its end."""
    tokens, size = request.prompt.to_bytes(), block_tokens * TOKEN_BYTES
    key = hash(request.namespace)
    for end in range(size, len(tokens) + 1, size):
        key = hash((key, tokens[end - size : end]))
        yield key


# scored_device: the guide "inference-scheduling" of llm-d (086f217d) knows the devices only
ROUTERS: dict[str, Callable[..., Router]] = {
    "sticky": Sticky,
    "round_robin": RoundRobin,
    "prefix_load": PrefixLoad,
    "scored": Scored,
    "scored_device": partial(Scored, device=3, cache=0),
    "approximate": Approximate,
}


def router_named(name: str, arguments: Mapping[str, float]) -> Router:
    """Return a new router.

    Raises:
        ValueError: the router has no such arguments.
    """
    router = ROUTERS[name]
    known = signature(router).parameters
    if unknown := arguments.keys() - known:
        raise ValueError(
            f"parallel.router_args: {name} takes {', '.join(known) or 'none'}, "
            f"got {', '.join(sorted(unknown))}"
        )
    return router(**arguments)
