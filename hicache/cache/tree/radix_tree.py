"""The radix tree: which prefixes each tier holds, which of them are usable, what to evict next.

The tree never allocates: page ids come from the caller, and ids that it no longer needs go back as
`FreePages`. Lengths in this module are in pages; `MatchResult` is in tokens.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import takewhile

from hicache.cache.kinds import FULL, Kinds
from hicache.cache.pages import FreePages
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.dropped import drop
from hicache.cache.tree.entry import Entries, EntryPolicy
from hicache.cache.tree.events import NO_DEMAND, CacheListener, Demand
from hicache.cache.tree.keys import Key, PageNames, keys
from hicache.cache.tree.node import (
    DEVICE,
    HOST,
    NO_END,
    NO_ENTRIES,
    Lock,
    MatchResult,
    Node,
    make_root,
)
from hicache.cache.tree.residency import Residency
from hicache.config import CacheConfig
from hicache.rules import Rules

Plan = list[list[Node]]  # by kind: nodes whose data will be copied to another tier, top down


class RadixTree:
    """A radix tree of the prefixes that are cached on the device or on the host.

    Args:
        kinds: the kinds of data that the model caches, such as full-attention KV and Mamba states.
        policy: ranks entries for eviction and is told of events; None means LRU and no entries.
        demotes: whether an eviction from the device may copy the data to the host.
        drops_block: whether a request computes the last page of its hit again, for its draft model.
        marks_cold: whether the host keeps no KV of the draft model.
        knobs: settings of the cache; None means the defaults.
        rules: inefficiencies of other engines to reproduce; None means none.
        names: gives each page a name; None means a hash of its tokens.
        listener: an object that is told about the events of the cache, such as evictions.
    """

    def __init__(
        self,
        *,
        kinds: Kinds,
        policy: EntryPolicy | None = None,
        demotes: bool = False,
        drops_block: bool = False,
        marks_cold: bool = False,
        knobs: CacheConfig | None = None,
        rules: Rules | None = None,
        names: PageNames | None = None,
        listener: CacheListener | None = None,
    ) -> None:
        self.knobs = knobs = knobs or CacheConfig()
        self.rules = rules = rules or Rules()
        self.kinds = kinds
        self.page_size = kinds.page_size
        self.names = names or Digests(kinds.page_size)
        self.page_bytes = self.names.page_bytes
        self.overlap = self.names.overlap
        self._windows = kinds.windows
        self._points = kinds.points
        self._no_hits = (0,) * kinds.size
        # by tier: True if all kinds share the tier's bytes
        self.is_shared = knobs.pools == "shared_both", knobs.pools != "split"
        self.roots: dict[str, Node] = {}
        self.num_nodes = 0
        self.num_grown = 0
        self.entries = None if policy is None else Entries(policy, kinds, self.names)
        # no policy chooses what is evicted
        self.is_lru = policy is None or (policy.rank is None and policy.victim is None)
        self.demotes = demotes
        self.drops_block, self.marks_cold = drops_block, marks_cold
        self.drop = partial(drop, has_aux=bool(kinds.aux), is_mirrored=not demotes)
        # a look-up also finds the page that ends with the prompt, and drops it: for several kinds,
        # and on the host, vLLM looks a block further (`kv_cache_coordinator.py`, line 882)
        self.peek = int(drops_block and (bool(kinds.aux) or rules.loads_last_page))
        # the host may drop what the device holds too
        self.evicts_mirrors = knobs.evicts_mirrors and not demotes
        # windows and states may stay on the device when their full-attention KV has left it
        self.keeps_sidecars = rules.trims_leaves and not demotes
        self.residency = Residency(
            kinds,
            reclaims_duplicates=self.demotes,
            evicts_mirrors=self.evicts_mirrors,
            trims=rules.trims_leaves,
            rules=rules,
            listener=listener,
            entries=self.entries,
        )
        self.listener = listener
        self._last_use: tuple[int, bytes] = 0, b""  # logical time and tokens

    # -- finding ------------------------------------------------------------------------------

    def match(
        self, tokens: bytes, max_len: int, namespace: str = "", *, refreshes: bool = True
    ) -> MatchResult:
        """Find the longest cached prefix of the first `max_len` tokens that a request can reuse.

        Only prefixes that were inserted with the same `namespace` match. If the match ends inside a
        node, the node is split. With `refreshes`, the prefix is marked as just used. If the same
        tokens are looked up again before anything else is used, that is one use: how often a
        waiting request is considered makes no difference.

        These calls alone mark an entry as used: this one, for each request that the scheduler
        considers (`compat.rules.refresh` says which); `touch`, when a request is admitted; and the
        insertion of computed or read pages behind it. `look` and `usable_len` change nothing.
        """
        size = self.page_size
        if refreshes and (self.residency.tick, tokens) != self._last_use:
            self.residency.next_tick()
        node = self._descend_all(tokens, (max_len + self.peek - self.overlap) // size, namespace)
        dropped, ready = 0, node.end
        if self.drops_block and node.end:
            path = [(above, above.end) for above in node.span()]
            hit, ready, dropped = self.drop(path, max_len // size)
            node = self.ancestor(node, tokens, hit) if hit else self.root(namespace)
        best = on_device = node
        if self._missing(node, is_device=True) is not None:
            best = self.boundary(node, is_device=False)
            on_device = self.boundary(best, is_device=True)
        full = node
        while self.rules.keeps_for_repeats and full.parent and full.held[DEVICE][FULL] is None:
            full = full.parent  # vLLM looks for branches on the device alone
        if refreshes:
            self._mark_used(best)
            self._last_use = self.residency.tick, tokens
        return MatchResult(
            device_prefix_len=(on_device.end if on_device.end < ready else ready) * size,
            usable_len=best.end * size,
            full_len=node.end * size,
            host_hits=self._no_hits if best is on_device else self._host_hits(best, on_device),
            device_node=on_device,
            best_node=best,
            branch_end=min(full.end, ready) * size,
            dropped_len=dropped * size,
        )

    def boundary(self, node: Node, *, is_device: bool) -> Node:
        """Return the last node of a path after which a request can continue.

        With `is_device`, the device holds what the request needs, else any tier does. O(nodes of
        the windows) if nothing is missing.
        """
        while (missing := self._missing(node, is_device=is_device)) is not None:
            assert missing.parent is not None
            node = missing.parent
        return node

    def touch(self, node: Node) -> None:
        """Mark the prefix that ends at `node`, its windows and its state as just used."""
        self.residency.next_tick()
        self._mark_used(node)

    def num_shared(self, child: Node, tokens: bytes, end: int) -> int:
        """Return how many leading pages of `child` are those of `tokens`, up to page `end`.

        The first page must be equal.
        """
        size, start, edge = self.page_bytes, child.start, child.edge
        pages = min(child.num_pages, end - start)
        if tokens[start * size : (start + pages) * size] == edge[: pages * size]:
            return pages
        same, differs = 1, pages  # the first page is equal; a page before `differs` is not
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

    def root(self, namespace: str) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = make_root(namespace, self.kinds.size)
        return root

    def num_pages(self, num_tokens: int) -> int:
        """Return how many whole pages the first `num_tokens` tokens name."""
        return max(num_tokens - self.overlap, 0) // self.page_size

    def repeat_end(self, num_tokens: int) -> int:
        """Return the page at which a prompt of `num_tokens` tokens keeps its windows and its state.

        That is its last one, or by `compat.rules` that at which an equal prompt resumes.
        """
        if self.drops_block and self.rules.lowers_ends:
            return max(self.num_pages(num_tokens) - 1, 0)
        return self.num_pages(num_tokens - self.rules.keeps_for_repeats)

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def keys(self, node: Node, kind: int) -> Items[Key]:
        start = node.num_pages - 1 if kind in self._points else 0
        return keys(self.names.of_node(node, start), kind)

    def take_apart(self) -> None:
        # parents and children refer to each other; unlinked, they need no garbage collector
        for node in [*self.roots.values(), *self.nodes()]:
            node.children.clear()
            node.entries = NO_ENTRIES
        self.roots.clear()

    # -- locking ------------------------------------------------------------------------------

    def lock(
        self, node: Node, reads_from: Items[int] | None = None, windows_end: int = NO_END
    ) -> Lock:
        """Protect the prefix that ends at `node` from eviction from the device; return the lock.

        The lock covers the full-attention KV of the whole prefix. It also covers the sliding
        windows at the end of the prefix, or from the pages `reads_from` on, by kind, to page
        `windows_end`, at which a node ends, and the Mamba state of `node`.
        """
        starts = self.residency.lock_path(node, reads_from, windows_end)
        return Lock(DEVICE, node, starts, windows_end)

    def lock_host(self, node: Node, starts: Mapping[int, int]) -> Lock:
        """Protect data on the path to `node` from eviction from the host; return the lock.

        `starts` maps each kind of data to its first locked page; the lock reaches to the end of
        `node`. Of Mamba states, only the state of `node` is locked.
        """
        # evicting a node's window also evicts its state, so a lock on the state covers both
        covered = dict(starts)
        for point in self._points:
            for kind, _ in self._windows if point in starts else ():
                covered[kind] = min(covered.get(kind, node.start), node.start)
        # full comes last: only without other locks can the node be a leaf again
        lock = Lock(HOST, node, sorted(covered.items(), reverse=True))
        self.residency.count_host_locks(lock, 1)
        return lock

    def lock_anchor(self, node: Node) -> Lock:
        """Protect what a request needs to resume after `node` from eviction from the host.

        The lock covers the full-attention KV of `node`, the sliding windows at its end and its
        Mamba state.
        """
        starts = {FULL: node.start, **dict.fromkeys(self._points, node.start)}
        for kind, window in self._windows:
            for above in node.path(window.first(node.end)):
                starts[kind] = above.start
        return self.lock_host(node, starts)

    def release(self, lock: Lock) -> None:
        if lock.tier == DEVICE:
            self.residency.release_path(lock)
        else:
            self.residency.count_host_locks(lock, -1)

    def use_windows(self, node: Node, tokens: bytes, kind: int, start: int, end: int) -> None:
        """Mark pages `[start, end)` of a window on the path to `node` as just used.

        The tokens of the path are the first ones of `tokens`. Nodes are split at both pages.
        """
        tick = self.residency.next_tick()
        node = self.ancestor(node, tokens, end)
        self.ancestor(node, tokens, start)
        for above in node.path(start):
            above.aux_ticks[kind] = tick

    # -- growing ------------------------------------------------------------------------------

    def descend(self, node: Node, tokens: bytes, end: int) -> Node | None:
        """Return the child of `node` that begins with the next page of `tokens`, or None.

        The child is compared with `tokens` up to page `end`. If only its first pages are equal, the
        child is split, and the node of the equal pages is returned.
        """
        first = node.end * self.page_bytes
        child = node.children.get(tokens[first : first + self.page_bytes])
        if child is None:
            return None
        if child.end <= end and tokens.startswith(child.edge, first):
            return child  # the common case
        return self._split(child, self.num_shared(child, tokens, end))

    def ancestor(self, node: Node, tokens: bytes, end: int) -> Node:
        """Return the node on the path of `node` that ends at page `end`; `tokens` are its path's.

        If no node ends there, a node is split.
        """
        while node.start > end:
            assert node.parent is not None
            node = node.parent
        if node.parent is None or node.end == end:
            return node
        if node.start == end:
            return node.parent
        return self._split(node, end - node.start)

    def grow(self, parent: Node, edge: bytes) -> Node:
        child = Node(parent, edge, parent.end, len(edge) // self.page_bytes, self.kinds.size)
        self.num_grown += 1
        child.created, child.tick = self.num_grown, self.residency.tick
        parent.children[edge[: self.page_bytes]] = child
        self.num_nodes += 1
        self.residency.refresh(parent)
        return child

    # -- moving between tiers -----------------------------------------------------------------

    def not_on_host(self, node: Node) -> list[Node]:
        """Return the nodes up to `node` whose full KV the host lacks, from the root down."""
        # without write_back, the host has all that comes before what it has
        among = filter if self.demotes else takewhile
        return [*among(lambda each: each.held[HOST][FULL] is None, node.path())][::-1]

    def plan_back_up(self, node: Node) -> Plan:
        """Return the nodes whose data must be copied to the host to resume prompts after `node`.

        The result has one list of nodes per kind of data, from the root down. It leaves out data
        that the host holds already or that the device lacks.
        """
        plan = self._nothing()
        full = plan[FULL] = self.not_on_host(node)
        for kind, window in self._windows:
            edge = window.first(node.end)
            # one new page more than a match needs: an equal prompt starts one page earlier
            is_exact = window.is_chunk or self.rules.keeps_for_repeats
            for above in node.path(edge if is_exact else edge - 1):
                is_page_more = above.num_pages == 1 and above.held[HOST][FULL] is None
                if above.held[DEVICE][kind] is None and above.held[HOST][kind] is None:
                    break  # of no use without the rest of the window
                if above.end > edge or is_page_more:
                    plan[kind].insert(0, above)
        for kind in self._points:
            plan[kind] = sorted({*full, node}, key=lambda above: above.start)
        for kind in self.kinds.aux:
            lacking = [above for above in plan[kind] if above.held[HOST][kind] is None]
            plan[kind] = [above for above in lacking if above.held[DEVICE][kind] is not None]
        return plan

    def plan_copy(self, node: Node) -> Plan:
        """Return `node` for each kind of data that only the device holds.

        Of a sliding window, the result also has the other nodes of which only the device holds it.
        """
        plan = self._nothing()
        extents = {kind: window.first(node.end) for kind, window in self._windows}
        for kind, edge in {**dict.fromkeys((FULL, *self._points), node.start), **extents}.items():
            for above in node.path(edge):
                if above.held[DEVICE][kind] is None and above.held[HOST][kind] is None:
                    break
                if above.held[HOST][kind] is None:
                    plan[kind].insert(0, above)
        return plan

    def plan_load_back(self, node: Node) -> Plan:
        """Return the nodes whose data must be copied to the device to resume a prompt after `node`.

        The result has one list of nodes per kind of data, from the root down. It contains data that
        only the host holds. The call may split a node, so that only the part inside a sliding
        window is copied.
        """
        plan = self._nothing()
        starts = {kind: window.first(node.end) for kind, window in self._windows}
        for kind, edge in starts.items():
            for above in list(node.path(edge)):
                is_wanted = above.held[DEVICE][kind] is None
                if is_wanted and above.start < edge and not self.rules.loads_whole_nodes:
                    self._split(above, edge - above.start)
        for kind, edge in {FULL: 0, **starts}.items():
            plan[kind] = [above for above in node.span(edge) if above.held[DEVICE][kind] is None]
        for kind in self._points:
            if not node.is_root and node.held[DEVICE][kind] is None:
                plan[kind] = [node]
        return plan

    # -- evicting -----------------------------------------------------------------------------

    def victim(self, tier: int, kind: int, need: int) -> tuple[Node, int] | None:
        """Return the data that a tier evicts next, as node and kind, or None if none can leave.

        `need` is the number of pages or state slots of `kind` that must become free. A leaf of
        which the last pages suffice may be split.
        """
        among = self.kinds.numbers if self.is_shared[tier] else (kind,)
        found = self.residency.victim(tier, kind, need, among)
        points = self.kinds.points
        if found is not None and found[1] not in points and self.rules.trims_leaves:
            (node, each), sizes = found, self.kinds.page_bytes
            lost = self.lost(node, tier, each) if self.is_shared[tier] else (each,)
            leaving = [other for other in lost if node.held[tier][other] and other not in points]
            missing, rest = divmod(need * sizes[kind], sum([sizes[other] for other in leaving]))
            if not missing:  # less than a page of all kinds
                found = node, leaving[-1]
            if not missing or (rest and len(leaving) == 1):
                missing += 1
            if missing < node.num_pages:
                self._split(node, node.num_pages - missing)
        return found

    def lost(self, node: Node, tier: int, kind: int) -> tuple[int, ...]:
        """Return the kinds of data that a node loses on a tier when its data of `kind` is evicted.

        A leaf loses all its data, unless single pages leave (`compat.rules.trims_leaves`): then a
        window or state leaves alone, and full-attention KV leaves windows and state on the device,
        and on the host those that were used later. Other nodes lose the data of `kind` and what is
        useless without it. The host's copy of full-attention KV that the device holds too leaves
        alone.
        """
        is_leaf = node in self.residency.queues[tier][FULL]
        if is_leaf and not self.rules.trims_leaves:
            return self.kinds.lost_with[FULL]
        if (self.keeps_sidecars and tier == DEVICE) if kind == FULL else self.rules.trims_leaves:
            return (kind,)
        if kind == FULL and is_leaf and self.keeps_sidecars and self.entries is None:
            # what was used later than the full-attention KV stays on the host
            ranks = [queue.priority(node) for queue in self.residency.queues[HOST]]
            return tuple(each for each in self.kinds.lost_with[FULL] if ranks[each] <= ranks[FULL])
        return (FULL,) if kind == FULL and not is_leaf else self.kinds.lost_with[kind]

    def evict(self, node: Node, tier: int, kind: int, demand: Demand) -> list[FreePages]:
        """Evict a node's data of `kind` from a tier, and all data that is lost with it.

        Return the page ids to free.
        """
        actions: list[FreePages] = []
        for other in self.lost(node, tier, kind):
            self.residency.drop(node, tier, other, actions, demand, is_victim=other == kind)
        if node.held[DEVICE][FULL] is None and node.held[HOST][FULL] is None:
            if self.keeps_sidecars:
                self._remove_empty(node)
            else:
                self._remove(node, actions, demand)
        return actions

    # -- inside -------------------------------------------------------------------------------

    def _descend_all(self, tokens: bytes, end: int, namespace: str) -> Node:
        # the last node of the path of `tokens` up to page `end`, split where they differ
        size, may_be_hollow = self.page_bytes, self.keeps_sidecars
        node = self.root(namespace)
        while node.end < end:
            first = node.end * size
            child = node.children.get(tokens[first : first + size])
            if child is None or (may_be_hollow and not any(held[FULL] for held in child.held)):
                return node
            if child.end > end or not tokens.startswith(child.edge, first):
                return self._split(child, self.num_shared(child, tokens, end))
            node = child
        return node

    def _mark_used(self, node: Node) -> None:
        tick, above = self.residency.tick, node
        while (parent := above.parent) is not None:  # a generator takes half as long again
            above.tick, above = tick, parent
        self.residency.touch_windows(node)
        self.residency.touch_states(node)

    def _missing(self, node: Node, *, is_device: bool) -> Node | None:
        # the lowest node whose missing data prevents a request from continuing after `node`
        if node.parent is None:
            return None
        device, host = node.held
        if is_device and device[FULL] is None:
            return node
        for kind in self._points:
            if device[kind] is None and (is_device or host[kind] is None):
                return node
        for kind, window in self._windows:
            edge, above = window.first(node.end), node
            while above.end > edge and (parent := above.parent) is not None:
                held = above.held
                if held[DEVICE][kind] is None and (is_device or held[HOST][kind] is None):
                    return above
                above = parent
        return None

    def _split(self, lower: Node, pages: int) -> Node:
        cut = pages * self.page_bytes
        parent = lower.parent
        assert parent is not None
        assert 0 < pages < lower.num_pages
        upper = Node(parent, lower.edge[:cut], lower.start, pages, self.kinds.size)
        parent.children[upper.edge[: self.page_bytes]] = upper
        lower.parent = upper
        lower.edge = lower.edge[cut:]
        lower.start += pages
        upper.children[lower.edge[: self.page_bytes]] = lower
        upper.uses, upper.tick, upper.created = lower.uses, lower.tick, lower.created
        if self.marks_cold:
            upper.is_cold = lower.is_cold
        if self.rules.split_refreshes:
            upper.tick = lower.tick = self.residency.tick
        for kind in self.kinds.paged:
            upper.stored[kind] = lower.stored[kind]
        if lower.digests is not None:
            upper.digests, lower.digests = lower.digests[:pages], lower.digests[pages:]
        self.num_nodes += 1
        self.residency.split(upper, lower)
        return upper

    def _remove(self, node: Node, actions: list[FreePages], demand: Demand) -> None:
        # remove a subtree without device data; it has children only under write_back
        for child in list(node.children.values()):
            self._remove(child, actions, demand)
        for tier in (HOST, DEVICE):  # the device may hold windows and states
            for kind in self.kinds.numbers:
                self.residency.drop(node, tier, kind, actions, demand)
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[: self.page_bytes]]
        node.parent = None
        node.entries = NO_ENTRIES  # an entry refers to its node; the cycle would keep both alive
        self.num_nodes -= 1
        self.residency.refresh(parent)

    def _remove_empty(self, node: Node) -> None:
        # remove a node that holds nothing, and then those above it that hold nothing
        while node.parent is not None and not (node.children or any(map(any, node.held))):
            above = node.parent
            self._remove(node, [], NO_DEMAND)
            node = above

    def _host_hits(self, best: Node, on_device: Node) -> tuple[int, ...]:
        # by kind: the data needed for a hit after `best` that only the host has
        hits = list(self._no_hits)
        starts = {kind: window.first(best.end) for kind, window in self._windows}
        for kind, edge in {FULL: on_device.end, **starts}.items():
            for above in best.path(edge):
                if above.held[DEVICE][kind] is None and above.held[HOST][kind] is not None:
                    start = above.start if self.rules.loads_whole_nodes else max(above.start, edge)
                    hits[kind] += (above.end - start) * self.page_size
        for kind in self._points:
            hits[kind] = int(best.held[DEVICE][kind] is None)
        return tuple(hits)

    def _nothing(self) -> Plan:
        return [[] for _ in range(self.kinds.size)]
