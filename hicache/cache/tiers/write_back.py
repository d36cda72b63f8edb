"""Copies from the device to the host that an eviction makes (`cache.write_policy=write_back`)."""

from hicache.cache.kinds import FULL
from hicache.cache.tiers.host import Host
from hicache.cache.tiers.transfer import EVICTED, Bookings, Load, WritePolicy
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.radix_tree import Plan, RadixTree


class WriteBack:
    """Copies data to the host before an eviction drops the data from the device."""

    def __init__(
        self, tree: RadixTree, bookings: Bookings, host: Host, policy: WritePolicy
    ) -> None:
        self._tree = tree
        self._bookings = bookings
        self._host = host
        self._policy = policy

    def save(self, victim: Node, kind: int, request_id: int | None) -> bool:
        """Copy what an eviction is about to drop; return True if the victim may then be evicted.

        The eviction chose the data of `kind` at the node `victim`; a leaf loses its data of other
        kinds as well. Data that the write policy does not want is not copied. The next step of the
        engine waits for the copy. `request_id` names the request that needs the space.
        """
        device, host = victim.held
        plan: Plan = [[] for _ in device]
        lost = self._tree.lost(victim, DEVICE, kind)
        keeps_full = FULL not in lost
        if self._tree.rules.evicts_whole:  # all of a node at once, and nothing later
            load = Load(EVICTED, self._bookings, FULL, DEVICE)
            is_new = host[FULL] is None and (not keeps_full or host[kind] is None)
            if is_new and self._policy.admits(self._tree, victim, load):
                plan = self._tree.plan_copy(victim)
                if keeps_full:
                    count = sum(self._tree.kinds.count(kind, each.num_pages) for each in plan[kind])
                    self._host.make_room(kind, count, Demand(Purpose.back_up, request_id))
            lost = ()
        for other in lost:
            load = Load(EVICTED, self._bookings, other, DEVICE)
            if not keeps_full and other != FULL and host[FULL] is None and not plan[FULL]:
                break  # windows and states need the full pages
            is_new = device[other] is not None and host[other] is None
            if is_new and self._policy.admits(self._tree, victim, load):
                plan[other] = [victim]
        self._host.back_up_locked(victim, plan, request_id, is_fence=True)
        return keeps_full or self._may_leave(victim)

    def _may_leave(self, victim: Node) -> bool:
        # the eviction of a leaf without a copy on the host also drops all nodes below it, which lie
        # on the host only; none of what it drops may be locked
        if victim.held[HOST][FULL] is not None:
            return True
        if any(victim.locks[HOST]):
            return False
        below = list(victim.children.values())
        for node in below:
            if any(node.locks[HOST]) or node.path_locks:
                return False
            below.extend(node.children.values())
        return True
