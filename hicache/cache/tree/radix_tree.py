"""The radix tree: which prefixes are held where, what may be used, what goes next.

It runs on plain integers and never allocates: page ids come from the caller, and what it no longer
needs it returns as `FreePages`. All lengths inside are pages; `MatchResult` speaks tokens.
"""

from collections.abc import Iterator

from hicache.cache.tree.actions import FreePages, Plan
from hicache.cache.tree.eviction import EvictionPolicy
from hicache.cache.tree.keys import Digests, PageNames, make_root
from hicache.cache.tree.lock import Lock
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, FULL, HOST, MAMBA, SWA, Node
from hicache.cache.tree.page_history import PageHistory
from hicache.cache.tree.residency import Residency


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
        leaving_refreshes: bool = False,
        trims_leaves: bool = False,
        loads_whole_nodes: bool = False,
        names: PageNames | None = None,
        history: PageHistory | None = None,
    ) -> None:
        """`names`: what its pages are called; by default their digests. `history`: told of what
        comes and goes."""
        self.page_size = page_size
        self.names = names or Digests(page_size)
        self.page_bytes = self.names.page_bytes
        self.window_len = window_len
        self.window_pages = -(-window_len // page_size)
        self.has_swa = window_len > 0
        self.has_states = has_states
        self.kinds = [FULL, *[SWA] * self.has_swa, *[MAMBA] * has_states]
        self._split_refreshes = split_refreshes
        self._trims_leaves = trims_leaves
        self._loads_whole_nodes = loads_whole_nodes
        self.roots: dict[str, Node] = {}
        self.num_nodes = 0
        self.num_grown = 0
        self.residency = Residency(
            policy,
            window_pages=self.window_pages,
            has_states=has_states,
            reclaims_duplicates=reclaims_duplicates,
            leaving_refreshes=leaving_refreshes,
            history=history,
        )
        self.history = self.residency.history

    # -- finding ------------------------------------------------------------------------------

    def match(self, tokens: bytes, max_len: int, namespace: str = "") -> MatchResult:
        """The longest usable prefix of the first `max_len` tokens.

        Splits the last node if the match ends inside it, and touches the nodes of the prefix.
        O(matched pages + matched nodes).
        """
        size = self.page_size
        node = self._descend_all(tokens, max_len // size, namespace)
        best = self._boundary(node, is_device=False)
        on_device = self._boundary(best, is_device=True)
        tick = self.residency.tick
        for above in best.path():
            above.tick = tick
        self.residency.touch_window(best)
        self.residency.touch_state(best)
        full_host = swa_host = state_host = 0
        if best is not on_device:
            full_host = sum(
                passed.num_pages
                for passed in best.path(on_device.end)
                if passed.held[DEVICE][FULL] is None
            )
            if self.has_swa:
                swa_host = min(self._host_only_window(best), self.window_pages)
            state_host = int(self.has_states and best.held[DEVICE][MAMBA] is None)
        return MatchResult(
            device_prefix_len=on_device.end * size,
            usable_len=best.end * size,
            full_len=node.end * size,
            found_len=best.end * size,
            host_hit_length=full_host * size,
            swa_host_hit_length=swa_host * size,
            mamba_host_hit_length=state_host,
            device_node=on_device,
            best_node=best,
        )

    def usable_len(
        self, tokens: bytes, max_len: int, namespace: str = "", *, on_device: bool = False
    ) -> int:
        """Return the `usable_len` that `match` would find, without changing the tree.

        `on_device`: count only what the device holds. O(matched pages).
        """
        end = max_len // self.page_size
        node = self.roots.get(namespace)
        usable = 0  # pages
        run = self.window_pages  # of window pages; one from the root on is long enough
        while node is not None and node.end < end:
            first = node.end * self.page_bytes
            child = node.children.get(tokens[first : first + self.page_bytes])
            if child is None:
                break
            pages = self._num_shared(child, tokens, end)
            device, host = child.held
            if on_device:
                host = device
                if device[FULL] is None:
                    break
            is_whole = pages == child.num_pages
            is_usable = True
            if self.has_swa:
                is_held = device[SWA] is not None or host[SWA] is not None
                run = run + pages if is_held else 0
                is_usable = run >= self.window_pages
            if self.has_states:  # a state stands at the end of its node
                is_held = device[MAMBA] is not None or host[MAMBA] is not None
                is_usable &= is_whole and is_held
            if is_usable:
                usable = child.start + pages
            node = child if is_whole else None
        return usable * self.page_size

    def root(self, namespace: str) -> Node:
        """Where a namespace begins; made on first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = make_root(namespace)
        return root

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def take_apart(self) -> None:
        """Let go of every node, when nothing will be asked any more.

        Parents and children hold each other, which would leave them to the garbage collector.
        """
        for node in [*self.roots.values(), *self.nodes()]:
            node.children.clear()
        self.roots.clear()

    # -- locking ------------------------------------------------------------------------------

    def lock(self, node: Node) -> Lock:
        """Forbid eviction from the device of the path, its last window and the node's state."""
        swa_start = self.residency.lock_path(node)
        return Lock(DEVICE, node, 0, swa_start, with_state=True)

    def lock_host(
        self, node: Node, full_start: int, *, swa_start: int | None = None, with_state: bool = False
    ) -> Lock:
        """Forbid eviction from the host of pages `[full_start, node.end)` and their sidecars.

        Evicting a node's window would take its state along, so the state's lock holds both.
        """
        swa_start = node.end if swa_start is None else swa_start
        swa_start = min(swa_start, node.start) if with_state else swa_start
        lock = Lock(HOST, node, full_start, swa_start, with_state=with_state)
        self.residency.count_host_locks(lock, 1)
        return lock

    def lock_copies(
        self, node: Node, full_start: int, swa_start: int, state_nodes: list[Node]
    ) -> list[Lock]:
        """Forbid eviction from the host of a span of pages, and of these states of its path."""
        locks = [self.lock_host(node, full_start, swa_start=swa_start)]
        locks += [self.lock_host(each, each.end, with_state=True) for each in state_nodes]
        return locks

    def release(self, lock: Lock) -> None:
        """Undo one `lock` or `lock_host`."""
        if lock.tier == DEVICE:
            self.residency.release_path(lock.node, lock.swa_start)
        else:
            self.residency.count_host_locks(lock, -1)

    # -- growing ------------------------------------------------------------------------------

    def descend(self, node: Node, tokens: bytes, end: int) -> Node | None:
        """The child that goes on like `tokens`, split so that all of it does, up to page `end`.

        None if there is none. O(pages compared).
        """
        first = node.end * self.page_bytes
        child = node.children.get(tokens[first : first + self.page_bytes])
        if child is None:
            return None
        if child.end <= end and tokens.startswith(child.edge, first):
            return child  # as most do
        return self._split(child, self._num_shared(child, tokens, end))

    def grow(self, parent: Node, edge: bytes) -> Node:
        """A new child for these tokens, which no other child begins like; it holds nothing yet."""
        child = Node(parent, edge, parent.end, len(edge) // self.page_bytes)
        self.num_grown += 1
        child.created, child.tick = self.num_grown, self.residency.tick
        parent.children[edge[: self.page_bytes]] = child
        self.num_nodes += 1
        self.residency.refresh(parent)
        return child

    # -- moving between tiers -----------------------------------------------------------------

    def plan_back_up(self, node: Node) -> Plan:
        """What of the path to `node`, of its window and of its states has no host copy yet.

        Of the window, a page more than is needed after `node`: an equal prompt that ends there
        starts a page earlier.
        """
        full = [above for above in node.path() if above.held[HOST][FULL] is None]
        edge = node.end - self.window_pages
        swa = (
            []
            if not self.has_swa
            else [
                above
                for above in node.path(edge - 1)
                if above.held[HOST][SWA] is None
                and above.held[DEVICE][SWA] is not None
                and (above.end > edge or above.num_pages == 1)
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

        Splits the node across the window's edge, so that no more than the window is moved, unless
        whole nodes are loaded.
        """
        full = [above for above in node.path() if above.held[DEVICE][FULL] is None]
        swa: list[Node] = []
        if self.has_swa:
            edge = node.end - self.window_pages
            for above in list(node.path(edge)):
                if above.held[DEVICE][SWA] is not None:
                    continue
                if above.start < edge and not self._loads_whole_nodes:
                    self._split(above, edge - above.start)
                swa.append(above)
            full = [above for above in node.path() if above.held[DEVICE][FULL] is None]
        state = self.has_states and not node.is_root and node.held[DEVICE][MAMBA] is None
        return Plan(full[::-1], swa[::-1], [node] if state else [])

    # -- evicting -----------------------------------------------------------------------------

    def trim(self, leaf: Node, missing: int) -> None:
        """Cut a leaf that is about to be evicted: so many pages, its last, will do."""
        if self._trims_leaves and missing < leaf.num_pages:
            self._split(leaf, leaf.num_pages - missing)

    def evict_device(self, node: Node, kind: int, actions: list[FreePages]) -> None:
        """Drop a victim's device data: all of a leaf's, or a component and those below it."""
        if node in self.residency.leaves[DEVICE]:
            for other in self.kinds:
                self.residency.drop(node, DEVICE, other, actions)
            if node.held[HOST][FULL] is None:
                self._remove(node, actions)
            return
        assert kind != FULL, f"{node} is not a leaf of the device"
        for other in range(kind, MAMBA + 1):  # swa takes mamba along
            self.residency.drop(node, DEVICE, other, actions)

    def evict_host(self, node: Node, kind: int, actions: list[FreePages]) -> None:
        """Drop a victim's host data, as `evict_device` does."""
        if node in self.residency.leaves[HOST]:
            self._remove(node, actions)
            return
        if kind == FULL:
            assert node.held[DEVICE][FULL] is not None, f"{node} would be held nowhere"
        for other in range(kind, MAMBA + 1):
            self.residency.drop(node, HOST, other, actions)

    # -- inside -------------------------------------------------------------------------------

    def _descend_all(self, tokens: bytes, end: int, namespace: str) -> Node:
        """The last of the nodes that go on like `tokens` up to page `end`, split at their end."""
        size = self.page_bytes
        self.residency.next_tick()
        node = self.root(namespace)
        while node.end < end:
            first = node.end * size
            child = node.children.get(tokens[first : first + size])
            if child is None:
                return node
            if child.end > end or not tokens.startswith(child.edge, first):
                return self._split(child, self._num_shared(child, tokens, end))
            node = child
        return node

    def _boundary(self, node: Node, *, is_device: bool) -> Node:
        """The last of a path's nodes after which a request can go on.

        The state there and the window before it are held, on the device or anywhere, and so are
        the full pages of it all. O(nodes of the window), if nothing is missing.
        """
        while (missing := self._missing(node, is_device=is_device)) is not None:
            assert missing.parent is not None
            node = missing.parent
        return node

    def _missing(self, node: Node, *, is_device: bool) -> Node | None:
        # the node of a path that lacks what a request needs that goes on after it
        if node.parent is None:
            return None
        device, host = node.held
        if is_device and device[FULL] is None:
            return node
        if self.has_states and device[MAMBA] is None and (is_device or host[MAMBA] is None):
            return node
        edge, above = node.end - self.window_pages, node
        while above.end > edge and above.parent is not None:
            device, host = above.held
            if device[SWA] is None and (is_device or host[SWA] is None):
                return above
            above = above.parent
        return None

    def _num_shared(self, child: Node, tokens: bytes, end: int) -> int:
        # leading pages that a child, which begins like `tokens`, has in common with them up to
        # page `end`
        size, start, edge = self.page_bytes, child.start, child.edge
        pages = min(child.num_pages, end - start)
        if tokens[start * size : (start + pages) * size] == edge[: pages * size]:
            return pages
        same, differs = 1, pages  # the first page is equal; somewhere up to here one is not
        while differs - same > 1:
            middle = (same + differs) // 2
            if (
                tokens[(start + same) * size : (start + middle) * size]
                == edge[same * size : middle * size]
            ):
                same = middle
            else:
                differs = middle
        return same

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
        upper.children[lower.edge[: self.page_bytes]] = lower
        upper.hit_count, upper.tick, upper.created = lower.hit_count, lower.tick, lower.created
        if self._split_refreshes:
            upper.tick = lower.tick = self.residency.tick
        upper.stored[FULL], upper.stored[SWA] = lower.stored[FULL], lower.stored[SWA]
        if lower.digests is not None:
            upper.digests, lower.digests = lower.digests[:pages], lower.digests[pages:]
        if len(lower.numbers):
            upper.numbers, lower.numbers = lower.numbers[:pages], lower.numbers[pages:]
        self.num_nodes += 1
        self.residency.split(upper, lower)
        return upper

    def _remove(self, node: Node, actions: list[FreePages]) -> None:
        # a subtree that nothing holds on the device any more; children only under write_back
        for child in list(node.children.values()):
            self._remove(child, actions)
        for kind in self.kinds:
            self.residency.drop(node, HOST, kind, actions)
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[: self.page_bytes]]
        node.parent = None
        self.num_nodes -= 1
        self.residency.refresh(parent)

    def _host_only_window(self, node: Node) -> int:
        edge = node.end - self.window_pages
        return sum(
            above.end - max(above.start, edge)
            for above in node.path(edge)
            if above.held[DEVICE][SWA] is None and above.held[HOST][SWA] is not None
        )
