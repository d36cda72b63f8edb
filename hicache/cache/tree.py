"""The radix tree: which prefixes are held where, what may be used, what goes next.

It runs on plain integers and never allocates: page ids come from the caller, and what it no longer
needs it returns as `FreePages`. All lengths inside are pages; `MatchResult` speaks tokens.
"""

from collections.abc import Iterator

from hicache.cache.actions import FreePages, Plan
from hicache.cache.eviction import EvictionPolicy, Priority, VictimQueue
from hicache.cache.keys import chain_seed
from hicache.cache.lock import HostLock, Lock
from hicache.cache.match import MatchResult
from hicache.cache.node import DEVICE, FULL, HOST, KINDS, MAMBA, SWA, TIERS, Node
from hicache.cache.pages import PageIds
from hicache.cache.sequence import Sequence
from hicache.request import TOKEN_BYTES

EVERYTHING = 1 << 40  # a run of window pages that began at the root is long enough for any window


def _swa_tick(node: Node) -> Priority:
    return (node.aux_ticks[SWA],)


def _mamba_tick(node: Node) -> Priority:
    return (node.aux_ticks[MAMBA],)


class RadixTree:
    """Full, swa and mamba data of shared prefixes on device and host.

    Invariants: `hicache.cache.invariants.check`.
    """

    def __init__(
        self,
        *,
        page_size: int,
        policy: EvictionPolicy,
        window_len: int = 0,
        has_states: bool = False,
        reclaims_duplicates: bool = False,
        split_refreshes: bool = False,
    ) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.window_len = window_len
        self.window_pages = -(-window_len // page_size)
        self.has_swa = window_len > 0
        self.has_states = has_states
        self.kinds = [
            kind
            for kind in KINDS
            if kind == FULL or (kind == SWA and self.has_swa) or (kind == MAMBA and has_states)
        ]
        self._reclaims_duplicates = reclaims_duplicates
        self._split_refreshes = split_refreshes
        self.roots: dict[str, Node] = {}
        self.leaves = (VictimQueue(policy.priority), VictimQueue(policy.priority))  # by tier
        # unlocked swa and mamba data, least recent first; on the host only what is nowhere else
        self.sidecars = tuple(
            {SWA: VictimQueue(_swa_tick), MAMBA: VictimQueue(_mamba_tick)} for _ in TIERS
        )
        self.duplicates: dict[Node, None] = {}  # full on both tiers and unlocked on the host
        self.resident = ([0, 0, 0], [0, 0, 0])  # pages or slots, by tier and kind
        self.protected = ([0, 0, 0], [0, 0, 0])  # those under a lock
        self.num_nodes = 0
        self._tick = 0

    # -- finding ------------------------------------------------------------------------------

    def match(self, tokens: bytes, max_len: int, namespace: str = "") -> MatchResult:
        """The longest usable prefix of the first `max_len` tokens.

        Splits the last node if the match ends inside it, and touches every matched node.
        O(matched pages + matched nodes).
        """
        size = self.page_size
        end = max_len // size
        has_swa, has_states, window = self.has_swa, self.has_states, self.window_len
        node = best = on_device = self.root(namespace)
        self._tick += 1
        tick = self._tick
        run_any = run_device = EVERYTHING
        while node.end < end:
            child = self._step(node, tokens, end)
            if child is None:
                break
            node = child
            node.tick = tick
            device, host = node.held
            usable, usable_on_device = True, device[FULL] is not None
            if has_swa:
                pages = node.num_pages
                run_device = run_device + pages if device[SWA] is not None else 0
                run_any = run_any + pages if device[SWA] is not None or host[SWA] is not None else 0
                usable = run_any * size >= window
                usable_on_device &= run_device * size >= window
            if has_states:
                usable &= device[MAMBA] is not None or host[MAMBA] is not None
                usable_on_device &= device[MAMBA] is not None
            if usable:
                best = node
            if usable_on_device:
                on_device = node
        self._touch_sidecars(best)
        full_host = sum(
            passed.num_pages
            for passed in best.path(on_device.end)
            if passed.held[DEVICE][FULL] is None
        )
        swa_host = state_host = 0
        if best is not on_device:
            if has_swa:
                swa_host = min(self._host_only_window(best), self.window_pages)
            state_host = int(has_states and best.held[DEVICE][MAMBA] is None)
        return MatchResult(
            device_prefix_len=on_device.end * size,
            usable_len=best.end * size,
            full_len=node.end * size,
            host_hit_length=full_host * size,
            swa_host_hit_length=swa_host * size,
            mamba_host_hit_length=state_host,
            device_node=on_device,
            best_node=best,
        )

    def root(self, namespace: str) -> Node:
        """Where a namespace begins; made on first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, b"", 0, 0)
            root.seed = chain_seed(namespace)
        return root

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- locking ------------------------------------------------------------------------------

    def lock(self, node: Node) -> Lock:
        """Forbid eviction from the device of the path, its last window and the node's state."""
        swa_start = node.window_start(self.window_pages) if self.has_swa else node.end
        self._count_locks(DEVICE, node, 1, 0, swa_start, with_state=True)
        return Lock(node, swa_start)

    def release(self, lock: Lock) -> None:
        """Undo one `lock`."""
        self._count_locks(DEVICE, lock.node, -1, 0, lock.swa_start, with_state=True)

    def lock_host(
        self, node: Node, full_start: int, *, swa_start: int | None = None, with_state: bool = False
    ) -> HostLock:
        """Forbid eviction from the host of pages `[full_start, node.end)` and their sidecars."""
        lock = HostLock(node, full_start, node.end if swa_start is None else swa_start, with_state)
        self._count_locks(HOST, node, 1, full_start, lock.swa_start, with_state=with_state)
        return lock

    def release_host(self, lock: HostLock) -> None:
        """Undo one `lock_host`."""
        self._count_locks(
            HOST, lock.node, -1, lock.full_start, lock.swa_start, with_state=lock.with_state
        )

    # -- publishing ---------------------------------------------------------------------------

    def insert(self, node: Node, sequence: Sequence, end: int, actions: list[FreePages]) -> Node:
        """Publish the device pages `[node.end, end)` of a sequence below `node`.

        What the tree already holds is freed and the sequence takes the tree's pages instead; a
        tombstone takes the sequence's. `sequence.swa_start` must not lie inside the interval.
        Returns the node that ends at `end`.
        """
        self._tick += 1
        for above in node.path():
            above.tick = self._tick  # whoever publishes has used the prefix until now
        while node.end < end:
            start = node.end
            child = self._step(node, sequence.tokens, end)
            if child is None:
                edge = sequence.tokens[start * self.page_bytes : end * self.page_bytes]
                child = self._grow(node, edge)
                child.digests = sequence.known_digests(start, end)
                self._put(child, DEVICE, FULL, sequence.full_pages[start:end].copy())
                if self.has_swa and sequence.swa_start <= start:
                    self._put(child, DEVICE, SWA, sequence.swa_pages[start:end].copy())
            else:
                self._merge(child, sequence, actions)
            child.hit_count += 1
            child.tick = self._tick
            node = child
        self._touch_sidecars(node)
        return node

    def attach_state(self, node: Node, slot: PageIds) -> bool:
        """Keep the state after `node` on the device; False if one is kept there already."""
        if node.held[DEVICE][MAMBA] is not None:
            return False
        self._put(node, DEVICE, MAMBA, slot)
        return True

    def insert_host(
        self,
        anchor: Node,
        sequence: Sequence,
        pages: tuple[PageIds, PageIds, PageIds],
        actions: list[FreePages],
    ) -> Node:
        """Publish host pages of a sequence, read from storage, below `anchor`.

        Args:
            anchor: where they continue; on the host itself, or a root.
            sequence: whose tokens they hold.
            pages: by component: full pages of all of it, swa pages of its end, the last state.
            actions: what was on the host already is freed through these.

        Returns:
            The node that ends where the pages do.
        """
        full, swa, state = pages
        tokens = sequence.tokens
        first, end = anchor.end, anchor.end + len(full)
        swa_first = end - len(swa)
        node = anchor
        self._tick += 1
        for cut in sorted({swa_first, end} - {first}):
            while node.end < cut:
                start = node.end
                child = self._step(node, tokens, cut)
                part = full[start - first : (cut if child is None else child.end) - first]
                if child is None:
                    edge = tokens[start * self.page_bytes : cut * self.page_bytes]
                    child = self._grow(node, edge)
                    child.digests = sequence.known_digests(start, cut)
                    self._put(child, HOST, FULL, part)
                elif child.held[HOST][FULL] is None:
                    self._put(child, HOST, FULL, part)
                else:
                    actions.append(FreePages(HOST, FULL, part))
                if self.has_swa and start >= swa_first:
                    part = swa[start - swa_first : child.end - swa_first]
                    if child.held[HOST][SWA] is None:
                        self._put(child, HOST, SWA, part)
                    else:
                        actions.append(FreePages(HOST, SWA, part))
                child.tick = self._tick
                self.refresh(child)
                node = child
        if len(state):
            if node.held[HOST][MAMBA] is None and not node.is_root:
                self._put(node, HOST, MAMBA, state)
            else:
                actions.append(FreePages(HOST, MAMBA, state))
        return node

    # -- moving between tiers -----------------------------------------------------------------

    def plan_back_up(self, node: Node) -> Plan:
        """What of the path to `node`, of its window and of its states has no host copy yet."""
        full = [above for above in node.path() if above.held[HOST][FULL] is None]
        swa = (
            []
            if not self.has_swa
            else [
                above
                for above in node.path(node.window_start(self.window_pages))
                if above.held[HOST][SWA] is None and above.held[DEVICE][SWA] is not None
            ]
        )
        mamba = [
            above
            for above in {*full, node}
            if above.held[HOST][MAMBA] is None and above.held[DEVICE][MAMBA] is not None
        ]
        top_down = full[::-1]
        mamba.sort(key=lambda above: above.start)
        return Plan(top_down, swa[::-1], mamba)

    def plan_load_back(self, node: Node) -> Plan:
        """What of the path to `node`, its window and its state is only on the host.

        Splits the node across the window's edge, so that no more than the window is moved.
        """
        full = [above for above in node.path() if above.held[DEVICE][FULL] is None]
        swa: list[Node] = []
        if self.has_swa:
            edge = max(node.end - self.window_pages, 0)
            for above in list(node.path(node.window_start(self.window_pages))):
                if above.held[DEVICE][SWA] is not None:
                    continue
                if above.start < edge:
                    self._split(above, edge - above.start)
                swa.append(above)
            full = [above for above in node.path() if above.held[DEVICE][FULL] is None]
        state = self.has_states and not node.is_root and node.held[DEVICE][MAMBA] is None
        return Plan(full[::-1], swa[::-1], [node] if state else [])

    def put(self, node: Node, tier: int, kind: int, page_ids: PageIds) -> None:
        """Commit the ids of a copy that is about to be made."""
        self._put(node, tier, kind, page_ids)

    # -- evicting -----------------------------------------------------------------------------

    def device_victim(self, kind: int) -> Node | None:
        """Whose data of this component leaves the device next; it stays for now."""
        if kind == FULL:
            return self.leaves[DEVICE].best()
        return self.sidecars[DEVICE][kind].best()

    def evict_device(self, node: Node, kind: int, actions: list[FreePages]) -> None:
        """Drop a victim's device data: all of a leaf's, or a component and those below it."""
        if node in self.leaves[DEVICE]:
            for other in self.kinds:
                self._drop(node, DEVICE, other, actions)
            if node.held[HOST][FULL] is None:
                self._remove(node, actions)
            return
        assert kind != FULL, f"{node} is not a leaf of the device"
        for other in range(kind, MAMBA + 1):  # swa takes mamba along
            self._drop(node, DEVICE, other, actions)

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

    def host_victim(self, kind: int) -> Node | None:
        """Whose data of this component leaves the host next; it stays for now."""
        if kind == FULL:
            leaf = self.leaves[HOST].best()
            if leaf is None and self.duplicates:
                return self._duplicate()
            return leaf
        return self.sidecars[HOST][kind].best()

    def evict_host(self, node: Node, kind: int, actions: list[FreePages]) -> None:
        """Drop a victim's host data, as `evict_device` does."""
        if node in self.leaves[HOST]:
            self._remove(node, actions)
            return
        if kind == FULL:
            assert node.held[DEVICE][FULL] is not None, f"{node} would be held nowhere"
        for other in range(kind, MAMBA + 1):
            self._drop(node, HOST, other, actions)

    # -- inside -------------------------------------------------------------------------------

    def _step(self, node: Node, tokens: bytes, end: int) -> Node | None:
        # the child that continues `tokens`, split so that all of it does, up to page `end`
        size, start = self.page_bytes, node.end
        child = node.children.get(tokens[start * size : (start + 1) * size])
        if child is None:
            return None
        pages = min(child.num_pages, end - start)
        edge = child.edge
        if pages == child.num_pages and tokens[start * size : (start + pages) * size] == edge:
            return child
        same, differs = 1, pages + 1  # the first page is equal; page `differs` is not, or too far
        while differs - same > 1:
            middle = (same + differs) // 2
            if (
                tokens[(start + same) * size : (start + middle) * size]
                == edge[same * size : middle * size]
            ):
                same = middle
            else:
                differs = middle
        return self._split(child, same) if same < child.num_pages else child

    def _split(self, lower: Node, pages: int) -> Node:
        """Cut a node after its first `pages` pages; returns the new upper half."""
        cut = pages * self.page_bytes
        parent = lower.parent
        assert parent is not None
        assert 0 < pages < lower.num_pages
        upper = Node(parent, lower.edge[:cut], lower.start, pages)
        parent.children[upper.edge[: self.page_bytes]] = upper
        lower.parent = upper
        lower.edge = lower.edge[cut:]
        lower.start += pages
        lower.num_pages -= pages
        upper.children[lower.edge[: self.page_bytes]] = lower
        upper.hit_count, upper.tick, upper.created = lower.hit_count, lower.tick, lower.created
        if self._split_refreshes:
            lower.tick = self._tick
        upper.aux_ticks[SWA] = lower.aux_ticks[SWA]
        upper.stored[FULL], upper.stored[SWA] = lower.stored[FULL], lower.stored[SWA]
        if lower.digests is not None:
            upper.digests, lower.digests = lower.digests[:pages], lower.digests[pages:]
        for tier in TIERS:
            for kind in (FULL, SWA):
                upper.locks[tier][kind] = lower.locks[tier][kind]
                page_ids = lower.held[tier][kind]
                if page_ids is not None:
                    upper.held[tier][kind] = page_ids[:pages]
                    lower.held[tier][kind] = page_ids[pages:]
        upper.num_device_children = int(lower.held[DEVICE][FULL] is not None)
        self.num_nodes += 1
        self.refresh(upper)
        self.refresh(lower)
        for tier in TIERS:
            self._refresh_sidecar(upper, tier, SWA)
        return upper

    def _grow(self, parent: Node, edge: bytes) -> Node:
        child = Node(parent, edge, parent.end, len(edge) // self.page_bytes)
        child.created = child.tick = self._tick
        parent.children[edge[: self.page_bytes]] = child
        self.num_nodes += 1
        self.refresh(parent)
        return child

    def _merge(self, node: Node, sequence: Sequence, actions: list[FreePages]) -> None:
        # the sequence computed pages that the tree knows already, at least on one tier
        start, end = node.start, node.end
        theirs = sequence.full_pages[start:end]
        ours = node.held[DEVICE][FULL]
        if ours is None:
            self._put(node, DEVICE, FULL, theirs.copy())
        else:
            actions.append(FreePages(DEVICE, FULL, theirs.copy()))
            sequence.full_pages[start:end] = ours
        if self.has_swa and sequence.swa_start <= start:
            theirs = sequence.swa_pages[start:end]
            ours = node.held[DEVICE][SWA]
            if ours is None:
                self._put(node, DEVICE, SWA, theirs.copy())
            else:
                actions.append(FreePages(DEVICE, SWA, theirs.copy()))
                sequence.swa_pages[start:end] = ours

    def _put(self, node: Node, tier: int, kind: int, page_ids: PageIds) -> None:
        assert node.held[tier][kind] is None
        node.held[tier][kind] = page_ids
        self.resident[tier][kind] += len(page_ids)
        if node.locks[tier][kind]:
            self.protected[tier][kind] += len(page_ids)
        if kind == FULL:
            if tier == DEVICE and node.parent is not None:
                node.parent.num_device_children += 1
                self.refresh(node.parent)
            self.refresh(node)
            return
        node.aux_ticks[kind] = max(node.aux_ticks[kind], self._tick)
        for each in TIERS:
            self._refresh_sidecar(node, each, kind)

    def _drop(self, node: Node, tier: int, kind: int, actions: list[FreePages]) -> None:
        page_ids = node.held[tier][kind]
        if page_ids is None:
            return
        assert not node.locks[tier][kind], f"{node} is locked and may not be evicted"
        node.held[tier][kind] = None
        self.resident[tier][kind] -= len(page_ids)
        actions.append(FreePages(tier, kind, page_ids))
        if kind == FULL:
            if tier == DEVICE and node.parent is not None:
                node.parent.num_device_children -= 1
                self.refresh(node.parent)
            self.refresh(node)
            return
        for each in TIERS:
            self._refresh_sidecar(node, each, kind)

    def _remove(self, node: Node, actions: list[FreePages]) -> None:
        # a subtree that nothing holds on the device any more; children only under write_back
        for child in list(node.children.values()):
            self._remove(child, actions)
        for kind in self.kinds:
            self._drop(node, HOST, kind, actions)
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[: self.page_bytes]]
        for leaves in self.leaves:
            leaves.discard(node)
        self.duplicates.pop(node, None)
        node.parent = None
        self.num_nodes -= 1
        self.refresh(parent)

    def refresh(self, node: Node) -> None:
        """Bring the leaf sets up to date with a node. O(log n)."""
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

    def _touch_sidecars(self, node: Node) -> None:
        # a match uses the last window and the last state of its path, and no others
        if self.has_swa:
            edge = max(node.end - self.window_pages, 0)
            for above in node.path(edge):
                above.aux_ticks[SWA] = self._tick
        node.aux_ticks[MAMBA] = self._tick

    def _count_locks(
        self,
        tier: int,
        node: Node,
        change: int,
        full_start: int,
        swa_start: int,
        *,
        with_state: bool,
    ) -> None:
        if with_state and self.has_states and not node.is_root:
            self._count_lock(node, tier, MAMBA, change)
            self._refresh_sidecar(node, tier, MAMBA)
            self.refresh(node)
        above = node
        first = min(full_start, swa_start)
        held, has_swa = self.protected[tier], self.has_swa
        while above.parent is not None and above.start >= first:
            locks = above.locks[tier]
            if has_swa and above.start >= swa_start:
                self._count_lock(above, tier, SWA, change)
                self._refresh_sidecar(above, tier, SWA)
            if above.start >= full_start:
                before = locks[FULL]
                locks[FULL] = after = before + change
                assert after >= 0, f"{above} is released more often than it was locked"
                if not before or not after:
                    page_ids = above.held[tier][FULL]
                    if page_ids is not None:
                        held[FULL] += len(page_ids) * change
                    self.refresh(above)
            elif tier == HOST:
                self.refresh(above)
            above = above.parent

    def _count_lock(self, node: Node, tier: int, kind: int, change: int) -> None:
        before = node.locks[tier][kind]
        after = before + change
        assert after >= 0, f"{node} is released more often than it was locked"
        node.locks[tier][kind] = after
        page_ids = node.held[tier][kind]
        if page_ids is not None and (before == 0 or after == 0):
            self.protected[tier][kind] += len(page_ids) * change

    def _host_only_window(self, node: Node) -> int:
        edge = max(node.end - self.window_pages, 0)
        return sum(
            above.end - max(above.start, edge)
            for above in node.path(edge)
            if above.held[DEVICE][SWA] is None and above.held[HOST][SWA] is not None
        )

    def _duplicate(self) -> Node | None:
        # a device leaf's copy is about to be wanted, when the leaf is evicted; spare it at first
        spared = None
        for node in self.duplicates:
            if node not in self.leaves[DEVICE]:
                return node
            spared = spared or node
        return spared
