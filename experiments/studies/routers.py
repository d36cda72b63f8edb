"""Routers that know less, or measure more, than the built-in ones (docs/routing.md).

hicache run cache.policy=experiments.studies.routers:Events cache.policy_args.late_s=1 ...

All route as `hicache.policies.routing.Scored`, with a weight of 3 for the cached prefix.
"""

from collections import deque
from collections.abc import Sequence
from random import Random
from weakref import WeakKeyDictionary

from hicache.cache.tree.entry import Entry
from hicache.clock import to_ns
from hicache.policies.routing import Replica, Scored
from hicache.policies.world import World
from hicache.request import Request

PREFIX = 3.0  # weight of the cached prefix, as in llm-d's guide "inference-scheduling"


class Measured(Scored):
    """Credits a token on the host with the share of its computing time that a load-back saves.

    The computing time is measured by the first engine. The time of a load-back is that of the
    token's bytes on the host's link.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._rates = world.rates
        link = world.config.hardware.pcie_bandwidth.value * (world.config.parallel.tp or 1)
        self._load_ns = 1e9 * world.unit_bytes["host"]["full"] / world.page_size / link

    def held_score(self, request: Request, engines: Sequence[Replica]) -> list[float]:
        compute_ns = self._rates.compute_ns(1)
        self._cache = PREFIX * (max(1 - self._load_ns / compute_ns, 0) if compute_ns else 1)
        self._device = PREFIX - self._cache
        return super().held_score(request, engines)


class Index:
    """What a router knows of one engine: the keys of pages that events said it holds, by tier."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"device": set(), "host": set()}
        self.coming: deque[tuple[int, str, bool, tuple[int, ...]]] = deque()

    def catch_up(self, now_ns: int) -> None:
        while self.coming and self.coming[0][0] <= now_ns:
            _, tier, is_stored, keys = self.coming.popleft()
            if is_stored:
                self.held[tier].update(keys)
            else:
                self.held[tier].difference_update(keys)


# by the clock that the engines of a run share: the index of each engine, in their order
RUNS: "WeakKeyDictionary[object, list[Index]]" = WeakKeyDictionary()


class Events(Scored):
    """Routes by an index that the engines' events fill, as llm-d's and Dynamo's routers do.

    An event says that a tier now holds pages, or no longer does. It arrives `late_s` seconds late,
    and the fraction `lost` never does. `weight` is the credit of a token on the host. With `tiers`
    0, a page counts as gone when it leaves the device, as for a router that is not told the tier.
    """

    def __init__(
        self, world: World, *, weight: float = 0.8, late_s: float = 0, lost: float = 0,
        tiers: float = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self._weight, self._late_ns, self._lost = weight, to_ns(late_s), lost
        self._has_tiers = bool(tiers)
        clock = world.now_ns.__self__  # type: ignore[attr-defined]
        self._now_ns, self._all = world.now_ns, RUNS.setdefault(clock, [])
        self._random = Random(f"{world.seed} {len(self._all)}")
        self._own = Index()
        self._all.append(self._own)

    def on_insert(self, entry: Entry, tier: str) -> None:
        self._tell(entry, tier, is_stored=True)

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self._tell(entry, tier, is_stored=False)

    def _tell(self, entry: Entry, tier: str, *, is_stored: bool) -> None:
        if entry.kind != "full" or (tier == "host" and not self._has_tiers):
            return
        if self._lost and self._random.random() < self._lost:
            return
        event = self._now_ns() + self._late_ns, tier, is_stored, entry.keys
        self._own.coming.append(event)

    def held_score(self, request: Request, engines: Sequence[Replica]) -> list[float]:
        keys, scores = engines[0].keys(request), []
        size = engines[0].device_blocks[0]
        for index in self._all:
            index.catch_up(self._now_ns())
            device, host = index.held["device"], index.held["host"]
            gone = [place for place, key in enumerate(keys) if key not in device]
            ready = gone[0] if gone else len(keys)
            held = next((place for place in gone if keys[place] not in host), len(keys))
            score = ready + self._weight * (held - ready)
            scores.append(PREFIX * score * size / request.prompt_len)
        return scores


# by the clock that the engines of a run share: the keys of prompts
READS: "WeakKeyDictionary[object, dict[int, tuple[int, ...]]]" = WeakKeyDictionary()


class Reads(Scored):
    """Lets an engine read from a shared store only what has been on its own host before.

    So it reads as from a store of its own. `weight` is as in `Events`.
    """

    def __init__(self, world: World, *, weight: float = 0.8) -> None:
        super().__init__(device=PREFIX * (1 - weight), cache=PREFIX * weight)
        self._prompts = READS.setdefault(world.now_ns.__self__, {})  # type: ignore[attr-defined]
        self._own: set[int] = set()
        self._page = world.page_size

    def on_insert(self, entry: Entry, tier: str) -> None:
        if tier == "host" and entry.kind == "full":
            self._own.update(entry.keys)

    def held_score(self, request: Request, engines: Sequence[Replica]) -> list[float]:
        self._prompts[request.id] = engines[0].keys(request)
        return super().held_score(request, engines)

    def prefetch(self, request: Request, held: int, restorable: object, load: object) -> int:
        keys = self._prompts[request.id][held // self._page :]
        missing = (n for n, key in enumerate(keys) if key not in self._own)
        return self._page * next(missing, len(keys))
