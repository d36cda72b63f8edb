"""The device tier: allocates pages and state slots, evicts, and copies from the host."""

from hicache.cache.kinds import FULL
from hicache.cache.pages import FreePages, PageIds, joined
from hicache.cache.tiers.host import Host
from hicache.cache.tiers.shared import SharedAllocator
from hicache.cache.tiers.transfer import Bookings, LoadBack, Move
from hicache.cache.tree.events import NO_DEMAND, Demand, Purpose
from hicache.cache.tree.node import DEVICE, HOST, MatchResult, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


class Device:
    """Manages the device tier: allocates pages, evicts data, and queues copies from the host."""

    def __init__(self, tree: RadixTree, bookings: Bookings, write_back: Host | None) -> None:
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
        if not self.is_shared:
            return resident[kind] - protected[kind]
        sizes = self._bookings.page_bytes
        numbers = self._tree.kinds.numbers
        total = sum([(resident[each] - protected[each]) * sizes[each] for each in numbers])
        return total // sizes[kind]

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

    def free(self, kind: int, page_ids: PageIds) -> None:
        self._pools[kind].free(page_ids)

    def evict(self, kind: int, count: int, demand: Demand = NO_DEMAND) -> bool:
        pool = self._pools[kind]
        wanted = pool.num_free + count
        stuck: list[tuple[Node, int]] = []
        while pool.num_free < wanted:
            if not self._evict_one(kind, wanted - pool.num_free, stuck, demand):
                break
        for node, each in stuck:
            self._tree.residency.reconsider(node, each)
        return pool.num_free >= wanted

    def _evict_one(
        self, wanted: int, need: int, stuck: list[tuple[Node, int]], demand: Demand
    ) -> bool:
        residency, sizes = self._tree.residency, self._bookings.page_bytes
        while (found := self._victim(wanted, need)) is not None:
            victim, kind = found
            missing = need if kind == wanted else -(-need * sizes[wanted] // sizes[kind])
            self._tree.trim(victim, kind, missing)
            if self._write_back is not None:
                self._write_back.save_victim(victim, kind, demand.request_id)
                if not residency.may_leave_device(victim):
                    stuck.append(found)
                    residency.queues[DEVICE][kind].pop(victim, None)
                    continue
            actions: list[FreePages] = []
            self._tree.evict(victim, DEVICE, kind, actions, demand)
            self._bookings.free_evicted(actions)
            return True
        return False

    def _victim(self, kind: int, need: int) -> tuple[Node, int] | None:
        residency = self._tree.residency
        if self.is_shared:
            return residency.shared_victim(DEVICE, kind, need)
        victim = residency.victim(DEVICE, kind, need)
        return None if victim is None else (victim, kind)

    # -- load-backs ----------------------------------------------------------------------------

    def load(self, match: MatchResult, demand: Demand) -> LoadBack | None:
        """Queue a copy of the part of a matched prefix that only the host holds; return the copy.

        Return None if that part is too short to be worth a copy, or if the device has no room. The
        device pages belong to the radix tree at once. They stay locked until the copy is finished.
        """
        tree, node, kinds = self._tree, match.best_node, self._tree.kinds
        if match.host_hit_length < tree.knobs.load_back_threshold and not match.needs_sidecars:
            return None
        plan = tree.plan_load_back(node)
        lock = tree.lock(node)
        starts = {kind: plan[kind][0].start for kind in kinds.numbers if plan[kind]}
        host_lock = tree.lock_host(node, starts)
        taken: dict[int, PageIds] = {}
        for kind in starts:
            count = sum(kinds.count(kind, each.num_pages) for each in plan[kind])
            page_ids = self.allocate(kind, count, demand)
            if page_ids is None:
                for earlier, ids in taken.items():
                    self.free(earlier, ids)
                tree.release(host_lock)
                tree.release(lock)
                self._counters["load_back/failed_count"] += 1
                return None
            taken[kind] = page_ids
        moves = []
        for kind, targets in taken.items():
            sources: list[PageIds] = []
            done = 0
            for each in plan[kind]:
                held = each.held[HOST][kind]
                assert held is not None
                sources.append(held)
                tree.residency.put(each, DEVICE, kind, targets[done : done + len(held)])
                done += len(held)
            moves.append(Move(kind, joined(sources), targets))
            if kind not in kinds.aux:
                self._bookings.fates.use(moves[-1].sources)
        num_bytes = self._bookings.bytes_of(moves)
        load_back = LoadBack(
            moves=moves, num_bytes=num_bytes, node=node, locks=[lock], host_locks=[host_lock]
        )
        self._bookings.book(load_back)
        self._counters["transfer/load_back_bytes"] += num_bytes
        return load_back

    def load_again(self, load_back: LoadBack, slot: PageIds) -> None:
        (states,) = (move for move in load_back.moves if move.kind in self._tree.kinds.points)
        self._add(load_back, states._replace(targets=slot, is_own=True))

    def load_last(
        self, node: Node, sequence: Sequence, load_back: LoadBack | None
    ) -> LoadBack | None:
        """Copy the page after `node` from the host to a device page that only this sequence owns.

        The copy is added to `load_back`, which must not have started. If `load_back` is None, a new
        copy is queued. Return the copy. Return None if the host lacks the page or the device has no
        free page. The result is also None for a model with sliding windows or Mamba states.
        """
        tree, end = self._tree, node.end + 1
        if tree.kinds.aux or sequence.lock is None:
            return None
        last = tree.descend(node, sequence.tokens, end)
        held = None if last is None else last.held[HOST][FULL]
        if last is None or held is None:
            return None
        host_lock = tree.lock_host(last, {FULL: node.end})
        page_ids = self.allocate(FULL, 1, Demand(Purpose.load_back, sequence.request_id))
        if page_ids is None:
            tree.release(host_lock)
            return None
        last.tick = tree.residency.tick
        self._bookings.fates.use(held)
        sequence.pages[FULL] += page_ids
        sequence.num_pages = end
        is_new = load_back is None
        if load_back is None:
            load_back = LoadBack(moves=[], num_bytes=0, node=node, locks=[tree.lock(node)])
        load_back.host_locks.append(host_lock)
        self._add(load_back, Move(FULL, held, page_ids, is_own=True))
        if is_new:
            self._bookings.book(load_back)
        return load_back

    def _add(self, load_back: LoadBack, move: Move) -> None:
        num_bytes = self._bookings.bytes_of([move])
        load_back.moves.append(move)
        load_back.num_bytes += num_bytes
        self._counters["transfer/load_back_bytes"] += num_bytes
