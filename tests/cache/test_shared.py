"""Pools that share the bytes of a tier."""

import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.pages import PageAllocator
from hicache.cache.tiers.shared import SharedAllocator, SharedBytes
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.node import HOST
from hicache.runs.schema import config_of
from tests.cache.small import PAGE, make_cache
from tests.policies.test_events import run_of, summary_of

EXCLUSIVE = "cache.device_host=exclusive"
STATE_BYTES = 4  # as many as four pages


def test_pools_share_bytes_and_round_down_to_whole_pages():
    room = SharedBytes(10)
    pages, states = SharedAllocator(room, 1), SharedAllocator(room, STATE_BYTES)
    assert (pages.capacity, states.capacity, states.num_free) == (10, 2, 2)
    taken = states.allocate(1)
    assert (pages.num_free, states.num_free) == (6, 1)
    assert pages.allocate(7) is None
    assert pages.allocate(3) == [0, 1, 2]
    assert (pages.num_free, states.num_free, room.free) == (3, 0, 3)
    states.free(taken)
    assert (pages.num_free, states.num_free) == (7, 1)


class PagesFirst:
    """Evicts full pages before states."""

    def victim(self, tier, kind, need, queue):
        return next((each for each in queue if each.kind == "full"), None)


def on_host(cache) -> list[tuple[int, bool]]:
    """By node, from the root: its end in pages, and whether the host holds a state there."""
    return sorted((node.end, node.held[HOST][MAMBA] is not None) for node in cache.tree.nodes())


@pytest.mark.parametrize(
    ("policy", "is_shared", "left"),
    [
        (None, True, [(2, False), (4, True)]),  # LRU: the state that was inserted first
        (PagesFirst(), True, [(2, True)]),  # the leaf, with its state
        (None, False, [(2, True)]),  # the bytes of states are of no use to pages
    ],
)
def test_states_are_evicted_for_pages_only_if_both_share_bytes(policy, is_shared, left):
    room = SharedBytes(4 + 2 * STATE_BYTES + 1)  # one prompt with two states, and a page
    shared = [SharedAllocator(room, size) for size in (1, 1, STATE_BYTES)]
    split = [PageAllocator(count) for count in (5, 0, 2)]
    cache = make_cache(
        pools=(make_cache(device=(4, 0, 4)).pools[0], shared if is_shared else split),
        page_bytes=(1, 1, STATE_BYTES),
        has_states=True,
        policy=policy,
    )
    cache.tree.is_shared = (False, is_shared)
    cache.serve(4 * PAGE, state_ends=(2,))
    cache.move_to_host()
    assert on_host(cache) == [(2, True), (4, True)]
    cache.host.make_room(FULL, 3, NO_DEMAND)
    assert on_host(cache) == left


@pytest.mark.parametrize(("is_shared", "taken"), [(True, 4 + STATE_BYTES), (False, 4)])
def test_claims_of_all_kinds_are_summed_if_they_share_device_bytes(is_shared, taken) -> None:
    room = SharedBytes(64)
    pools = [SharedAllocator(room, size) for size in (1, 1, STATE_BYTES)]
    split = make_cache(device=(4, 0, 4)).pools
    cache = make_cache(
        pools=(pools if is_shared else split[0], split[1]),
        page_bytes=(1, 1, STATE_BYTES),
        has_states=True,
    )
    claims = {FULL: 4 * PAGE, MAMBA: 1}
    assert cache.taken(FULL, claims) == taken * PAGE


@pytest.mark.parametrize(
    ("model", "policy", "pools", "limit"),
    [
        ("llama3_8b", "lru", "shared", 12),
        ("gemma3_27b", "s3fifo", "shared", 20),
        ("qwen3_next_80b", "marconi", "shared_both", 12),
    ],
)
def test_runs_with_shared_pools_keep_the_invariants_and_change_nothing_with_one_kind(
    model, policy, pools, limit
):
    # shared pools end jumps earlier; marconi counts each lookup of a deferred request as a use
    small = ("engine.jump=false", f"workload.limit={limit}")
    more = ("parallel.tp=8", "storage=memory", f"cache.policy={policy}", *small)
    shared = run_of(model, *more, f"cache.pools={pools}")
    assert shared.measures["evict/host_full_pages"]
    if model == "llama3_8b":  # one kind
        assert summary_of(shared) == summary_of(run_of(model, *more))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cache.pools=shared", "executor=torch"], "cache.pools=shared needs executor.kind=simul"),
        (["cache.pools=shared", "parallel.ranks=2"], "cache.pools=shared needs parallel.ranks=1"),
        ([EXCLUSIVE, "executor=torch"], f"{EXCLUSIVE} needs executor.kind=simulated"),
        ([EXCLUSIVE], "needs cache.write_policy=write_back and storage.kind"),
    ],
)
def test_settings_unsupported_by_pools_are_rejected(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*settings)
