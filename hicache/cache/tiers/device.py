"""The device tier: allocates pages and state slots, evicts, and copies from the host."""

from collections.abc import Container
from operator import sub

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds, joined
from hicache.cache.tiers.shared import SharedAllocator, fitting
from hicache.cache.tiers.transfer import Bookings, LoadBack, Move
from hicache.cache.tiers.write_back import WriteBack
from hicache.cache.tree.events import NO_DEMAND, Demand
from hicache.cache.tree.node import DEVICE, HOST, MatchResult, Node
from hicache.cache.tree.radix_tree import RadixTree


class Device:
    """Manages the device tier: allocates pages, evicts data, and queues copies from the host."""

    def __init__(self, tree: RadixTree, bookings: Bookings, write_back: WriteBack | None) -> None:
        # `write_back` copies victims before they are evicted; None: no copy at eviction
        self._tree = tree
        self._pools = bookings.pools[DEVICE]
        self._bookings = bookings
        self._counters = bookings.counters
        self._write_back = write_back
        self.is_shared = isinstance(self._pools[FULL], SharedAllocator)

    # -- room ----------------------------------------------------------------------------------

    def evictable(self, kind: int) -> int:
        residency = self._tree.residency
        resident, protected = residency.resident[DEVICE], residency.protected[DEVICE]
        if self.is_shared:
            return fitting(self._tree.kinds, kind, map(sub, resident, protected))
        return resident[kind] - protected[kind]

    def allocate(self, kind: int, count: int, demand: Demand = NO_DEMAND) -> PageIds | None:
        """Allocate `count` device page ids of one kind of data; return None if there is no room.

        The call evicts other data if too few pages are free. `demand` names the request that needs
        the pages.
        """
        return self._pools[kind].allocate(count) if self.make_room(kind, count, demand) else None

    def make_room(self, kind: int, count: int, demand: Demand, *, spare: int = 0) -> bool:
        """Evict until `count` ids are free; return False if that is impossible.

        `spare` is a number of extra pages that should stay free afterwards, if possible.
        """
        pool = self._pools[kind]
        if pool.num_free < count + spare:
            if pool.num_free + self.evictable(kind) < count:
                return False  # evicting everything would not suffice
            self.evict(kind, count + spare - pool.num_free, demand)
        return pool.num_free >= count

    def evict(self, kind: int, count: int, demand: Demand = NO_DEMAND) -> bool:
        pool = self._pools[kind]
        wanted = pool.num_free + count
        stuck: dict[Node, list[int]] = {}  # nodes that may not leave, by the kinds that were chosen
        while pool.num_free < wanted:
            found = self._tree.victim(DEVICE, kind, wanted - pool.num_free)
            if found is None:
                break
            victim, each = found
            saver = self._write_back
            # asked once for a node: the locks of its copy queue it again, for all its kinds
            may_leave = victim not in stuck
            if may_leave and saver is not None:
                may_leave = saver.save(victim, each, demand.request_id)
            if may_leave:
                self._bookings.free_evicted(self._tree.evict(victim, DEVICE, each, demand))
            else:
                stuck.setdefault(victim, []).append(each)
                self._tree.residency.queues[DEVICE][each].pop(victim, None)
        for node, kinds in stuck.items():
            for each in kinds:
                self._tree.residency.reconsider(node, each)
        return pool.num_free >= wanted

    # -- load-backs ----------------------------------------------------------------------------

    def load(
        self, match: MatchResult, demand: Demand, own: Container[tuple[int, Node]] = ()
    ) -> LoadBack | None:
        """Queue a copy of the part of a matched prefix that only the host holds; return the copy.

        Return None if that part is too short to be worth a copy, or if the device has no room. The
        device pages belong to the radix tree at once. They stay locked until the copy is finished.
        Those of the (kind, node) in `own` belong to the request.
        """
        tree, node, kinds = self._tree, match.best_node, self._tree.kinds
        if match.host_hit_length < tree.rules.load_back_threshold and not match.needs_sidecars:
            return None
        plan = tree.plan_load_back(node)
        lock = tree.lock(node)
        starts = {kind: plan[kind][0].start for kind in kinds.numbers if plan[kind]}
        # SGLang locks the full KV of the node, loaded or not
        full = {FULL: node.start} if tree.rules.evicts_whole else {}
        host_lock = tree.lock_host(node, full | starts)
        taken: dict[int, PageIds] = {}
        for kind in starts:
            count = sum(kinds.count(kind, each.num_pages) for each in plan[kind])
            page_ids = self.allocate(kind, count, demand)
            if page_ids is None:
                for earlier, ids in taken.items():
                    self._pools[earlier].free(ids)
                tree.release(host_lock)
                tree.release(lock)
                self._counters["load_back/failed_count"] += 1
                return None
            taken[kind] = page_ids
        moves, own_data = [], []
        for kind, page_ids in taken.items():
            sources: list[PageIds] = []
            targets: list[PageIds] = []
            for each in plan[kind]:
                held = each.held[HOST][kind]
                assert held is not None
                target, page_ids = page_ids[: len(held)], page_ids[len(held) :]
                if (kind, each) in own:
                    own_data.append((kind, each.start, target))
                    moves.append(Move(kind, held, target, is_own=True))
                    continue
                tree.residency.put(each, DEVICE, kind, target)
                if tree.marks_cold and kind == FULL:
                    each.is_cold = True
                sources.append(held)
                targets.append(target)
            if sources:
                moves.append(Move(kind, joined(sources), joined(targets)))
            if kind == FULL:
                self._bookings.fates.close(moves[-1].sources, "used")
        num_bytes = self._bookings.bytes_of(moves)
        load_back = LoadBack(
            moves=moves,
            num_bytes=num_bytes,
            node=node,
            locks=[lock],
            host_locks=[host_lock],
            starts=starts,
            own=own_data,
        )
        self._bookings.book(load_back)
        self._counters["transfer/load_back_bytes"] += num_bytes
        return load_back
