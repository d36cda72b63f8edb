"""Entries: what a user's policy sees of the cache, and how it receives events.

An entry is the data of one kind of one tree node. Entries exist only in a run with `cache.policy`
other than lru, and only for data that the policy has been shown.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hicache.cache.checked import PolicyError, shown
from hicache.cache.kinds import FULL, Kinds
from hicache.cache.tree.eviction import Priority, Ranking, VictimQueue
from hicache.cache.tree.keys import PageNames
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES, TIERS, Node
from hicache.cache.tree.sequence import Sequence
from hicache.request import Request

Rank = float | tuple[Any, ...]
# why an entry's data left a tier
DEMOTED = "demoted"  # the other tier of device and host still holds it
EVICTED = "evicted"  # it was the victim, and neither tier holds it now
LOST = "lost"  # it left together with a victim that it needs, and neither tier holds it now


class Entry:
    """A piece of cached data that an eviction policy ranks: one node's data of one kind.

    A radix-tree node can have several entries, such as one for full-attention KV and one for a
    Mamba state. If the node is split, the entry keeps the last pages, and a new entry gets the
    first pages. Only `state` may be changed.

    Attributes:
        id: unique number in one engine. Data that is cached anew gets a new id.
        kind: "full", "swa" (sliding window) or "mamba".
        state: any value that the policy stores; None at first.
    """

    __slots__ = ("_entries", "_hits", "_kind", "_node", "id", "state")

    def __init__(self, entries: "Entries", node: Node, kind: int) -> None:
        self._entries = entries
        self._node = node
        self._kind = kind
        entries.last_id = self.id = entries.last_id + 1
        self._hits = 0
        self.state: Any = None

    @property
    def hits(self) -> int:
        """Return the number of requests that reused the data. Insertion is not a hit."""
        return self._hits

    @property
    def kind(self) -> str:
        return self._entries.kinds.names[self._kind]

    @property
    def created(self) -> int:
        """Return the number of this entry's radix-tree node in the order of creation.

        When a node is split, both halves keep the number.
        """
        return self._node.created

    @property
    def used(self) -> int:
        """Return the logical time at which the data was last used or inserted.

        The logical clock ticks at each match and at each insertion.
        """
        return self._node.aux_ticks[self._kind] if self._kind else self._node.tick

    @property
    def uses(self) -> int:
        """Return how many times a request has reused or inserted the entry's radix-tree node."""
        return self._node.uses

    @property
    def start(self) -> int:
        """Return the position in the prompt of the first token of this entry's radix-tree node."""
        return self._node.start * self._entries.kinds.page_size

    @property
    def end(self) -> int:
        """Return the position in the prompt after the last token of this entry's radix-tree node.

        A Mamba state covers all tokens before this position.
        """
        return self._node.end * self._entries.kinds.page_size

    @property
    def count(self) -> int:
        """Return how many pages the cached data occupies in a page pool; 1 for a Mamba state."""
        return self._entries.kinds.count(self._kind, self._node.num_pages)

    @property
    def bytes(self) -> int:
        """Return how many bytes the cached data occupies in host memory."""
        return self.count * self._entries.kinds.page_bytes[self._kind]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the tiers that hold the data: "device", "host", both or neither."""
        held = self._node.held
        return tuple(TIER_NAMES[tier] for tier in TIERS if held[tier][self._kind] is not None)

    @property
    def key(self) -> int:
        """Return a number that identifies the entry's content.

        Two entries have the same number if all tokens of their prompts are equal up to the end of
        the entry's first page (for a Mamba state: of its last page). The number is the same
        whenever the content is cached, also in other runs of the same workload.
        """
        node, names = self._node, self._entries.names
        place = node.num_pages - 1 if self._kind in self._entries.kinds.points else 0
        return names.contents(names.of_node(node, place)[:1])[0]

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the numbers of all pages of the node, as `on_miss` and a router get them."""
        names = self._entries.names
        return tuple(names.contents(names.of_node(self._node)))

    @property
    def parent(self) -> "Entry | None":
        """Return the entry of the same kind at the nearest ancestor node that holds such data.

        Return None if there is no such ancestor.
        """
        above, kind = self._node.parent, self._kind
        while above is not None and above.parent is not None:
            if above.held[DEVICE][kind] is not None or above.held[HOST][kind] is not None:
                return self._entries.of(above, kind)
            above = above.parent
        return None

    def __repr__(self) -> str:
        tiers = " and ".join(self.tiers) or "no tier"
        return f"<Entry {self.id}: {self.kind} [{self.start}, {self.end}) on {tiers}>"


