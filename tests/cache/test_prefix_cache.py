"""What a cache locks, loads back, copies and evicts, in pages, on small trees.

The random walks compare every match with a naive cache (`oracle.py`) and check that no page is
lost, freed twice or read too early. These tests say how much is done, which the walks do not.
"""

from unittest.mock import Mock

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import free
from hicache.cache.tree.events import NO_DEMAND, Demand, Purpose
from hicache.cache.tree.node import DEVICE, HOST, MatchResult
from hicache.cache.tree.sequence import Sequence
from hicache.observe import invariants
from tests.cache.small import PAGE, SmallCache, are_held, make_cache, tokens_of

ROOMY = (40, 40, 9)


def match(cache: SmallCache, num_tokens: int) -> MatchResult:
    return cache.tree.match(tokens_of(num_tokens), num_tokens)


def test_the_branch_length_is_the_end_of_the_full_pages_if_a_state_is_missing_there():
    cache = make_cache(device=ROOMY, has_states=True)
    cache.serve(16, state_ends=(2,))
    found = [match(cache, num_tokens) for num_tokens in (15, 16)]
    assert [(each.usable_len, each.branch_len) for each in found] == [(8, 12), (16, None)]


# -- locking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    ("shape", "kind", "locks"),
    [
        ({"window_len": 8}, SWA, [0, 1, 1]),
        ({"window_len": 100}, SWA, [1, 1, 1]),
        ({"has_states": True}, MAMBA, [0, 0, 1]),
    ],
)
def test_a_lock_covers_the_last_window_or_state_of_a_prefix(shape, kind, locks, *, is_held):
    cache = make_cache(device=ROOMY, **shape)
    nodes = cache.path_of(4, 5, 6)
    if not is_held:
        free(cache.tree.evict(nodes[1], DEVICE, kind, NO_DEMAND), cache.pools)
    evictable = cache.evictable_size(kind)
    lock = cache.tree.lock(nodes[-1])
    assert [node.locks[DEVICE][kind] for node in nodes] == locks
    assert [node.path_locks for node in nodes] == [1, 1, 1]
    cache.tree.release(lock)
    assert cache.evictable_size(kind) == evictable


def test_a_window_lock_that_ends_within_a_node_still_does_after_the_node_is_split():
    cache = make_cache(device=(8, 8, 0), window_len=16)
    tokens = tokens_of(32)
    cache.serve(32)
    tree, protected = cache.tree, cache.tree.residency.protected[DEVICE]
    leaf = cache.node_at(8)
    assert leaf.start == 4
    tree.ancestor(leaf, tokens, 6)
    lock = tree.lock(leaf, [4] * tree.kinds.size, 6)
    tree.ancestor(leaf, tokens, 7)
    assert (protected[FULL], protected[SWA]) == (8, 2)
    tree.release(lock)
    assert (protected[FULL], protected[SWA]) == (0, 0)


# -- evicting and copying -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "on_host", "on_device"),
    [
        (FULL, [True, True, True], [False, False, False]),
        (SWA, [False, True, True], [True, False, False]),
        (MAMBA, [False, False, True], [True, True, False]),
    ],
)
def test_write_back_copies_exactly_what_an_eviction_drops(kind, on_host, on_device):
    shape = {"device": ROOMY, "host": ROOMY, "window_len": 8, "has_states": True}
    cache = make_cache(**shape, write_policy="write_back")
    nodes = cache.path_of(2) if kind == FULL else cache.path_of(2, 4)
    assert not cache.in_flight
    match(cache, 16)
    assert cache.device.evict(kind, 1)
    assert are_held(nodes[0], HOST) == on_host
    assert are_held(nodes[0], DEVICE) == on_device
    cache.complete_all()
    invariants.check_drained(cache, None)


def test_a_cache_is_in_use_while_a_lock_protects_data():
    cache = make_cache(device=ROOMY)
    cache.serve(16)
    lock = cache.tree.lock(match(cache, 16).best_node)
    assert cache.is_in_use
    cache.tree.release(lock)
    assert not cache.is_in_use


def test_an_allocation_evicts_no_more_than_it_needs():
    cache = make_cache(device=(20, 4, 0), window_len=4)
    cache.path_of(1, 2, 3, 4)
    assert cache.device.allocate(SWA, 1) is not None
    assert cache.resident(DEVICE)[SWA] == 3


