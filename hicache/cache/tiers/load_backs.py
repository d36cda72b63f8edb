"""Host to device, for a request that is about to run."""

from collections import Counter
from itertools import pairwise

from hicache.cache.pages import NO_PAGES, PageIds, joined
from hicache.cache.tiers.device_allocator import DeviceAllocator
from hicache.cache.tiers.transfer import Bookings, LoadBack, Move
from hicache.cache.tree.arrivals import Arrivals
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, FULL, HOST, KINDS, MAMBA, SWA, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


class LoadBacks:
    """Books load-backs, all or nothing: pages of every component are found first."""

    def __init__(
        self,
        tree: RadixTree,
        allocator: DeviceAllocator,
        bookings: Bookings,
        counters: Counter[str],
        arrivals: Arrivals,
        *,
        threshold: int,
    ) -> None:
        """`threshold`: full tokens below which nothing is loaded but for a window or a state."""
        self._tree = tree
        self._allocator = allocator
        self._bookings = bookings
        self._counters = counters
        self._arrivals = arrivals
        self._threshold = threshold

    def load(self, match: MatchResult) -> LoadBack | None:
        """Bring what the match found on the host alone; None if not worth it, or without room.

        The pages are the tree's from now on, and locked until the copy is done.
        """
        tree, node = self._tree, match.best_node
        wants_sidecar = match.swa_host_hit_length or match.mamba_host_hit_length
        if match.host_hit_length < self._threshold and not wants_sidecar:
            return None
        plan = tree.plan_load_back(node)
        lock = tree.lock(node)
        host_lock = tree.lock_host(
            node,
            plan.full[0].start if plan.full else node.end,
            swa_start=plan.swa[0].start if plan.swa else node.end,
            with_state=bool(plan.mamba),
        )
        taken = self._allocate((plan.num_pages(FULL), plan.num_pages(SWA), plan.num_pages(MAMBA)))
        if taken is None:
            tree.release(host_lock)
            tree.release(lock)
            self._counters["load_back/failed_count"] += 1
            return None
        moves = []
        for kind in KINDS:
            nodes = plan[kind]
            if not nodes:
                continue
            sources = []
            for each, part in _dealt(taken[kind], nodes, kind):
                held = each.held[HOST][kind]
                assert held is not None
                sources.append(held)
                tree.residency.put(each, DEVICE, kind, part)
            moves.append(Move(kind, joined(sources), taken[kind]))
            if kind == FULL:
                self._arrivals.use(moves[-1].sources)
        counts = (len(taken[FULL]), len(taken[SWA]), len(taken[MAMBA]))
        load_back = LoadBack(
            moves=moves,
            num_bytes=self._bookings.bytes_of(counts),
            node=node,
            locks=[lock],
            host_locks=[host_lock],
            num_pages=counts,
        )
        self._bookings.book(load_back)
        self._counters["transfer/load_back_bytes"] += load_back.num_bytes
        return load_back

    def load_again(self, load_back: LoadBack, slot: PageIds) -> None:
        """Copy the state of a load-back that has not begun to one more slot."""
        (states,) = (move for move in load_back.moves if move.kind == MAMBA)
        load_back.moves.append(Move(MAMBA, states.sources, slot, is_own=True))
        self._add(load_back, (0, 0, 1))

    def load_last(
        self, node: Node, sequence: Sequence, load_back: LoadBack | None
    ) -> LoadBack | None:
        """Copy the page after `node` from the host to a page of the sequence's own.

        The copy joins `load_back`, which has not begun, or is one by itself. None if the host does
        not hold the page, if windows or states are missing, or without room.
        """
        tree, end = self._tree, node.end + 1
        if tree.has_swa or tree.has_states or sequence.lock is None:
            return None
        last = tree.descend(node, sequence.tokens, end)
        held = None if last is None else last.held[HOST][FULL]
        if last is None or held is None:
            return None
        host_lock = tree.lock_host(last, node.end)
        page_ids = self._allocator.allocate(FULL, 1)
        if page_ids is None:
            tree.release(host_lock)
            return None
        last.tick = tree.residency.tick
        self._arrivals.use(held)
        sequence.full_pages += page_ids
        sequence.num_pages = end
        is_new = load_back is None
        if load_back is None:
            lock = tree.lock(node)
            load_back = LoadBack(
                moves=[], num_bytes=0, node=node, locks=[lock], num_pages=(0, 0, 0)
            )
        load_back.moves.append(Move(FULL, held, page_ids, is_own=True))
        load_back.host_locks.append(host_lock)
        self._add(load_back, (1, 0, 0))
        if is_new:
            self._bookings.book(load_back)
        return load_back

    def _add(self, load_back: LoadBack, counts: tuple[int, int, int]) -> None:
        full, swa, states = (
            had + more for had, more in zip(load_back.num_pages, counts, strict=True)
        )
        load_back.num_pages = (full, swa, states)
        num_bytes = self._bookings.bytes_of(counts)
        load_back.num_bytes += num_bytes
        self._counters["transfer/load_back_bytes"] += num_bytes

    def _allocate(self, counts: tuple[int, int, int]) -> list[PageIds] | None:
        taken: list[PageIds] = []
        for kind, count in enumerate(counts):
            page_ids = self._allocator.allocate(kind, count) if count else NO_PAGES
            if page_ids is None:
                for earlier, page_ids in enumerate(taken):
                    self._allocator.free(earlier, page_ids)
                return None
            taken.append(page_ids)
        return taken


def _dealt(page_ids: PageIds, nodes: list[Node], kind: int) -> list[tuple[Node, PageIds]]:
    # each node's share of ids that were allocated for all of them
    bounds = [0]
    for node in nodes:
        bounds.append(bounds[-1] + (1 if kind == MAMBA else node.num_pages))
    parts = [page_ids[first:last] for first, last in pairwise(bounds)]
    return list(zip(nodes, parts, strict=True))