class Evictable:
    """The entries that may be evicted now from one tier to make room for one kind of data.

    An entry is one radix-tree node's data of one kind, such as full-attention KV. The entries are
    of the kind that needs room, or of all kinds if the kinds share the tier's bytes. An eviction
    policy can iterate over the entries, or test with `in` whether an entry can be evicted.
    """

    def __init__(self, entries: "Entries", queues: Mapping[int, VictimQueue], tier: int) -> None:
        self._entries = entries
        self._queues = queues
        self._tier = tier

    def __contains__(self, entry: Entry) -> bool:
        node, kind = entry._node, entry._kind
        queue = self._queues.get(kind)
        return queue is not None and node in queue and not self._is_locked(node, kind)

    def _is_locked(self, node: Node, kind: int) -> bool:
        # queued leaves are unlocked; a window or state may have been locked after it was queued
        return kind != FULL and node.locks[self._tier][kind] > 0

    def __iter__(self) -> Iterator[Entry]:
        for kind, queue in self._queues.items():
            for node in queue:
                if not self._is_locked(node, kind):
                    yield self._entries.of(node, kind)


@dataclass(slots=True, kw_only=True)
class EntryPolicy:
    """Methods of a policy that rank entries for eviction, and those that are told of events.

    A method that is None decides nothing and is told nothing. `tier` is "device" or "host", `kind`
    is "full", "swa" or "mamba".

    Attributes:
        rank: (entry, tier, kind): the entry with the smallest rank is evicted first. A rank is a
            finite number, or a tuple of numbers, strings and tuples that Python can compare; None
            stands for the time of the last use. The cache asks at an eviction: for new entries, and
            again for the entry that was ranked smallest. So ranks may rise with time; if a rank
            falls, the entry keeps its old place in line. Example: `return entry.hits, entry.used`.
        victim: (tier, kind, need, queue): the entry of `queue` to evict for `need` pages (or
            states) of `kind`; None leaves it to the ranks. With `cache.pools=shared`, the host's
            queue has entries of all kinds. Example: `return next(iter(queue))`.
        on_insert: (entry, tier): the tier now holds the entry's data.
        on_hit: (entry, request): the request starts from the entry.
        on_miss: (keys, request): the request must compute whole pages of its prompt, which have
            these keys (`Entry.key`).
        on_split: (entry, first): the entry was split; `first` is a new entry of its first pages.
        on_evict: (entry, tier, why): the entry left the tier. `why` is "demoted" (the other of
            device and host still holds it), "evicted" (it was the victim) or "lost" (it left with
            a victim that it needs).
        on_arrive: (request): the request has reached the engine and will be queued, or rejected.
        on_finish: (request, outcome): the request is "finished", "rejected" or "aborted".
    """

    rank: Callable[[Entry, str, str], Rank | None] | None = None
    victim: Callable[[str, str, int, Evictable], Entry | None] | None = None
    on_insert: Callable[[Entry, str], object] | None = None
    on_hit: Callable[[Entry, Request | None], object] | None = None
    on_miss: Callable[[tuple[int, ...], Request | None], object] | None = None
    on_split: Callable[[Entry, Entry], object] | None = None
    on_evict: Callable[[Entry, str, str], object] | None = None
    on_arrive: Callable[[Request], object] | None = None
    on_finish: Callable[[Request, str], object] | None = None