def test_write_through_selective_backs_up_at_the_second_hit():
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0), write_policy="write_through_selective")
    for num_copies in (0, 1):
        cache.serve(17)
        assert len(cache.in_flight) == num_copies


def test_a_back_up_covers_every_node_that_holds_a_page_of_the_last_window():
    cache = make_cache(device=(20, 20, 0), window_len=12, write_policy="write_back")
    nodes = cache.path_of(1, 2, 3, 4, 5)
    # a window of three pages, and the page before it, which an equal prompt needs
    assert cache.tree.plan_back_up(nodes[-1]) == [nodes, nodes[1:], []]


def test_window_pages_that_a_prefill_has_passed_are_freed():
    cache = make_cache(device=(20, 20, 0), window_len=8)
    sequence, _ = cache.begin(33)
    assert cache.extend(sequence, 24)
    cache.leave_window(sequence, 24)
    assert cache.pools[DEVICE][SWA].num_taken == 3  # an equal prompt of 24 resumes at 20
    assert cache.extend(sequence, 33)
    cache.finish(sequence, 8)
    assert cache.resident(DEVICE)[SWA] == 5
    assert [match(cache, num_tokens).usable_len for num_tokens in (32, 16)] == [32, 0]


def test_room_for_states_is_counted_in_slots_and_other_room_in_tokens():
    cache = make_cache(device=(20, 20, 7), window_len=PAGE, has_states=True)
    assert [cache.room(kind) for kind in (FULL, SWA, MAMBA)] == [20 * PAGE, 20 * PAGE, 7]
    cache.serve(16)
    assert cache.evictable_size(MAMBA) == 1
    assert cache.room(MAMBA) == 7


# -- loading back -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "cached"), [(9, 0), (10, 10)])
def test_fewer_than_ten_full_tokens_are_not_loaded_back(num_tokens, cached):
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0), page_size=1)
    cache.serve(num_tokens)
    cache.move_to_host()
    _, acquired = cache.begin(num_tokens + 1)
    assert acquired.cached_len == cached
    assert (acquired.load_back is not None) is (cached > 0)


@pytest.mark.parametrize(
    ("shape", "evicted", "num_tokens", "loaded"),
    [
        ({"window_len": 4}, FULL, 17, {FULL: 4, SWA: 1}),
        ({"window_len": 6}, FULL, 17, {FULL: 4, SWA: 2}),
        ({"window_len": 8}, FULL, 17, {FULL: 4, SWA: 2}),
        ({"window_len": 12}, FULL, 17, {FULL: 4, SWA: 3}),
        ({"has_states": True}, MAMBA, 9, {MAMBA: 1}),
    ],
)
def test_a_load_back_copies_what_the_device_lacks_and_no_more_than_the_last_window(
    shape, evicted, num_tokens, loaded
):
    cache = make_cache(device=(20, 20, 8), host=(20, 20, 8), **shape)
    cache.path_of(2, 4)
    cache.move_to_host(evicted)
    sequence, acquired = cache.begin(num_tokens)
    assert acquired.load_back is not None
    assert acquired.load_back.counts == loaded
    assert acquired.cached_len == num_tokens - 1
    cache.abandon(sequence)
    cache.complete_all()
    invariants.check_drained(cache, None)


def test_an_eviction_for_a_load_back_names_its_purpose_and_its_request():
    listener = Mock()
    cache = make_cache(device=(4, 0, 0), host=(20, 0, 0), listener=listener)
    cache.serve(4 * PAGE)
    cache.move_to_host()
    cache.serve(2 * PAGE, first=900)
    cache.complete_all()
    listener.evicted.reset_mock()
    sequence, acquired = cache.begin(4 * PAGE + 1)
    assert acquired.load_back is not None
    (evicted,) = listener.evicted.call_args_list
    assert evicted.args[1:] == (DEVICE, FULL, Demand(Purpose.load_back, sequence.request_id))


def test_a_load_back_that_finds_no_pages_changes_nothing():
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0))
    cache.serve(16)
    cache.move_to_host()
    assert cache.device.allocate(FULL, 18) is not None
    _, acquired = cache.begin(17)
    assert (acquired.load_back, acquired.cached_len) == (None, 0)
    assert cache.counters["load_back/failed_count"] == 1


