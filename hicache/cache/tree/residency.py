"""What each node holds on each tier, which of it is locked, and what is evicted next.

Only `Residency` writes a node's `held`, `locks`, `path_locks`, `aux_ticks` and `num_children`. Its
counts and queues equal their definitions, recomputed from the nodes. One exception: a window or
state that was locked later stays queued until it reaches the top.
"""

from collections.abc import Sequence

from hicache.cache.checked import PolicyError
from hicache.cache.kinds import FULL, Kinds
from hicache.cache.pages import FreePages, PageIds
from hicache.cache.tree.entry import Entries
from hicache.cache.tree.events import NO_DEMAND, CacheListener, Demand
from hicache.cache.tree.eviction import Ranking, VictimQueue
from hicache.cache.tree.node import DEVICE, HOST, NO_END, TIER_NAMES, TIERS, Lock, Node
from hicache.rules import Rules


def by_last_use(kind: int, *, is_tail_first: bool = False) -> Ranking:
    if kind == FULL:
        return lambda node: (node.tick,)
    if is_tail_first:
        return lambda node: (node.aux_ticks[kind], -node.end)
    # the first node of a window that spans several nodes goes first
    return lambda node: (node.aux_ticks[kind], node.end)


def by_position(kind: int) -> Ranking:
    # vLLM's order on the host: what a request used, of all kinds, from its last page on
    # (`kv_offload/cpu/policies/base.py`, line 10)
    return lambda node: (node.host_ticks[kind] or node.tick, -node.end)


