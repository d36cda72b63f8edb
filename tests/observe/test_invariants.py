"""Each invariant of the cache can be broken, and the error then names its law."""

import re
from operator import setitem
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import free
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig, StageAt
from hicache.observe import invariants
from hicache.observe.invariants import BrokenLawError
from tests.cache.small import make_cache, prefetcher_of, run_request, tokens_of


class World:
    """A cache with two prompts that part after two pages, on both tiers, and a prefetcher."""

    def __init__(self, host: tuple[int, int, int] = (32, 32, 8), **how: Any) -> None:
        shape = {"device": (32, 32, 8), "window_len": 8, "has_states": True, **how}
        self.cache = make_cache(host=host, storage_queue_bytes=1000, **shape)
        config = PrefetchConfig(threshold=4, stage_at=StageAt.enqueue)
        self.prefetcher = prefetcher_of(self.cache, config, 1000)
        self.tree, self.counters = self.cache.tree, self.cache.counters
        self.residency = self.tree.residency
        self.sequences: list[Sequence] = []
        self.cache.serve(16, state_ends=(2,))
        run_request(self.cache, tokens_of(8) + tokens_of(8, first=90), 16)
        self.upper = self.cache.node_at(2)
        self.lower, self.other = self.upper.children.values()
        self.device, self.host = self.lower.held

    def done(self) -> "World":
        self.cache.complete_all()
        return self

    def prefetch(self) -> Prefetch:
        """A prefetch that continues the first prompt and has staged its pages."""
        sequence = Sequence(tokens_of(29))
        match = self.cache.match(sequence, 29)
        prefetch = self.prefetcher.prefetch_from_storage(7, sequence, match, 29, 0)
        assert prefetch is not None
        return prefetch

    def check(self) -> None:
        invariants.check(self.cache, self.prefetcher, self.sequences)

    def check_drained(self) -> None:
        invariants.check_drained(self.cache, self.prefetcher)


def change(counts: Any, place: Any = 0) -> None:
    counts[place] += 1


def hold_nothing(world: World) -> None:
    for held in world.lower.held:
        held[FULL] = None
    world.upper.num_children[0] -= 1


def hold_no_full(world: World) -> None:
    world.lower.held[DEVICE][FULL] = None
    world.upper.num_children[0] -= 1


def own_a_page(world: World) -> None:
    """A request owns a page that is not allocated."""
    sequence = Sequence(tokens_of(8))
    sequence.pages, sequence.num_pages, sequence.starts = [[31], [], []], 1, [0, 1, 0]
    world.sequences.append(sequence)


def own_another_page(world: World) -> None:
    own_a_page(world)
    world.cache.pools[DEVICE][FULL].allocate(1)


def lock_without_the_parent(world: World) -> None:
    world.lower.path_locks = 1
    world.lower.locks[DEVICE][1:] = [1, 1]


def start_too_late(world: World) -> None:
    world.lower.start, world.lower.end = 3, 5


BROKEN = [
    ("1: .* without full on the device", hold_no_full),
    ("1: .* without full on the host", lambda w: setitem(w.host, slice(2), [None, None])),
    ("2: .* not its parent's child", lambda w: setattr(w.upper, "children", {b"k": w.lower})),
    ("2: .* edge that is not as long", lambda w: setattr(w.lower, "edge", w.lower.edge * 2)),
    ("2: .* not begin where its parent ends", start_too_late),
    ("2: .* neither the device nor the host", hold_nothing),
    ("2: .* another number of digests", lambda w: setattr(w.lower, "digests", [b""])),
    ("3: .* its parent .* is not", lambda w: setitem(w.upper.held[HOST], slice(3), [None] * 3)),
    ("4: .* window locks that do not match", lambda w: change(w.lower.locks[DEVICE], SWA)),
    ("4: .* window locks that do not match", lambda w: setattr(w.upper, "path_locks", 1)),
    ("4: .* state locks that do not match", lambda w: change(w.lower.locks[DEVICE], MAMBA)),
    ("4: .* but an unlocked window", lambda w: change(w.lower.locks[HOST], MAMBA)),
    ("4: .* fewer locks than locked children", lock_without_the_parent),
    ("5: .* 1 page ids instead of 2", lambda w: setitem(w.host, SWA, w.host[SWA][:1])),
    ("5: .* 2 page ids instead of 1", lambda w: setitem(w.device, MAMBA, [1, 2])),
    ("5: host swa: resident", lambda w: change(w.residency.resident[HOST], SWA)),
    ("5: device mamba: resident", lambda w: change(w.residency.protected[DEVICE], MAMBA)),
    (
        "5: .* of host full has two owners",
        lambda w: setitem(w.host, FULL, w.other.held[HOST][FULL]),
    ),
    ("5: 5 .* swa are allocated and 4 owned", lambda w: w.cache.pools[HOST][SWA].allocate(1)),
    ("5: 6 .* full are allocated and 7 owned", own_a_page),
    (r"5: 7 .* they differ in \[\d+, 31\]", own_another_page),
    ("6: .* counts 3 children on the device", lambda w: change(w.upper.num_children)),
    ("6: .* counts 2 children on the device", lambda w: change(w.tree.root("").num_children)),
    ("6: the tree counts 4 nodes but has 3", lambda w: setattr(w.tree, "num_nodes", 4)),
    ("6: the full queue of the device", lambda w: w.residency.queues[DEVICE][FULL].pop(w.lower)),
    ("6: the full queue of the host", lambda w: w.residency.queues[HOST][FULL].add(w.lower)),
    ("6: the swa queue of the device", lambda w: w.residency.queues[DEVICE][SWA].pop(w.lower)),
    ("6: the mamba queue of the host", lambda w: w.residency.queues[HOST][MAMBA].add(w.lower)),
    ("9: 0 pages were read, 1 have a fate", lambda w: change(w.counters, "prefetch/used_pages")),
    (r"9: pages \{7\} .* neither counted nor", lambda w: w.cache.fates.publish({7})),
]
WRITE = StorageWrite(keys=[], parts=[], num_bytes=0, host_locks=[])
NOT_DRAINED = [
    ("5: 4 full pages are still locked on the device", lambda w: w.tree.lock(w.lower)),
    ("5: 2 swa pages are still locked", lambda w: w.tree.lock_host(w.lower, {SWA: w.lower.start})),
    ("7: 1 transfers are still under way", lambda w: w.cache.in_flight.add(WRITE)),
    ("7: 3 bytes wait to be written", lambda w: setattr(w.cache._writer, "queued_bytes", 3)),
    ("6: the tree counts 4 nodes", lambda w: setattr(w.tree, "num_nodes", 4)),
]


