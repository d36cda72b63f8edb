"""Device to host: what is copied when it is published, or before it is evicted."""

from collections import Counter

from hicache.cache.pages import joined
from hicache.cache.tiers.host_allocator import HostAllocator
from hicache.cache.tiers.transfer import BackUp, Bookings, Move
from hicache.cache.tree.actions import Plan
from hicache.cache.tree.node import DEVICE, FULL, HOST, KIND_NAMES, KINDS, MAMBA, SWA, Node
from hicache.cache.tree.page_history import Pressure
from hicache.cache.tree.radix_tree import RadixTree


class BackUps:
    """Books the copies from device to host; what finds no room there is dropped and counted."""

    def __init__(
        self,
        tree: RadixTree,
        allocator: HostAllocator,
        bookings: Bookings,
        counters: Counter[str],
        *,
        hits: int,
    ) -> None:
        """`hits`: of a published node, from which on it is worth a copy."""
        self._tree = tree
        self._allocator = allocator
        self._bookings = bookings
        self._counters = counters
        self._hits = hits

    def save_path(self, node: Node) -> None:
        """Copy what of a locked path has no copy, as deep as it has been hit often enough."""
        published = node
        while not node.is_root and node.hit_count < self._hits:
            assert node.parent is not None
            node = node.parent
        plan = self._tree.plan_back_up(node)
        if node is not published and not node.is_root:
            self._back_up_locked(node, plan, is_fence=False)
        elif any(plan):
            self._back_up(plan, is_fence=False)

    def save_victim(self, victim: Node, kind: int) -> None:
        """Copy what the eviction of a component would lose; the next step waits for it."""
        device, host = victim.held
        leaf = victim in self._tree.residency.leaves[DEVICE]
        kinds = self._tree.kinds if leaf else [other for other in (SWA, MAMBA) if other >= kind]
        lost = [
            [victim] if other in kinds and device[other] is not None and host[other] is None else []
            for other in KINDS
        ]
        self._back_up_locked(victim, Plan(*lost), is_fence=True)

    def _back_up_locked(self, node: Node, plan: Plan, *, is_fence: bool) -> None:
        lock = self._tree.lock(node)  # making room on the host may take other device data along
        self._back_up(plan, is_fence=is_fence)
        self._tree.release(lock)

    def _back_up(self, plan: Plan, *, is_fence: bool) -> None:
        tree = self._tree
        before = tree.history.press(Pressure.back_up)
        moves: list[Move] = []
        counts = [0, 0, 0]
        for kind in KINDS:
            sources, targets = [], []
            if kind != FULL:
                self._allocator.make_room(kind, plan.num_pages(kind))
            for each in plan[kind]:
                if kind != FULL and plan.full and each.held[HOST][FULL] is None:
                    continue  # its full pages found no room, and sidecars need them
                source = each.held[DEVICE][kind]
                assert source is not None
                target = self._allocator.allocate(kind, len(source))
                if target is None:
                    lost = plan.num_pages(kind) - counts[kind]
                    self._counters[f"back_up/dropped_{KIND_NAMES[kind]}_pages"] += lost
                    break
                tree.residency.put(each, HOST, kind, target)
                sources.append(source)
                targets.append(target)
                counts[kind] += len(source)
            if sources:
                moves.append(Move(kind, joined(sources), joined(targets)))
        if moves:
            num_bytes = self._bookings.bytes_of(counts)
            self._book(plan, moves, num_bytes, is_fence=is_fence)
        tree.history.press(before)
        for kind in KINDS:
            for each in plan[kind]:
                if each.held[HOST][kind] is None:
                    tree.history.drop_copy(each, kind)

    def _book(self, plan: Plan, moves: list[Move], num_bytes: int, *, is_fence: bool) -> None:
        tree = self._tree
        full, swa, states = (
            [each for each in plan[kind] if each.held[HOST][kind] is not None] for kind in KINDS
        )
        deepest = max((*full, *swa, *states), key=lambda each: each.end)
        full_start = full[0].start if full else deepest.end
        swa_start = swa[0].start if swa else deepest.end
        back_up = BackUp(
            moves=moves,
            num_bytes=num_bytes,
            node=deepest,
            full_start=full_start,
            swa_start=swa_start,
            state_nodes=states,
            is_fence=is_fence,
            host_locks=tree.lock_copies(deepest, full_start, swa_start, states),
        )
        if not is_fence:
            # a lock covers a window, and the copy may have a page more
            back_up.locks = [
                tree.lock(each) for each in dict.fromkeys([deepest, *swa[:1], *states])
            ]
        self._bookings.book(back_up)
        self._counters["transfer/back_up_bytes"] += num_bytes