class Residency:
    """Records which data each radix-tree node holds on each tier, and which nodes can be evicted.

    - `resident`: number of pages or state slots held, by tier and kind of data.
    - `protected`: how many of these are locked.
    - `queues`: nodes that may be evicted, by tier and kind of data. For full-attention KV, these
      are the unlocked leaf nodes. For other kinds, they are the nodes with unlocked data.
    - `duplicates`: nodes with full-attention KV on device and host, whose host copy is unlocked.
      The list is empty unless `reclaims_duplicates` is on.

    On the host, the queues hold only data that the device does not hold, unless `evicts_mirrors` is
    on.
    """

    def __init__(
        self,
        kinds: Kinds,
        *,
        reclaims_duplicates: bool,
        evicts_mirrors: bool = False,
        trims: bool = False,
        rules: Rules | None = None,
        listener: CacheListener | None = None,
        entries: Entries | None = None,
    ) -> None:
        # `entries`: None without a user's policy
        self.resident = ([0] * kinds.size, [0] * kinds.size)
        self.protected = ([0] * kinds.size, [0] * kinds.size)

        def queue(tier: int, kind: int) -> VictimQueue:
            order = by_last_use(kind, is_tail_first=trims)
            if trims and tier == HOST:
                order = by_position(kind)
            return VictimQueue(order if entries is None else entries.ranking(tier, kind, order))

        self.queues = tuple([queue(tier, kind) for kind in range(kinds.size)] for tier in TIERS)
        self._leaves = [queues[FULL] for queues in self.queues]
        self._entries = entries
        self.duplicates: dict[Node, None] = {}
        self._listener = listener
        self.tick = 0  # logical time, advanced by each match and each insertion
        self._paged = kinds.paged
        self._windows, self._trims = kinds.windows, trims
        # which kind leaves first of several of one rank: in vLLM, a state before the KV of its page
        # (`kv_offload/cpu/policies/lru.py`, line 163)
        self._order = (*kinds.points, *kinds.paged) if trims else kinds.numbers
        self._points = kinds.points
        self._aux = kinds.aux
        self._reclaims_duplicates = reclaims_duplicates
        self._evicts_mirrors = evicts_mirrors
        self._frees_copies = reclaims_duplicates or evicts_mirrors
        # windows and states that only the host holds are ordered by the time at which they left the
        # device or their last lock ended, not by their last use; locked ones have no place
        self._leaving_refreshes = rules is not None and rules.leaving_refreshes
        # duplicates leave before host leaves, in the order of their first copies; a node keeps its
        # place when it leaves the device
        self._duplicates_first = rules is not None and rules.evicts_whole

    # -- recency ------------------------------------------------------------------------------

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def touch_windows(self, node: Node) -> None:
        for kind, window in () if self._trims else self._windows:  # else when they are freed
            above, edge = node, window.first(node.end - 1)
            while above.end > edge and above.parent is not None:
                self._touch(above, kind)
                above = above.parent

    def touch_states(self, node: Node) -> None:
        for kind in () if self._trims else self._points:
            self._touch(node, kind)

    def leave_state(self, node: Node) -> None:
        """Mark the state of `node` as just used by a request that no longer needs it."""
        for kind in self._points if self._trims else ():
            node.aux_ticks[kind] = self.next_tick()

    def _touch(self, node: Node, kind: int) -> None:
        if node.held[DEVICE][kind] is not None or not self._leaving_refreshes:
            node.aux_ticks[kind] = self.tick

    # -- holding ------------------------------------------------------------------------------

    def put(self, node: Node, tier: int, kind: int, page_ids: PageIds) -> None:
        """Record that a tier now holds a node's data of one kind, in the pages `page_ids`.

        The tier must not hold the data yet. The copy that fills the pages may still be running.
        """
        assert node.held[tier][kind] is None
        node.held[tier][kind] = page_ids
        if self._listener is not None:
            self._listener.put(node, tier, kind)
        self.resident[tier][kind] += len(page_ids)
        if node.path_locks if tier == DEVICE and kind == FULL else node.locks[tier][kind]:
            self.protected[tier][kind] += len(page_ids)
        if kind != FULL and (tier == DEVICE or node.held[DEVICE][kind] is None):
            node.aux_ticks[kind] = self.next_tick()
        if self._trims and tier == HOST:
            if node.host_ticks is node.aux_ticks:
                node.host_ticks = node.aux_ticks.copy()
            node.host_ticks[kind] = 0
        if self._entries is not None:
            self._entries.inserted(node, tier, kind)
        self._changed(node, tier, kind, 1)

    def drop(
        self,
        node: Node,
        tier: int,
        kind: int,
        actions: list[FreePages],
        demand: Demand = NO_DEMAND,
        *,
        is_victim: bool = False,
    ) -> None:
        """Remove a node's data of one kind from a tier, and add the pages to `actions`.

        The caller then frees the pages in `actions`. The data must not be locked. If the tier does
        not hold the data, nothing happens. `demand` says what the space is for. `is_victim` is True
        if this data was chosen for eviction. It is False if the data leaves because of other data.
        """
        page_ids = node.held[tier][kind]
        if page_ids is None:
            return
        locks = node.path_locks if tier == DEVICE and kind == FULL else node.locks[tier][kind]
        assert not locks, f"{node} is locked and may not be evicted"
        node.held[tier][kind] = None
        if self._listener is not None:
            self._listener.evicted(node, tier, kind, demand)
        self.resident[tier][kind] -= len(page_ids)
        actions.append(FreePages(tier, kind, page_ids))
        if self._leaving_refreshes and tier == DEVICE:
            for each in self._aux if kind == FULL else (kind,):
                if node.held[HOST][each] is not None and (each == kind or not node.aux_ticks[each]):
                    node.aux_ticks[each] = self.next_tick()
        if self._entries is not None:
            self._entries.left(node, tier, kind, is_victim=is_victim)
        self._changed(node, tier, kind, -1)

    def split(self, upper: Node, lower: Node) -> None:
        pages = upper.num_pages
        upper.path_locks = int(lower.path_locks > 0)
        if lower.host_ticks is not lower.aux_ticks:
            upper.host_ticks = lower.host_ticks.copy()
        for kind in self._paged:
            upper.aux_ticks[kind] = lower.aux_ticks[kind]
            for tier in TIERS:
                upper.locks[tier][kind] = lower.locks[tier][kind]
                page_ids = lower.held[tier][kind]
                if page_ids is not None:
                    upper.held[tier][kind] = page_ids[:pages]
                    lower.held[tier][kind] = page_ids[pages:]
        upper.num_children = [int(held[FULL] is not None) for held in lower.held]
        if self._entries is not None:
            self._entries.split(upper, lower)
        self.refresh(upper)
        for kind, _ in self._windows:
            for tier in TIERS:
                self._refresh_sidecar(upper, tier, kind)

    def refresh(self, node: Node) -> None:
        # update the leaf queues after a change to a node or its children. O(log n)
        device, host = node.held
        on_device, on_host = self._leaves
        is_there = device[FULL] is not None
        is_free = not node.path_locks and node.parent is not None
        if is_free and is_there and not node.num_children[DEVICE]:
            on_device.add(node)
        elif node in on_device:
            del on_device[node]
        may_leave = self._evicts_mirrors and node.parent is not None if is_there else is_free
        is_leaf = may_leave and not node.num_children[HOST]
        if is_leaf and host[FULL] is not None and not any(node.locks[HOST]):
            on_host.add(node)
        elif node in on_host:
            del on_host[node]
        if self._reclaims_duplicates:
            # in SGLang's order, locks of windows and states do not count
            locks = node.locks[HOST][: 1 if self._duplicates_first else None]
            if is_there and host[FULL] is not None and not any(locks):
                self.duplicates.setdefault(node)
            elif not self._duplicates_first or host[FULL] is None:
                self.duplicates.pop(node, None)

    # -- locking ------------------------------------------------------------------------------

    def lock_path(
        self, node: Node, reads_from: Sequence[int] | None = None, end: int = NO_END
    ) -> Sequence[tuple[int, int]]:
        """Protect the prefix that ends at `node` from eviction from the device.

        The call locks the full-attention KV of the whole prefix. It also locks the sliding windows
        at the end of the prefix, or from the pages `reads_from` on, by kind, to page `end`, and the
        Mamba state of `node`. Return one pair (kind of data, first locked page) per sliding window.
        """
        above = node
        while not above.path_locks and above.parent is not None:
            above.path_locks = 1
            above = above.parent
        above.path_locks += 1
        if above is not node:
            self._count_path(node, above, 1)
        for kind in self._points:
            self._lock_aux(node, kind, node.start)
        starts, last = [], node if node.end <= end else _before(node, end)
        for kind, window in self._windows:
            edge = window.first(node.end) if reads_from is None else reads_from[kind]
            starts.append((kind, self._lock_aux(last, kind, edge)))
        return starts

    def release_path(self, lock: Lock) -> None:
        _, node, starts, end = lock
        assert node.path_locks, f"{node} is released more often than it was locked"
        above = node
        above.path_locks -= 1
        while not above.path_locks and above.parent is not None:
            above = above.parent
            above.path_locks -= 1
        if above is not node:
            self._count_path(node, above, -1)
        for kind in self._points:
            self._release_aux(node, kind, node.start)
        last = node if node.end <= end else _before(node, end)
        for kind, start in starts:
            self._release_aux(last, kind, start)

    def count_host_locks(self, lock: Lock, change: int) -> None:
        _, node, starts, _ = lock
        for kind, start in starts:
            above = node
            first = node.start if kind in self._points else start
            while above.start >= first and above.parent is not None:
                locks = above.locks[HOST]
                before = locks[kind]
                locks[kind] = after = before + change
                assert after >= 0, f"{above} is released more often than it was locked"
                is_alone = kind != FULL and above.held[DEVICE][kind] is None
                if self._leaving_refreshes and is_alone:
                    if not before:
                        above.aux_ticks[kind] = 0
                    elif not after and not above.aux_ticks[kind]:
                        above.aux_ticks[kind] = self.next_tick()
                if not (before and after):
                    self._host_lock_changed(above, kind, change)
                above = above.parent

    # -- leaving ------------------------------------------------------------------------------

    def victim(
        self, tier: int, kind: int, need: int, among: Sequence[int]
    ) -> tuple[Node, int] | None:
        """Return the data that a tier evicts next, as node and kind, or None if none can leave.

        `need` is the number of pages or state slots of `kind` that must become free. `among` lists
        the kinds that may leave for it, ascending.
        """
        queues = self.queues[tier]
        if self._entries is not None:
            offered = {each: queues[each] for each in among}
            chosen = self._entries.victim(tier, kind, need, offered)
            if chosen is not None:
                return chosen
            try:
                return self._first_of(tier, among)
            except TypeError as error:
                raise PolicyError(
                    f"cache.policy: ranks on the {TIER_NAMES[tier]} cannot be compared: {error}"
                ) from error
        return self._first_of(tier, among)

    def _first_of(self, tier: int, among: Sequence[int]) -> tuple[Node, int] | None:
        queues = self.queues[tier]
        spared = self._duplicate() if self.duplicates and tier == HOST and FULL in among else None
        if spared is not None and self._duplicates_first:
            return spared, FULL
        order = among if len(among) == 1 else [each for each in self._order if each in among]
        firsts = [(node, each) for each in order if (node := self._first(tier, each)) is not None]
        if len(firsts) > 1:
            return min(firsts, key=lambda found: queues[found[1]].priority(found[0]))
        if firsts:
            return firsts[0]
        return None if spared is None else (spared, FULL)

    def reconsider(self, node: Node, kind: int) -> None:
        if kind == FULL:
            self.refresh(node)
        else:
            self._refresh_sidecar(node, DEVICE, kind)

    # -- inside -------------------------------------------------------------------------------

    def _changed(self, node: Node, tier: int, kind: int, change: int) -> None:
        # after a put (1) or a drop (-1)
        if kind != FULL:
            self._refresh_sidecar(node, tier, kind)
            if tier == DEVICE and node.held[HOST][kind] is not None:
                self._refresh_sidecar(node, HOST, kind)  # only if the device has none
            return
        parent = node.parent
        if parent is not None:
            parent.num_children[tier] += change
            if parent.num_children[tier] == (change > 0):  # the first came or the last one went
                self.refresh(parent)
        # with full KV on the device, the host copy is evictable only if such copies are freed
        if tier == DEVICE or node.held[DEVICE][FULL] is None or self._frees_copies:
            self.refresh(node)

    def _count_path(self, node: Node, above: Node, change: int) -> None:
        # update after a path was locked (1) or released (-1) from `node` to below `above`; only the
        # deepest nodes of the path on each tier can be leaves
        lowest = node
        while node is not above and node.held[DEVICE][FULL] is None:
            assert node.parent is not None
            node = node.parent
        for leaf in dict.fromkeys([lowest, node]):
            if change > 0 and not self._evicts_mirrors:
                for queue in self._leaves:
                    queue.pop(leaf, None)
            else:
                self.refresh(leaf)
        self.protected[DEVICE][FULL] += (node.end - above.end) * change

    def _lock_aux(self, node: Node, kind: int, start: int) -> int:
        # lock a window or state from page `start` on; return the first page of its first node
        num_pages, end = 0, node.end
        while node.end > start and (parent := node.parent) is not None:
            locks = node.locks[DEVICE]
            locks[kind] += 1
            if locks[kind] == 1 and (page_ids := node.held[DEVICE][kind]) is not None:
                num_pages += len(page_ids)  # `victim` removes the node from the queue
            node, end = parent, node.start
        self.protected[DEVICE][kind] += num_pages
        return end

    def _release_aux(self, node: Node, kind: int, start: int) -> None:
        num_pages, queue = 0, self.queues[DEVICE][kind]
        while node.start >= start and (parent := node.parent) is not None:
            locks = node.locks[DEVICE]
            locks[kind] -= 1
            if not locks[kind] and (page_ids := node.held[DEVICE][kind]) is not None:
                num_pages += len(page_ids)
                if node not in queue:
                    queue.add(node)
            node = parent
        self.protected[DEVICE][kind] -= num_pages

    def _host_lock_changed(self, node: Node, kind: int, change: int) -> None:
        # after the first lock (1) or the release of the last one (-1)
        device, page_ids = node.held[DEVICE], node.held[HOST][kind]
        if page_ids is not None:
            self.protected[HOST][kind] += len(page_ids) * change
        if kind != FULL and (device[kind] is None or self._evicts_mirrors):
            self._refresh_sidecar(node, HOST, kind)
        if device[FULL] is None or self._frees_copies:
            self.refresh(node)

    def _first(self, tier: int, kind: int) -> Node | None:
        queue = self.queues[tier][kind]
        node = queue.best()
        while kind != FULL and node is not None and node.locks[tier][kind]:
            queue.pop(node, None)  # locked after it was queued; its release adds it again
            node = queue.best()
        return node

    def _refresh_sidecar(self, node: Node, tier: int, kind: int) -> None:
        evictable = (
            node.held[tier][kind] is not None
            and not node.locks[tier][kind]
            and (tier == DEVICE or node.held[DEVICE][kind] is None or self._evicts_mirrors)
        )
        if evictable:
            self.queues[tier][kind].add(node)
        elif node in self.queues[tier][kind]:
            del self.queues[tier][kind][node]

    def _duplicate(self) -> Node | None:
        # prefer copies of inner nodes: a device leaf needs its copy when it is evicted
        found, gone = None, []
        for node in self.duplicates:
            if node.held[DEVICE][FULL] is None:
                gone.append(node)
            elif not node.locks[HOST][FULL]:
                is_leaf = node in self._leaves[DEVICE]
                found = node if found is None or not is_leaf else found
                if not is_leaf:
                    break
        for node in gone:
            del self.duplicates[node]
        return found


def _before(node: Node, end: int) -> Node:
    # the last node of a path before page `end`, at which one ends
    while node.end > end and node.parent is not None:
        node = node.parent
    return node