@pytest.mark.parametrize(("law", "break_it"), BROKEN)
def test_the_error_names_the_law_of_a_broken_invariant(law, break_it):
    world = World().done()
    world.check()
    break_it(world)
    with pytest.raises(BrokenLawError, match=f"law {law}"):
        world.check()


@pytest.mark.parametrize(("law", "break_it"), NOT_DRAINED)
def test_locks_and_copies_left_at_the_end_of_a_run_are_named(law, break_it):
    world = World().done()
    world.check_drained()
    break_it(world)
    with pytest.raises(BrokenLawError, match=f"law {law}"):
        world.check_drained()


def test_a_lock_on_data_that_is_not_held_is_named_at_the_end_of_a_run():
    world = World(host=(0, 0, 0))
    world.tree.lock_host(world.lower, {FULL: world.lower.start})
    with pytest.raises(BrokenLawError, match=r"law 4: .* is still locked after the run"):
        world.check_drained()


def test_under_write_back_the_host_may_hold_a_node_without_its_parent():
    world = World(write_policy="write_back")
    world.cache.serve(16)
    world.cache.device.evict(FULL, 4)  # the leaves are saved, what they share is not
    assert [node.held[HOST][FULL] is None for node in (world.lower, world.upper)] == [False, True]
    world.check()


# -- copies and prefetches ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["locks", "host_locks"])
def test_the_error_names_a_copy_of_pages_that_are_not_locked(name):
    world = World()
    for transfer in world.cache.in_flight:
        for lock in getattr(transfer, name):
            world.tree.release(lock)
        getattr(transfer, name).clear()
    with pytest.raises(BrokenLawError, match=r"law 7: .* pages .* of a copy are not locked"):
        world.check()


def test_a_write_of_a_page_that_is_not_locked_is_named_unless_the_page_was_given_away():
    world = World()
    for back_up in list(world.cache.in_flight):
        world.cache.complete(back_up)
    for write in world.cache.in_flight:
        for lock in write.host_locks:
            world.tree.release(lock)
        write.host_locks.clear()
    with pytest.raises(BrokenLawError, match=r"law 7: host full pages \[.*\] of a copy are not"):
        world.check()
    for write in world.cache.in_flight:
        write.is_given_away = True  # type: ignore[union-attr]
    world.check()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_prefetch_whose_anchor_has_left_the_tree_or_the_host_is_named(*, is_gone):
    world = World().done()
    prefetch = world.prefetch()
    world.check()
    anchor, tree = prefetch.anchor, world.tree
    tree.release(prefetch.anchor_lock)
    if is_gone:
        prefetch.anchor = Node(anchor.parent, b"", 0, 0)
        prefetch.anchor.held[HOST][FULL] = anchor.held[HOST][FULL]
    for kind in () if is_gone else (MAMBA, SWA, FULL):
        if anchor.held[HOST][kind] is not None:
            free(tree.evict(anchor, HOST, kind, NO_DEMAND), world.cache.pools)
    with pytest.raises(
        BrokenLawError, match=f"law 7: anchor .* is {'gone' if is_gone else 'not on the host'}"
    ):
        world.check()


def test_everything_that_a_prefetch_leaves_behind_is_named():
    world = World().done()
    prefetch, prefetcher = world.prefetch(), world.prefetcher
    prefetch.phase = Phase.ended
    world.tree.release(prefetch.anchor_lock)

    def refuse(message: str) -> None:
        with pytest.raises(BrokenLawError, match=re.escape(message)):
            world.check_drained()

    refuse("law 5: 1 prefetches are still active")
    prefetcher.active.clear()
    prefetcher.lingering.add(prefetch)
    refuse("law 5: 1 prefetches are unread")
    prefetcher.lingering.clear()
    for kind in (FULL, SWA, MAMBA):
        world.cache.pools[HOST][kind].free(prefetch.staged[kind])
    refuse("law 5: 12 tokens are still occupied by prefetches")
    prefetcher.occupied_tokens = 0
    refuse("law 9: 3 pages were staged and 0 accounted for")
    world.counters["prefetch/discarded_aborted_pages"] = 1
    world.cache.fates.count(2, "late")
    world.check_drained()