class Entries:
    """Tells a policy about the data in a radix tree.

    The policy sees each node's data of one kind as an `Entry`. Events are passed on only if the
    policy has a method for them.
    """

    def __init__(self, policy: EntryPolicy, kinds: Kinds, names: PageNames) -> None:
        self.kinds = kinds
        self.names = names
        self.last_id = -1
        self._policy = policy

    def of(self, node: Node, kind: int) -> Entry:
        # made when it is first needed: most data of a run is never ranked or reused
        entry: Entry | None = node.entries.get(kind)
        if entry is None:
            if not node.entries:
                node.entries = {}
            entry = node.entries[kind] = Entry(self, node, kind)
        return entry

    # -- decisions ----------------------------------------------------------------------------

    def ranking(self, tier: int, kind: int, default: Ranking) -> Ranking:
        rank, tier_name, kind_name = self._policy.rank, TIER_NAMES[tier], self.kinds.names[kind]
        if rank is None:
            return default
        entry_of = self.of

        def priority(node: Node) -> Priority:
            given = rank(node.entries.get(kind) or entry_of(node, kind), tier_name, kind_name)
            if type(given) is tuple:
                return given
            return default(node) if given is None else (given,)

        return priority

    def victim(
        self, tier: int, kind: int, need: int, queues: Mapping[int, VictimQueue]
    ) -> tuple[Node, int] | None:
        """Return the node and the kind of data that the user's policy evicts from `tier`.

        The result is None if the policy leaves the choice to the order of the queues. `need` is the
        number of pages or state slots of `kind` to free. `queues` holds what may be evicted, by
        kind.

        Raises:
            PolicyError: the policy chose an entry that may not be evicted.
        """
        if self._policy.victim is None:
            return None
        offered = Evictable(self, queues, tier)
        chosen = self._policy.victim(TIER_NAMES[tier], self.kinds.names[kind], need, offered)
        if chosen is None:
            return None
        if not isinstance(chosen, Entry) or chosen not in offered:
            raise PolicyError(
                f"cache.policy: victim({TIER_NAMES[tier]}, {self.kinds.names[kind]}) must return "
                f"an entry of the queue or None, got {chosen!r:.200}"
            )
        return chosen._node, chosen._kind

    # -- events -------------------------------------------------------------------------------

    def inserted(self, node: Node, tier: int, kind: int) -> None:
        if self._policy.on_insert is not None:
            self._policy.on_insert(self.of(node, kind), TIER_NAMES[tier])

    def left(self, node: Node, tier: int, kind: int, *, is_victim: bool) -> None:
        if self._policy.on_evict is None:
            return
        is_kept = node.held[1 - tier][kind] is not None
        why = DEMOTED if is_kept else EVICTED if is_victim else LOST
        self._policy.on_evict(self.of(node, kind), TIER_NAMES[tier], why)

    def split(self, upper: Node, lower: Node) -> None:
        on_split = self._policy.on_split
        kinds = tuple(lower.entries) if on_split is None else self.kinds.numbers
        for kind in kinds:
            if any(upper.held[tier][kind] is not None for tier in TIERS):
                entry, first = self.of(lower, kind), self.of(upper, kind)
                first._hits = entry.hits
                if on_split is not None:
                    on_split(entry, first)

    def started(self, node: Node, sequence: Sequence) -> None:
        nodes, request = list(node.path()), shown(sequence.request)
        self._hit(nodes, FULL, request)
        for kind, window in self.kinds.windows:
            self._hit(list(node.path(window.first(node.end))), kind, request)
        for kind in self.kinds.points:
            self._hit(nodes[:1], kind, request)
        if self._policy.on_miss is not None:
            names = self.names
            num_pages = len(sequence.tokens) // names.page_bytes
            if request is not None:
                num_pages = min(num_pages, request.prompt_len // self.kinds.page_size)
            missed = names.of_span(node, sequence, max(num_pages - node.end, 0))
            self._policy.on_miss(tuple(names.contents(missed)), request)

    def arrived(self, request: Request) -> None:
        if self._policy.on_arrive is not None:
            self._policy.on_arrive(shown(request))

    def finished(self, request: Request, outcome: str) -> None:
        if self._policy.on_finish is not None:
            self._policy.on_finish(shown(request), outcome)

    def _hit(self, nodes: list[Node], kind: int, request: Request | None) -> None:
        on_hit = self._policy.on_hit
        for node in nodes:
            entry = self.of(node, kind)
            entry._hits += 1
            if on_hit is not None:
                on_hit(entry, request)
