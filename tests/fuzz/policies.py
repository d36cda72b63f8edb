"""Policies as a user would write them, named in scenarios as module:Class."""

from collections import Counter, deque
from collections.abc import Sequence

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Load
from hicache.cache.tree.entry import Entry, Evictable
from hicache.policies.routing import Replica
from hicache.policies.world import World
from hicache.request import Request


class FirstQuarter:
    """Lets a request start with a quarter of its prefetch; it is asked after every page."""

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.completed_pages >= prefetch.asked_pages / 4 or prefetch.is_complete


class UntilPagesCome:
    """Lets a request start as long as no page has come, and makes it wait afterwards."""

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.restorable is not None and prefetch.completed_pages == 0


class Ledger:
    """A policy that changes nothing and compares its events with what the entries hold."""

    def __init__(self, world: World, *, victims: float = 0) -> None:
        self.world = world
        self.held: dict[Entry, set[str]] = {}
        self.hits: Counter[Entry] = Counter()
        self.ended: Counter[str] = Counter()
        LEDGERS.append(self)
        if not victims:
            self.victim = None  # nothing that can be called is no method

    def on_insert(self, entry: Entry, tier: str) -> None:
        tiers = self.held.setdefault(entry, set())
        assert tier not in tiers, f"{entry} came to {tier} twice"
        tiers.add(tier)
        self.check(entry)

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self.held[entry].remove(tier)
        assert (why == "demoted") == bool(self.held[entry])
        self.check(entry)

    def on_split(self, entry: Entry, first: Entry) -> None:
        assert first not in self.held
        assert first.end == entry.start
        self.held[first] = set(self.held[entry])
        self.hits[first] = self.hits[entry]
        self.check(entry)
        self.check(first)

    def on_hit(self, entry: Entry, request: Request) -> None:
        assert self.held[entry]
        self.hits[entry] += 1
        self.check(entry)

    def on_finish(self, request: Request, outcome: str) -> None:
        self.ended[outcome] += 1
        for entry in self.held:
            self.check(entry)

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        """Return the entry that a run without this policy would evict."""
        assert need > 0
        return min(queue, key=lambda entry: (entry.used, entry.end), default=None)

    def check(self, entry: Entry) -> None:
        assert set(entry.tiers) == self.held[entry]
        assert entry.hits == self.hits[entry]


LEDGERS: deque[Ledger] = deque(maxlen=16)  # of the last runs, one for each tree


class Contrary:
    """Decides everything by a hash of the content of entries."""

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[int, ...]:
        return entry.key * 7919 % 1009, entry.id

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        return max(queue, key=lambda entry: (entry.key % 31, entry.id), default=None)

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool | None:
        return (None, True, True, False)[(entry.key + len(load.moment)) % 4]

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int] | None:
        return None if start % 3 == 0 else [(start + end) // 2, end]

    def route(self, request: Request, engines: Sequence[Replica]) -> int:
        return request.id * 7 % len(engines)


class ContraryDemotion(Contrary):
    """Also copies what the device evicts, or some of it."""

    demotes = True
