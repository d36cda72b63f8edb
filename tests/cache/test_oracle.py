"""The checks that the walks rely on can fail: each is shown a cache that is wrong on purpose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import FULL, KIND_NAMES, MAMBA, SWA
from hicache.cache.tiers.transfer import LoadBack, StorageWrite
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.residency import Residency
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig
from hicache.observe import invariants
from hicache.observe.invariants import BrokenLawError
from tests.cache.ghost import GhostMemory, Payload, WrongPageError
from tests.cache.oracle import Answer, longest_match, nothing_held
from tests.cache.small import named_kinds
from tests.cache.walk import Setting, Walk, WrongMatchError, random_setting


def hybrid_setting(seed: int, **changes: Any) -> Setting:
    """All kinds, write-through, room for storage writes; `changes`: of its cache."""
    setting = random_setting(seed)
    hybrid = {
        "page_size": 4,
        "window_len": 9,
        "has_states": True,
        "write_policy": "write_through",
        "device": (20, 14, 8),
        "host": (24, 16, 6),
        "storage_queue_bytes": 10_000,
    }
    return replace(setting, cache=setting.cache | hybrid | changes)


def breaks(mutate: Callable[[Walk], None], num_seeds: int = 12) -> set[str]:
    """The kinds of errors that some walks raise after a mutation."""
    errors = set()
    for seed in range(num_seeds):
        walk = Walk(hybrid_setting(seed))
        mutate(walk)
        try:
            walk.run(80)
        except (AssertionError, ValueError, KeyError) as error:
            errors.add(type(error).__name__)
    return errors


def test_an_untouched_walk_raises_nothing() -> None:
    assert breaks(lambda walk: None) == set()


def test_a_cache_that_locks_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("lock_path", "release_path", "count_host_locks"):
        monkeypatch.setattr(Residency, verb, lambda self, node, *args: 0)
    assert breaks(lambda walk: None)


def test_a_cache_that_frees_nothing_at_an_abort_is_found_out() -> None:
    def keep(walk: Walk) -> None:
        walk.cache.abandon = lambda sequence: None  # type: ignore[method-assign]

    assert "BrokenLawError" in breaks(keep)


def test_a_tree_that_forgets_its_window_is_found_out() -> None:
    def forget(walk: Walk) -> None:
        wanted = walk.tree.match

        def match(*args: object, refreshes: bool) -> object:
            walk.tree._windows, kept = (), walk.tree._windows
            result = wanted(*args, refreshes=refreshes)  # type: ignore[arg-type]
            walk.tree._windows = kept
            return result

        walk.tree.match = match  # type: ignore[assignment, method-assign]

    assert "WrongMatchError" in breaks(forget)


def test_a_tree_that_changes_when_asked_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(walk: Walk) -> None:
        monkeypatch.setattr("tests.cache.walk.look", RadixTree.match)

    assert breaks(touch) == {"WrongMatchError"}


def test_a_load_back_that_swaps_two_pages_is_found_out() -> None:
    def swap(walk: Walk) -> None:
        book = walk.memory.book

        def crossed(work: object) -> None:
            if isinstance(work, LoadBack):
                move = work.moves[0]
                if len(move.targets) > 1:
                    move = move._replace(targets=move.targets[1:] + move.targets[:1])
                    work.moves[0] = move
            book(work)  # type: ignore[arg-type]

        walk.memory.book = crossed  # type: ignore[assignment, method-assign]

    assert "WrongPageError" in breaks(swap, num_seeds=20)


def test_a_write_to_storage_under_another_pages_key_is_found_out() -> None:
    def swap(walk: Walk) -> None:
        book = walk.memory.book

        def crossed(work: object) -> None:
            if isinstance(work, StorageWrite):
                work.keys = work.keys[::-1]
            book(work)  # type: ignore[arg-type]

        walk.memory.book = crossed  # type: ignore[assignment, method-assign]

    assert "WrongPageError" in breaks(swap, num_seeds=20)


def test_a_page_that_may_be_evicted_while_it_is_written_to_storage_is_found_out() -> None:
    def unlock(walk: Walk) -> None:
        complete = walk.cache.complete

        def hasty(work: object) -> None:
            complete(work)  # type: ignore[arg-type]
            for write in walk.cache.in_flight:
                for lock in write.host_locks:
                    walk.tree.release(lock)
                write.host_locks.clear()

        walk.cache.complete = hasty  # type: ignore[assignment, method-assign]

    assert "BrokenLawError" in breaks(unlock)


def test_a_window_that_is_left_too_early_is_found_out() -> None:
    def hurry(walk: Walk) -> None:
        leave = walk.cache.leave_window
        size = walk.tree.page_size

        def early(sequence: Sequence, length: int) -> None:
            leave(sequence, length + 3 * size)

        walk.cache.leave_window = early  # type: ignore[method-assign]

    assert breaks(hurry) & {"WrongPageError", "BrokenLawError", "WrongMatchError"}


def test_a_prefetch_that_publishes_one_page_too_many_is_found_out() -> None:
    def hasten(walk: Walk) -> None:
        settle = walk.prefetcher._publish

        def publish(prefetch: object) -> None:
            if prefetch.completed_pages < prefetch.num_pages:  # type: ignore[attr-defined]
                prefetch.completed_pages += 1  # type: ignore[attr-defined]
            settle(prefetch)  # type: ignore[arg-type]

        walk.prefetcher._publish = publish  # type: ignore[assignment, method-assign]

    def full_only(walk: Walk) -> None:
        seed = walk.setting.seed
        walk.__init__(hybrid_setting(seed, window_len=0, has_states=False))  # type: ignore[misc]
        hasten(walk)

    assert breaks(full_only, num_seeds=40)


# -- the ghost memory ---------------------------------------------------------------------------


def tree_of(**sizes: int) -> RadixTree:
    return Walk(hybrid_setting(0, **sizes)).tree


def computed_sequence(memory: GhostMemory) -> Sequence:
    sequence = Sequence(np.arange(12, dtype="<i4").tobytes(), "n")
    sequence.num_pages = 3
    sequence.pages, sequence.starts = [[5, 6, 7], [1, 2, 3], []], [0, 0, 0]
    sequence.working_slot = [0]
    memory.compute(sequence, 0, 12)
    return sequence


def test_a_computed_sequence_is_readable() -> None:
    memory = GhostMemory(tree_of())
    memory.check_readable(computed_sequence(memory), 12)


@pytest.mark.parametrize("kind", [FULL, SWA])
def test_two_swapped_pages_are_not_readable(kind: int) -> None:
    memory = GhostMemory(tree_of())
    sequence = computed_sequence(memory)
    pages = sequence.pages[kind]
    pages[1], pages[2] = pages[2], pages[1]
    with pytest.raises(WrongPageError, match=KIND_NAMES[kind]):
        memory.check_readable(sequence, 12)


def test_a_state_of_another_length_is_not_readable() -> None:
    memory = GhostMemory(tree_of())
    sequence = computed_sequence(memory)
    assert sequence.working_slot is not None
    memory.capture(sequence, 8, sequence.working_slot)
    with pytest.raises(WrongPageError, match="mamba"):
        memory.check_readable(sequence, 12)


def test_a_page_of_the_tree_may_not_be_written() -> None:
    memory = GhostMemory(tree_of())
    sequence = computed_sequence(memory)
    sequence.tree_pages = 4
    with pytest.raises(WrongPageError, match="the tree's and is written"):
        memory.compute(sequence, 12, 13)


def test_a_copy_whose_target_was_written_meanwhile_is_found_out() -> None:
    walk = walked()
    work = walk.copies[0]
    move = work.moves[0]  # type: ignore[attr-defined]
    walk.memory.pages[HOST][move.kind][int(move.targets[0])] = Payload("other", b"")
    with pytest.raises(WrongPageError, match="during a copy"):
        walk.memory.settle(work)  # type: ignore[arg-type]


# -- the laws -----------------------------------------------------------------------------------


def walked() -> Walk:
    prefetch = PrefetchConfig(stop="best_effort", threshold=4)
    walk = Walk(replace(hybrid_setting(2), prefetch=prefetch))
    for _ in range(6):
        walk.submit()
        walk.serve()
        walk.check()
    while walk.running:
        walk.drop()
    assert walk.copies
    assert walk.tree.num_nodes >= 3
    assert walk.tree.residency.resident[DEVICE][MAMBA]
    return walk


def some_node(walk: Walk, kind: int):
    return next(node for node in walk.tree.nodes() if node.held[DEVICE][kind] is not None)


def lose_full(walk: Walk) -> None:
    node = some_node(walk, SWA)
    node.held[DEVICE][FULL] = node.held[HOST][FULL] = None


def count_wrong(walk: Walk) -> None:
    walk.tree.residency.resident[DEVICE][FULL] += 1


def lock_once_more(walk: Walk) -> None:
    some_node(walk, FULL).locks[DEVICE][SWA] += 9


def take_a_page(walk: Walk) -> None:
    walk.press()
    assert walk.cache.pools[DEVICE][FULL].allocate(1) is not None


def forget_a_leaf(walk: Walk) -> None:
    while walk.copies:
        walk.finish_copy()
    queue = walk.tree.residency.queues[DEVICE][FULL]
    queue.pop(next(iter(set(queue))))


def share_a_page(walk: Walk) -> None:
    first, second = [node for node in walk.tree.nodes() if node.held[DEVICE][FULL] is not None][:2]
    first.held[DEVICE][FULL][0] = second.held[DEVICE][FULL][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("mutate", "law"),
    [
        (lose_full, 2),
        (count_wrong, 5),
        (lock_once_more, 4),
        (take_a_page, 5),
        (forget_a_leaf, 6),
        (share_a_page, 5),
    ],
)
def test_a_broken_law_is_named(mutate: Callable[[Walk], None], law: int) -> None:
    walk = walked()
    mutate(walk)
    with pytest.raises(BrokenLawError, match=f"law {law}:"):
        invariants.check(walk.cache, walk.prefetcher, [])


def test_a_lock_that_stays_is_found_when_all_has_ended() -> None:
    walk = walked()
    walk.drain()
    walk.tree.lock(some_node(walk, FULL))
    with pytest.raises(BrokenLawError, match="locked"):
        invariants.check_drained(walk.cache, walk.prefetcher)


# -- the naive cache ----------------------------------------------------------------------------


def answer(held_swa: set[int], window_len: int) -> Answer:
    """Three nodes of 8 tokens, pages of 4, window pages held at the ends in `held_swa`."""
    tokens = np.arange(24, dtype="<i4").tobytes()
    kinds = named_kinds(4, window_len=window_len)
    held = nothing_held(kinds)
    for page in range(1, 7):
        payload = Payload("", tokens[: page * 16])
        held[DEVICE][FULL][payload] = page
        if page in held_swa:
            held[DEVICE][SWA][payload] = page
    return longest_match(held, kinds, tokens, 24, "")


def test_the_oracle_says_what_the_worked_window_cases_say() -> None:
    assert answer({1, 2}, 8).usable_len == 8
    assert answer({5, 6}, 8).usable_len == 24
    assert answer({5, 6}, 12).usable_len == 0
    assert answer({1, 2, 5, 6}, 12).usable_len == 8


def test_the_oracle_tells_namespaces_apart() -> None:
    tokens = np.arange(4, dtype="<i4").tobytes()
    kinds = named_kinds(4)
    held = nothing_held(kinds)
    held[DEVICE][FULL][Payload("a", tokens)] = 0
    assert longest_match(held, kinds, tokens, 4, "a").usable_len == 4
    assert longest_match(held, kinds, tokens, 4, "b").usable_len == 0


def test_a_wrong_match_is_found_out() -> None:
    walk = walked()
    walk.waiting.clear()
    some_node(walk, MAMBA).held[DEVICE][FULL] = None
    for node in walk.tree.nodes():
        node.held[HOST][FULL] = None
    with pytest.raises(WrongMatchError):  # noqa: PT012 - whichever prompt meets the node
        for _ in range(200):
            walk.probe()
