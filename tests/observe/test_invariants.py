"""Every law that is checked can be broken, and is named then."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import free
from hicache.cache.prefetch.prefetch import Phase
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig, StageAt
from hicache.observe import invariants
from hicache.observe.invariants import BrokenLawError
from tests.cache.small import (
    complete_all,
    evict_all,
    make_cache,
    node_at,
    prefetcher_of,
    run_request,
    tokens_of,
)


class World:
    """Two prompts that part after two pages, on both tiers; nothing is under way."""

    def __init__(
        self,
        write_policy: str = "write_through",
        host: tuple[int, int, int] = (32, 32, 8),
    ) -> None:
        self.cache: PrefixCache = make_cache(
            device=(32, 32, 8),
            host=host,
            window_len=8,
            has_states=True,
            storage_queue_bytes=1000,
            write_policy=write_policy,
        )
        config = PrefetchConfig(threshold=4, stage_at=StageAt.enqueue)
        self.prefetcher = prefetcher_of(self.cache, config, 1000)
        self.sequences: list[Sequence] = []
        run_request(self.cache, tokens_of(16), 16, state_ends=(2,))
        run_request(self.cache, tokens_of(8) + tokens_of(8, first=90), 16)
        self.upper = node_at(self.cache, 2)
        self.lower, self.other = self.upper.children.values()

    def done(self) -> "World":
        complete_all(self.cache)
        return self

    def prefetch(self) -> None:
        """A prefetch that continues the first prompt and has staged its pages."""
        sequence = Sequence(tokens_of(29))
        match = self.cache.match(sequence, 29)
        assert self.prefetcher.prefetch_from_storage(7, sequence, match, 29, 0) is not None

    def check(self) -> None:
        invariants.check(self.cache, self.prefetcher, self.sequences)

    def check_drained(self) -> None:
        invariants.check_drained(self.cache, self.prefetcher)


def no_parents_child(world: World) -> None:
    world.upper.children[b"another"] = world.upper.children.pop(world.lower.edge[:16])


def another_edge(world: World) -> None:
    world.lower.edge += world.lower.edge


def another_start(world: World) -> None:
    world.lower.start += 1
    world.lower.end += 1


def held_nowhere(world: World) -> None:
    for held in world.lower.held:
        held[FULL] = None
    world.upper.num_children[0] -= 1


def another_number_of_digests(world: World) -> None:
    world.lower.digests = [b""]


def a_window_without_full(world: World) -> None:
    world.lower.held[DEVICE][FULL] = None
    world.upper.num_children[0] -= 1


def a_state_without_full(world: World) -> None:
    world.lower.held[HOST][FULL] = world.lower.held[HOST][SWA] = None


def a_parent_that_is_elsewhere(world: World) -> None:
    world.upper.held[HOST][:] = [None, None, None]


def another_number_of_ids(world: World) -> None:
    page_ids = world.lower.held[HOST][SWA]
    assert page_ids is not None
    world.lower.held[HOST][SWA] = page_ids[:1]


def two_states(world: World) -> None:
    world.lower.held[DEVICE][MAMBA] = np.array([1, 2], np.int32)


def a_window_locked_without_full(world: World) -> None:
    world.lower.locks[DEVICE][SWA] += 1


def a_state_locked_without_full(world: World) -> None:
    world.lower.locks[DEVICE][MAMBA] += 1


def full_locked_without_a_window(world: World) -> None:
    world.upper.path_locks += 1


def a_state_locked_without_its_window(world: World) -> None:
    world.lower.locks[HOST][MAMBA] += 1


def a_child_locked_without_its_parent(world: World) -> None:
    world.lower.path_locks += 1
    world.lower.locks[DEVICE][:] = [0, 1, 1]


def children_miscounted(world: World) -> None:
    world.upper.num_children[0] += 1


def children_of_a_root_miscounted(world: World) -> None:
    world.cache.tree.root("").num_children[0] += 1


def nodes_miscounted(world: World) -> None:
    world.cache.tree.num_nodes += 1


def resident_pages_miscounted(world: World) -> None:
    world.cache.tree.residency.resident[HOST][SWA] += 1


def protected_pages_miscounted(world: World) -> None:
    world.cache.tree.residency.protected[DEVICE][MAMBA] += 1


def a_leaf_too_few(world: World) -> None:
    world.cache.tree.residency.queues[DEVICE][FULL].pop(world.lower, None)


def a_leaf_too_many(world: World) -> None:
    world.cache.tree.residency.queues[HOST][FULL].add(world.lower)


def a_window_not_queued(world: World) -> None:
    world.cache.tree.residency.queues[DEVICE][SWA].pop(world.lower, None)


def a_state_queued_that_the_device_has(world: World) -> None:
    world.cache.tree.residency.queues[HOST][MAMBA].add(world.lower)


def two_owners(world: World) -> None:
    world.lower.held[HOST][FULL] = world.other.held[HOST][FULL]


def a_page_that_nobody_owns(world: World) -> None:
    world.cache.pools[HOST][SWA].allocate(1)


def a_page_of_a_request_that_is_not_out(world: World) -> None:
    sequence = Sequence(tokens_of(8))
    sequence.pages, sequence.num_pages, sequence.starts = [[31], [], []], 1, [0, 1, 0]
    world.sequences.append(sequence)


def a_page_of_a_request_in_place_of_one_that_is_out(world: World) -> None:
    a_page_of_a_request_that_is_not_out(world)
    world.cache.pools[DEVICE][FULL].allocate(1)


BROKEN: dict[Callable[[World], None], str] = {
    no_parents_child: "law 2: .* is not its parent's child",
    another_edge: "law 2: .* has an edge that is not as long as its pages",
    another_start: "law 2: .* does not begin where its parent ends",
    held_nowhere: "law 2: .* is on neither the device nor the host",
    another_number_of_digests: "law 2: .* has another number of digests than pages",
    a_window_without_full: "law 1: .* holds sidecars without full on the device",
    a_state_without_full: "law 1: .* holds sidecars without full on the host",
    a_parent_that_is_elsewhere: "law 3: .* is on the host and its parent .* is not",
    another_number_of_ids: "law 5: .* holds 1 page ids instead of 2",
    two_states: "law 5: .* holds 2 page ids instead of 1",
    a_window_locked_without_full: "law 4: .* has window locks that do not match its full locks",
    a_state_locked_without_full: "law 4: .* has state locks that do not match its full locks",
    full_locked_without_a_window: "law 4: .* has window locks that do not match its full locks",
    a_state_locked_without_its_window: "law 4: .* has a locked state but an unlocked window",
    a_child_locked_without_its_parent: "law 4: .* has fewer locks than locked children",
    children_miscounted: "law 6: .* counts 3 children on the device",
    children_of_a_root_miscounted: "law 6: .* counts 2 children on the device",
    nodes_miscounted: "law 6: the tree counts 4 nodes but has 3",
    resident_pages_miscounted: "law 5: host swa: resident and protected pages are .*, counted as",
    protected_pages_miscounted: "law 5: device mamba: resident and protected pages are .*, counted",
    a_leaf_too_few: "law 6: the full queue of the device differs",
    a_leaf_too_many: "law 6: the full queue of the host differs",
    a_window_not_queued: "law 6: the swa queue of the device differs",
    a_state_queued_that_the_device_has: "law 6: the mamba queue of the host differs",
    two_owners: "law 5: page .* of host full has two owners",
    a_page_that_nobody_owns: "law 5: 5 pages of host swa are allocated and 4 owned",
    a_page_of_a_request_that_is_not_out: "law 5: 6 pages of device full are allocated and 7 owned",
    a_page_of_a_request_in_place_of_one_that_is_out: r"law 5: 7 .* they differ in \[\d+, 31\]",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda break_it: break_it.__name__)
def test_a_law_that_is_broken_is_named(break_it: Callable[[World], None]) -> None:
    world = World().done()
    world.check()
    break_it(world)
    with pytest.raises(BrokenLawError, match=BROKEN[break_it]):
        world.check()


def test_what_only_the_host_holds_is_a_leaf_of_the_host_or_the_law_is_broken() -> None:
    world = World().done()
    for kind in (FULL, SWA, MAMBA):
        evict_all(world.cache, DEVICE, kind)
    residency = world.cache.tree.residency
    assert set(residency.queues[HOST][FULL]) == {world.lower, world.other}
    assert set(residency.queues[HOST][SWA]) >= {world.lower, world.other}
    world.check()
    residency.queues[HOST][FULL].pop(world.other, None)
    with pytest.raises(BrokenLawError, match="law 6: the full queue of the host"):
        world.check()
    residency.queues[HOST][FULL].add(world.other)
    residency.queues[HOST][SWA].pop(world.lower, None)
    with pytest.raises(BrokenLawError, match="law 6: the swa queue of the host"):
        world.check()


def test_under_write_back_the_host_may_hold_what_its_parent_does_not() -> None:
    world = World("write_back")
    run_request(world.cache, tokens_of(16), 16)
    world.cache.device.evict(FULL, 4)  # the leaves are saved, what they share is not
    assert world.lower.held[HOST][FULL] is not None
    assert world.upper.held[HOST][FULL] is None
    world.check()


# -- what is under way --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["locks", "host_locks"])
def test_a_copy_of_pages_that_are_not_locked_is_found(name: str) -> None:
    world = World()
    for transfer in world.cache.in_flight:
        for lock in getattr(transfer, name):
            world.cache.tree.release(lock)
        getattr(transfer, name).clear()
    with pytest.raises(BrokenLawError, match=r"law 7: .* pages .* of a copy are not locked"):
        world.check()


def test_a_write_of_a_page_that_is_not_locked_is_found_unless_it_was_given_away() -> None:
    world = World()
    for back_up in list(world.cache.in_flight):
        world.cache.complete(back_up)
    for write in world.cache.in_flight:
        for lock in write.host_locks:
            world.cache.tree.release(lock)
        write.host_locks.clear()
    with pytest.raises(BrokenLawError, match=r"law 7: host full pages \[.*\] of a copy are not"):
        world.check()
    for write in world.cache.in_flight:
        write.is_given_away = True  # type: ignore[union-attr]
    world.check()


def test_a_prefetch_whose_anchor_is_gone_is_found() -> None:
    world = World().done()
    world.prefetch()
    (prefetch,) = world.prefetcher.active.values()
    world.cache.tree.release(prefetch.anchor_lock)
    gone = Node(prefetch.anchor.parent, b"", 0, 0)
    gone.held[HOST][FULL] = prefetch.anchor.held[HOST][FULL]
    prefetch.anchor = gone
    with pytest.raises(BrokenLawError, match=r"law 7: anchor .* is gone"):
        world.check()


def test_a_prefetch_whose_anchor_has_left_the_host_is_found() -> None:
    world = World().done()
    world.prefetch()
    world.check()
    (prefetch,) = world.prefetcher.active.values()
    lock = prefetch.anchor_lock
    tree = world.cache.tree
    tree.release(lock)
    for kind in reversed(tree.kinds.numbers):
        if prefetch.anchor.held[HOST][kind] is not None:
            free(tree.evict(prefetch.anchor, HOST, kind, NO_DEMAND), world.cache.pools)
    with pytest.raises(BrokenLawError, match=r"law 7: anchor .* is not on the host"):
        world.check()


# -- when all has ended ---------------------------------------------------------------------------


def test_nothing_is_wrong_when_all_has_ended() -> None:
    World().done().check_drained()


def test_pages_that_are_still_locked_are_counted() -> None:
    world = World().done()
    world.cache.tree.lock(world.lower)
    with pytest.raises(BrokenLawError, match="law 5: 4 full pages are still locked on the device"):
        world.check_drained()


def test_pages_that_are_still_locked_on_the_host_are_counted() -> None:
    world = World().done()
    world.cache.tree.lock_host(world.lower, {SWA: world.lower.start})
    with pytest.raises(BrokenLawError, match="law 5: 2 swa pages are still locked on the host"):
        world.check_drained()


def test_a_lock_on_what_is_not_held_is_found() -> None:
    world = World(host=(0, 0, 0))
    world.check_drained()
    world.cache.tree.lock_host(world.lower, {FULL: world.lower.start})
    with pytest.raises(BrokenLawError, match=r"law 4: .* is still locked after the run"):
        world.check_drained()


def test_what_is_still_under_way_is_counted() -> None:
    world = World().done()
    world.cache.in_flight.add(StorageWrite(keys=[], parts=[], num_bytes=0, host_locks=[]))
    with pytest.raises(BrokenLawError, match="law 7: 1 transfers are still under way"):
        world.check_drained()


def test_bytes_that_still_wait_to_be_written_are_counted() -> None:
    world = World().done()
    assert world.cache._writer is not None
    world.cache._writer.queued_bytes = 3
    with pytest.raises(BrokenLawError, match="law 7: 3 bytes wait to be written"):
        world.check_drained()


def test_a_prefetch_that_is_still_there_is_found() -> None:
    world = World().done()
    world.prefetch()
    (prefetch,) = world.prefetcher.active.values()
    prefetch.phase = Phase.ended
    world.cache.tree.release(prefetch.anchor_lock)
    with pytest.raises(BrokenLawError, match="law 5: 1 prefetches are still active"):
        world.check_drained()
    world.prefetcher.active.clear()
    world.prefetcher.lingering.add(prefetch)
    with pytest.raises(BrokenLawError, match="law 5: 1 prefetches are unread"):
        world.check_drained()
    world.prefetcher.lingering.clear()
    for kind in (FULL, SWA, MAMBA):
        world.cache.pools[HOST][kind].free(prefetch.staged[kind])
    with pytest.raises(BrokenLawError, match="law 5: 12 tokens are still occupied by prefetches"):
        world.check_drained()
    world.prefetcher.occupied_tokens = 0
    told = re.escape("law 9: 3 pages were staged and 0 accounted for")
    with pytest.raises(BrokenLawError, match=told):
        world.check_drained()
    world.cache.counters["prefetch/discarded_aborted_pages"] = 1
    world.cache.fates.count(2, "late")
    world.check_drained()


def test_a_page_from_storage_without_a_fate_is_found() -> None:
    world = World().done()
    world.cache.counters["prefetch/read_pages"] = 3
    world.cache.fates.count(1, "duplicate")
    told = re.escape("law 9: 4 pages were read, 1 have a fate and 0 may be used")
    with pytest.raises(BrokenLawError, match=told):
        world.check()


def test_a_page_from_storage_that_has_left_without_a_fate_is_found() -> None:
    world = World().done()
    world.cache.fates.publish({7})
    told = re.escape(
        "law 9: pages {7} were read from storage but are neither counted nor on the host"
    )
    with pytest.raises(BrokenLawError, match=told):
        world.check()
