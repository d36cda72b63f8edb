"""What the nodes hold on each tier, what of it is locked, and what leaves next."""

from hicache.cache.pages import PageIds
from hicache.cache.tree.actions import FreePages
from hicache.cache.tree.eviction import EvictionPolicy, Priority
from hicache.cache.tree.lock import Lock
from hicache.cache.tree.node import DEVICE, FULL, HOST, MAMBA, SWA, TIERS, Node
from hicache.cache.tree.page_history import PageHistory
from hicache.cache.tree.victims import VictimQueue


def _swa_tick(node: Node) -> Priority:
    return (node.aux_ticks[SWA],)


def _mamba_tick(node: Node) -> Priority:
    return (node.aux_ticks[MAMBA],)


class Residency:
    """The data and the locks of all nodes of one tree, counted and queued for eviction.

    Nobody else writes a node's `held`, `locks`, `aux_ticks` or `num_device_children`. Invariant:
    the counts and queues below equal their definitions, recomputed from the nodes.

    - `resident`, `protected`: pages (mamba: slots) held, and held under a lock, by tier and kind;
    - `leaves`, by tier: unlocked full data with none below it; on the host, held nowhere else;
    - `sidecars`, by tier and kind: unlocked swa and mamba data; on the host, held nowhere else;
    - `duplicates`: full on both tiers and unlocked on the host; kept only if they are reclaimed.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        window_pages: int,
        has_states: bool,
        reclaims_duplicates: bool,
        leaving_refreshes: bool = False,
        history: PageHistory | None = None,
    ) -> None:
        """`leaving_refreshes`: window or state on the host counts as used when it leaves the
        device. `history`: told of what comes and goes."""
        self.resident = ([0, 0, 0], [0, 0, 0])
        self.protected = ([0, 0, 0], [0, 0, 0])
        self.leaves = (VictimQueue(policy.priority), VictimQueue(policy.priority))
        self.sidecars = tuple(
            {SWA: VictimQueue(_swa_tick), MAMBA: VictimQueue(_mamba_tick)} for _ in TIERS
        )
        self.duplicates: dict[Node, None] = {}
        self.history = PageHistory() if history is None else history
        self.tick = 0  # logical time: one more with each match and each insertion
        self._window_pages = window_pages
        self._has_states = has_states
        self._reclaims_duplicates = reclaims_duplicates
        self._leaving_refreshes = leaving_refreshes

    # -- recency ------------------------------------------------------------------------------

    def next_tick(self) -> int:
        """Something is used now, after all that was used before."""
        self.tick += 1
        return self.tick

    def touch_sidecars(self, node: Node) -> None:
        """Use the last window and the state before `node.end`, and no others of its path."""
        if self._window_pages:
            for above in node.path(node.end - self._window_pages):
                above.aux_ticks[SWA] = self.tick
        node.aux_ticks[MAMBA] = self.tick

    # -- holding ------------------------------------------------------------------------------

    def put(self, node: Node, tier: int, kind: int, page_ids: PageIds) -> None:
        """A tombstone gets data, or will by a copy that is about to be made. O(log n)."""
        assert node.held[tier][kind] is None
        node.held[tier][kind] = page_ids
        self.history.put(node, tier, kind)
        self.resident[tier][kind] += len(page_ids)
        if node.locks[tier][kind]:
            self.protected[tier][kind] += len(page_ids)
        if kind != FULL:
            node.aux_ticks[kind] = max(node.aux_ticks[kind], self.tick)
        self._changed(node, tier, kind, 1)

    def drop(self, node: Node, tier: int, kind: int, actions: list[FreePages]) -> None:
        """What the node holds, if anything, is to be freed; it must not be locked. O(log n)."""
        page_ids = node.held[tier][kind]
        if page_ids is None:
            return
        assert not node.locks[tier][kind], f"{node} is locked and may not be evicted"
        node.held[tier][kind] = None
        self.history.drop(node, tier, kind)
        self.resident[tier][kind] -= len(page_ids)
        actions.append(FreePages(tier, kind, page_ids))
        if self._leaving_refreshes and tier == DEVICE and node.held[HOST][kind] is not None:
            node.aux_ticks[kind] = self.tick
        self._changed(node, tier, kind, -1)

    def split(self, upper: Node, lower: Node) -> None:
        """Deal out what `lower` held, when its first pages have just become `upper`.

        Pages are sliced, locks doubled; a state and its lock stay with the lower half.
        """
        pages = upper.num_pages
        upper.aux_ticks[SWA] = lower.aux_ticks[SWA]
        for tier in TIERS:
            for kind in (FULL, SWA):
                upper.locks[tier][kind] = lower.locks[tier][kind]
                page_ids = lower.held[tier][kind]
                if page_ids is not None:
                    upper.held[tier][kind] = page_ids[:pages]
                    lower.held[tier][kind] = page_ids[pages:]
        upper.num_device_children = int(lower.held[DEVICE][FULL] is not None)
        self.refresh(upper)
        for tier in TIERS:
            self._refresh_sidecar(upper, tier, SWA)

    def refresh(self, node: Node) -> None:
        """Bring the leaf sets up to date with a node, as when its children change. O(log n)."""
        device, host = node.held
        full_on_device = device[FULL] is not None
        is_free = not node.locks[DEVICE][FULL] and node.parent is not None
        if full_on_device and is_free and not node.num_device_children:
            if node not in self.leaves[DEVICE]:
                self.leaves[DEVICE].add(node)
        else:
            self.leaves[DEVICE].discard(node)
        host_is_free = not any(node.locks[HOST])
        on_host = host[FULL] is not None
        if on_host and is_free and host_is_free and not full_on_device and not node.children:
            if node not in self.leaves[HOST]:
                self.leaves[HOST].add(node)
        else:
            self.leaves[HOST].discard(node)
        if self._reclaims_duplicates:
            if on_host and full_on_device and host_is_free:
                self.duplicates.setdefault(node)
            else:
                self.duplicates.pop(node, None)

    # -- locking ------------------------------------------------------------------------------

    def count_locks(self, lock: Lock, change: int) -> None:
        """Lock (1) or release (-1) all that a receipt covers. O(nodes it covers)."""
        tier, node, full_start, swa_start, with_state = lock
        if with_state and self._has_states and not node.is_root:
            self._count_lock(node, tier, MAMBA, change)
        first = min(full_start, swa_start)
        has_swa = self._window_pages > 0
        while node.parent is not None and node.start >= first:
            if has_swa and node.start >= swa_start:
                self._count_lock(node, tier, SWA, change)
            if node.start >= full_start:
                locks = node.locks[tier]
                if locks[FULL] and locks[FULL] + change:
                    locks[FULL] += change  # most of a path is locked by others, too
                else:
                    self._count_lock(node, tier, FULL, change)
            node = node.parent

    # -- leaving ------------------------------------------------------------------------------

    def device_victim(self, kind: int) -> Node | None:
        """Whose data of this component leaves the device next; it stays for now."""
        if kind == FULL:
            return self.leaves[DEVICE].best()
        return self.sidecars[DEVICE][kind].best()

    def pass_over(self, node: Node, kind: int) -> None:
        """Another victim first, until `reconsider`."""
        if kind == FULL:
            self.leaves[DEVICE].discard(node)
        else:
            self.sidecars[DEVICE][kind].discard(node)

    def reconsider(self, node: Node, kind: int) -> None:
        """A node that was passed over may be a victim again."""
        if kind == FULL:
            self.refresh(node)
        else:
            self._refresh_sidecar(node, DEVICE, kind)

    def host_victim(self, kind: int) -> Node | None:
        """Whose data of this component leaves the host next; it stays for now."""
        if kind == FULL:
            leaf = self.leaves[HOST].best()
            if leaf is None and self.duplicates:
                return self._duplicate()
            return leaf
        return self.sidecars[HOST][kind].best()

    def may_leave_device(self, node: Node) -> bool:
        """Whether a victim can go: it has a host copy, or nothing it takes along is locked there.

        Only under write_back can a node without one have a sidecar or descendants on the host.
        """
        if node.held[HOST][FULL] is not None or node not in self.leaves[DEVICE]:
            return True
        if any(node.locks[HOST]):
            return False
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if any(below.locks[HOST]) or any(below.locks[DEVICE]):
                return False
            stack.extend(below.children.values())
        return True

    # -- inside -------------------------------------------------------------------------------

    def _changed(self, node: Node, tier: int, kind: int, change: int) -> None:
        # after a put (1) or a drop (-1)
        if kind != FULL:
            for each in TIERS:  # what is on the device as well is no sidecar of the host
                self._refresh_sidecar(node, each, kind)
            return
        if tier == DEVICE and node.parent is not None:
            node.parent.num_device_children += change
            self.refresh(node.parent)
        self.refresh(node)

    def _count_lock(self, node: Node, tier: int, kind: int, change: int) -> None:
        locks = node.locks[tier]
        before = locks[kind]
        locks[kind] = after = before + change
        assert after >= 0, f"{node} is released more often than it was locked"
        if before and after:
            return
        page_ids = node.held[tier][kind]
        if page_ids is not None:
            self.protected[tier][kind] += len(page_ids) * change
        if kind != FULL:
            self._refresh_sidecar(node, tier, kind)
        if kind == FULL or tier == HOST:
            self.refresh(node)

    def _refresh_sidecar(self, node: Node, tier: int, kind: int) -> None:
        evictable = (
            node.held[tier][kind] is not None
            and not node.locks[tier][kind]
            and (tier == DEVICE or node.held[DEVICE][kind] is None)
        )
        if evictable:
            self.sidecars[tier][kind].add(node)
        else:
            self.sidecars[tier][kind].discard(node)

    def _duplicate(self) -> Node | None:
        # a device leaf's copy is about to be wanted, when the leaf is evicted; spare it at first
        spared = None
        for node in self.duplicates:
            if node not in self.leaves[DEVICE]:
                return node
            spared = spared or node
        return spared