def test_a_match_can_be_cut_to_its_device_hit_or_to_no_hit():
    cache = make_cache(device=(20, 20, 8), host=(20, 20, 8), window_len=4, has_states=True)
    cache.path_of(2, 4)
    cache.complete_all()
    assert cache.device.evict(FULL, 1)  # a page of the leaf, and all its windows and states
    found = match(cache, 16)
    assert (found.device_prefix_len, found.usable_len) == (8, 16)
    assert found.host_hits == (4, 4, 1)
    for left, length in ((found.without_host(), 8), (found.without_hit(), 0)):
        assert (left.device_prefix_len, left.usable_len, left.full_len) == (length,) * 3
        assert left.best_node.end * PAGE == left.device_node.end * PAGE == length
        assert not left.needs_host_load_back


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(
    ("loads_last_page", "prompt_len", "cached_len"),
    [(False, 16, 12), (True, 16, 15), (True, 17, 16)],
)
def test_the_last_page_of_a_prompt_of_whole_pages_is_reused_if_set(
    loads_last_page, prompt_len, cached_len, *, is_on_device
):
    cache = make_cache(
        device=(8, 0, 0), host=(8, 0, 0), load_back_threshold=1, loads_last_page=loads_last_page
    )
    cache.serve(16)
    cache.complete_all()
    if not is_on_device:
        cache.evict_all(DEVICE, FULL)
    sequence, acquired = cache.begin(prompt_len)
    device_len = cached_len // PAGE * PAGE if is_on_device else 0
    parts = acquired.cached_len, acquired.device_len, acquired.host_len
    assert parts == (cached_len, device_len, cached_len - device_len)
    loaded = 0 if acquired.load_back is None else acquired.load_back.counts[FULL]
    assert loaded == -(-acquired.host_len // PAGE)
    assert cache.extend(sequence, prompt_len)
    cache.complete_all()
    cache.finish(sequence, prompt_len // PAGE)
    invariants.check_drained(cache, None)


@pytest.mark.parametrize(("backs_up_answers", "copied"), [(True, 4), (False, 2)])
def test_an_answer_is_copied_to_the_host_when_it_ends_or_with_the_next_prompt(
    backs_up_answers, copied
):
    cache = make_cache(device=(8, 0, 0), host=(8, 0, 0), backs_up_answers=backs_up_answers)
    sequence = Sequence(tokens_of(16))
    assert cache.acquire(sequence, cache.match(sequence, 8)) is not None
    assert cache.extend(sequence, 8)
    cache.publish(sequence, 2)
    assert cache.extend(sequence, 16)
    cache.finish(sequence, 4)
    assert cache.resident(HOST)[FULL] == copied
    later, _ = cache.begin(20)
    assert cache.extend(later, 20)
    cache.publish(later, 5)
    assert cache.resident(HOST)[FULL] == 5


@pytest.mark.parametrize(
    ("on_device", "length", "read", "hits"),
    [
        (32, 64, (48, 64), (32, 16, 16)),
        (32, 64, (32, 48), (32, 16, 16)),
        (32, 40, (32, 64), (32, 0, 8)),  # the rest of what was read is gone
        # what another request has loaded since is a device hit; in SGLang 32, 0, 32
        (48, 64, (32, 64), (48, 0, 16)),
        (64, 64, (32, 64), (64, 0, 0)),
    ],
)
def test_hits_are_split_by_tier_as_in_sglang_but_pages_loaded_meanwhile_are_device_hits(
    on_device, length, read, hits
):
    # the cases of its `split_cached_prefix_by_tier`, in sixteenths
    cache = make_cache(device=(32, 0, 0), host=(32, 0, 0), load_back_threshold=1)
    cache.serve(length)
    cache.move_to_host()
    cache.begin(on_device + 1)
    cache.complete_all()
    sequence = Sequence(tokens_of(length + 1))
    match = cache.match(sequence, length + 1)
    start, end = read
    acquired = cache.acquire(sequence, match, storage_start=start, storage_end=end)
    assert acquired is not None
    assert (acquired.device_len, acquired.host_len, acquired.storage_len) == hits
    assert sum(hits) == length
