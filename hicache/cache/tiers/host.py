"""The host tier: allocates pages and state slots, evicts, and copies from the device."""

from hicache.cache.kinds import FULL
from hicache.cache.pages import FreePages, PageIds, free, joined
from hicache.cache.tiers.storage_writes import StorageWriter
from hicache.cache.tiers.transfer import (
    INSERTED,
    BackUp,
    Bookings,
    Load,
    Move,
    WritePolicy,
)
from hicache.cache.tree.events import NO_DEMAND, Demand, Purpose
from hicache.cache.tree.node import DEVICE, HOST, Lock, Node
from hicache.cache.tree.radix_tree import Plan, RadixTree


class Host:
    """Manages the host tier: allocates pages, evicts data, and queues copies from the device.

    If the host has no room for a copy, the copy is dropped and counted.
    """

    def __init__(
        self,
        tree: RadixTree,
        bookings: Bookings,
        writer: StorageWriter | None,
        policy: WritePolicy,
    ) -> None:
        self._tree = tree
        self._pools = bookings.pools[HOST]
        self._bookings = bookings
        self._counters = bookings.counters
        self._writer = writer
        self._policy = policy
        self._has_pages = self._pools[FULL].capacity != 0
        kinds = tree.kinds
        # states before windows: evicting a leaf's state frees its window, too
        self._order = (FULL, *kinds.points, *(kind for kind, _ in kinds.windows))

    # -- room ----------------------------------------------------------------------------------

    def allocate(self, kind: int, count: int, demand: Demand = NO_DEMAND) -> PageIds | None:
        pool = self._pools[kind]
        while pool.num_free < count:
            if not self.evict_one(kind, count - pool.num_free, demand):
                return None
        return pool.allocate(count)

    def make_room(self, kind: int, count: int, demand: Demand) -> None:
        pool = self._pools[kind]
        if pool.num_free >= count:
            return
        wanted = count + pool.num_free * self._tree.rules.evicts_whole
        while pool.num_free < wanted and self.evict_one(kind, wanted - pool.num_free, demand):
            pass

    def evict_one(self, kind: int, missing: int, demand: Demand = NO_DEMAND) -> bool:
        found = self._tree.victim(HOST, kind, missing)
        if found is None:
            return False
        victim, leaving = found
        if self._writer is not None:
            self._writer.on_leaving(victim, leaving)
        self._bookings.free_evicted(self._tree.evict(victim, HOST, leaving, demand))
        return True

    def leave(self, node: Node) -> None:
        """Free the host's copies of all data up to `node` that the device holds too.

        Copies that are being read or written stay.
        """
        actions: list[FreePages] = []
        for each in node.path():
            device, host = each.held
            for kind in self._tree.kinds.numbers:
                is_double = device[kind] is not None and host[kind] is not None
                if is_double and not each.locks[HOST][kind]:
                    self._tree.residency.drop(each, HOST, kind, actions)
        free(actions, self._bookings.pools)

    # -- back-ups ------------------------------------------------------------------------------

    def save_path(
        self,
        node: Node,
        request_id: int | None = None,
        *,
        is_answer: bool = False,
        is_repeated: bool = False,
    ) -> None:
        """Copy a new cached prefix from the device to the host, if the write policy wants the copy.

        The prefix ends at `node` and must be locked. The copy ends at the deepest node that the
        policy accepts. It leaves out data that the host holds already. `request_id` names the
        request that inserted the prefix. `is_answer` is True if the new pages hold generated
        tokens, `is_repeated` if the request has inserted all of them before.
        """
        if not self._has_pages or INSERTED not in self._policy.moments["host"]:
            return
        published = node
        load = Load(INSERTED, self._bookings, FULL, DEVICE, is_answer=is_answer)
        while not node.is_root and not self._policy.admits(self._tree, node, load):
            assert node.parent is not None
            node = node.parent
        parts = [*self._tree.not_on_host(node), node] if self._tree.rules.evicts_whole else [node]
        for part in dict.fromkeys(parts):
            plan = self._tree.plan_back_up(part)
            # full pages are not tried twice, and what was added to a node that is being copied, and
            # windows before it, wait for another insertion
            is_whole = self._tree.rules.evicts_whole
            done = self._copied_end(part) if is_whole else 0
            if is_whole and (is_repeated if plan[FULL] else done == part.end):
                continue
            for kind, _ in self._tree.kinds.windows:
                plan[kind] = [each for each in plan[kind] if each.start >= done]
            if node is not published and not node.is_root:
                self.back_up_locked(node, plan, request_id, is_fence=False)
            elif any(plan) and not self._back_up(plan, request_id, is_fence=False):
                return

    def _copied_end(self, node: Node) -> int:
        # the page before which the path to `node` is being copied
        path, end = set(node.path()), 0
        for each in self._bookings.in_flight:
            if isinstance(each, BackUp):
                end = max([end, *[n.end for n in each.node.span(each.first_page) if n in path]])
        return end

    def back_up_locked(
        self, node: Node, plan: Plan, request_id: int | None, *, is_fence: bool
    ) -> None:
        """Copy what `plan` lists, data on the path to `node`, while the path is locked.

        If `is_fence` is True, the device frees the data at once.
        """
        lock = self._tree.lock(node)  # eviction on the host may drop other data of the path
        self._back_up(plan, request_id, is_fence=is_fence)
        self._tree.release(lock)

    def _back_up(self, plan: Plan, request_id: int | None, *, is_fence: bool) -> bool:
        # False: with `evicts_whole`, nothing is copied if a kind finds too little room
        tree = self._tree
        demand = Demand(Purpose.back_up, request_id)
        moves: list[Move] = []
        copied: Plan = [[] for _ in plan]
        held: list[Lock] = []
        if tree.evicts_mirrors:  # no room may be made with copies that the new ones follow
            near = [
                each for nodes in plan for node in nodes for each in (node.parent, node) if each
            ]
            there = [each for each in dict.fromkeys(near) if each.held[HOST][FULL] is not None]
            held = [tree.lock_host(each, {FULL: each.start}) for each in there]
        finds_room = not tree.rules.evicts_whole or self._finds_room(plan, demand)
        for kind in self._order if finds_room else ():
            sources: list[PageIds] = []
            targets: list[PageIds] = []
            wanted = sum([tree.kinds.count(kind, each.num_pages) for each in plan[kind]])
            if kind != FULL:
                self.make_room(kind, wanted, demand)
            for each in plan[kind]:
                if kind != FULL and each.held[HOST][FULL] is None and each in plan[FULL]:
                    continue  # its full pages were not copied, and sidecars need them
                source = each.held[DEVICE][kind]
                assert source is not None
                target = self.allocate(kind, len(source), demand)
                if target is None:
                    name = f"back_up/dropped_{tree.kinds.names[kind]}_pages"
                    self._counters[name] += wanted - sum(map(len, targets))
                    break
                tree.residency.put(each, HOST, kind, target)
                if tree.demotes or tree.evicts_mirrors:
                    # no eviction for the next node may take this node's copy
                    held.append(tree.lock_host(each, {kind: each.start}))
                copied[kind].append(each)
                sources.append(source)
                targets.append(target)
            if sources:
                moves.append(Move(kind, joined(sources), joined(targets)))
        if moves:
            self._book(copied, sorted(moves, key=lambda move: move.kind), is_fence=is_fence)
        for lock in held:
            tree.release(lock)
        if tree.listener is not None and finds_room:
            for kind, nodes in enumerate(plan):
                for each in nodes:
                    if each.held[HOST][kind] is None:
                        tree.listener.not_copied(each, kind)
        return finds_room

    def _finds_room(self, plan: Plan, demand: Demand) -> bool:
        for kind in self._order:
            pool = self._pools[kind]
            wanted = sum([self._tree.kinds.count(kind, each.num_pages) for each in plan[kind]])
            if kind != FULL:
                self.make_room(kind, wanted, demand)
            while pool.num_free < wanted:
                if not self.evict_one(kind, wanted - pool.num_free, demand):
                    name = f"back_up/dropped_{self._tree.kinds.names[kind]}_pages"
                    self._counters[name] += wanted
                    return False
        return True

    def _book(self, copied: Plan, moves: list[Move], *, is_fence: bool) -> None:
        tree, kinds = self._tree, self._tree.kinds
        starts = {kind: copied[kind][0].start for kind in kinds.kept if copied[kind]}
        points = [(kind, each) for kind in kinds.points for each in copied[kind]]
        deepest = max([nodes[-1] for nodes in copied if nodes], key=lambda each: each.end)
        host_locks = [tree.lock_host(deepest, starts)]
        host_locks += [tree.lock_host(each, {kind: each.start}) for kind, each in points]
        if is_fence and tree.rules.evicts_whole and self._writer is not None:
            # SGLang takes these locks before the eviction, and holds them until storage has a copy
            whole = {
                each for nodes in copied for each in nodes if each.held[HOST][FULL] is not None
            }
            host_locks += map(tree.lock_anchor, sorted(whole, key=lambda each: each.start))
        back_up = BackUp(
            moves=moves,
            num_bytes=self._bookings.bytes_of(moves),
            node=deepest,
            starts=starts,
            points=points,
            is_fence=is_fence,
            host_locks=host_locks,
        )
        if not is_fence:
            # a lock covers one window; the copy may have one page more
            tops = [copied[kind][0] for kind, _ in kinds.windows if copied[kind]]
            covered = dict.fromkeys([deepest, *tops, *[each for _, each in points]])
            back_up.locks = [tree.lock(each) for each in covered]
        self._bookings.book(back_up)
        self._counters["transfer/back_up_bytes"] += back_up.num_bytes
