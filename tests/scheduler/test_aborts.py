"""Users who give up, at any moment: every rank drops the request, and every count goes back."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from hicache.cache.kinds import KIND_NAMES
from hicache.cache.tiers.transfer import BackUp, LoadBack, StorageWrite
from hicache.cache.tree.node import TIERS
from hicache.cache.tree.sequence import Sequence
from hicache.config import WRITE_POLICIES, PrefetchConfig, SchedulerConfig, StorageConfig
from hicache.engine.loop import Engine
from hicache.engine.warm import warm_storage
from hicache.executor.simulated.stores import StandIns
from hicache.observe import invariants
from hicache.request import Request
from tests.scheduler.world import (
    KINDS,
    STEP_NS,
    TOKEN_NS,
    World,
    plot_of,
    random_requests,
    request_of,
)

POLICIES = WRITE_POLICIES
SLOW = StorageConfig(kind="memory", read_gbps=0.2, write_gbps=0.2, batch_pages=2, delay_s=0.01)


def state_of(engine: Engine, request_id: int) -> set[str]:
    """What a request is doing when somebody gives up on it, and what is under way for others."""
    scheduler, found = engine.scheduler, set[str]()
    if any(request.id == request_id for _, request in engine._arrived):
        found.add("not looked at")
    for req in scheduler.waiting:
        if req.request.id == request_id:
            found.add("waiting")
            prefetch = engine.prefetcher and engine.prefetcher.active.get(request_id)
            if prefetch and not prefetch.is_settled:
                found.add("being read" if prefetch.is_reading else "being asked about")
    if any(extend.req.request.id == request_id for extend in engine.extending):
        found.add("prefill")
    if any(req.request.id == request_id for req in scheduler.running):
        found.add("decode")
    if scheduler.prefill.partial is not None and scheduler.prefill.partial.request.id == request_id:
        found.add("half-way")
    if found & {"prefill", "decode", "half-way"}:
        found |= {type(each).__name__ for each in engine.cache.in_flight}
    return found


def hurried(seed: int) -> list[Request]:
    """Conversations, twice as fast as others."""
    return [replace(each, arrival_ns=each.arrival_ns // 2) for each in random_requests(seed, 20)]


def crowd(seed: int) -> list[Request]:
    """Prompts of several chunks, and answers that outgrow the pool."""
    rng = Random(seed)
    return [
        request_of(
            number,
            [*range(number % 3, 40), *range(number * 1000, number * 1000 + rng.randint(1, 80))],
            [number] * rng.randint(1, 60),
            number * 20_000_000,
        )
        for number in range(20)
    ]


def given_up_on(world: World, requests: list[Request], seed: int) -> Counter[str]:
    """Give up on half of the requests; returns in which states."""
    rng = Random(seed)
    patience_ns = {
        request.id: rng.choice([1, rng.randint(1, 30_000_000), rng.randint(1, 250_000_000)])
        for request in requests
        if rng.random() < 0.6
    }
    for storage in world.storages:
        warm_storage(
            StandIns(storage),
            [request for request in requests if request.id % 3],
            world.cache.tree,
        )
    seen: Counter[str] = Counter()
    abort = world.engine.abort

    def look_and_abort(request_id: int, now_ns: int) -> None:
        seen.update(state_of(world.engine, request_id))
        abort(request_id, now_ns)

    world.engine.abort = look_and_abort  # type: ignore[method-assign]
    world.serve(requests, patience_ns=patience_ns)
    ended = [req.request.id for req, _ in [*world.finished, *world.rejected, *world.aborted]]
    assert sorted(ended) == [request.id for request in requests]
    assert {req.request.id for req, _ in world.aborted} <= set(patience_ns)
    for req, end_ns in world.aborted:
        assert end_ns >= req.submitted_ns + patience_ns[req.request.id]
        assert req.remaining_output
    for req, end_ns in world.finished:  # whoever was answered in time, or in the step at hand
        if req.request.id in patience_ns:
            limit_ns = req.submitted_ns + patience_ns[req.request.id]
            assert end_ns <= limit_ns + STEP_NS + 64 * TOKEN_NS
    assert_baseline(world)
    return seen


def assert_baseline(world: World) -> None:
    """All that is out belongs to the tree, and the tree holds nothing that is locked."""
    for rank in world.ranks:
        invariants.check_drained(rank.cache, rank.prefetcher)
        if rank.prefetcher is not None:
            assert not rank.prefetcher.active
            assert not rank.prefetcher.lingering
            assert rank.prefetcher.occupied_tokens == 0
        for tier in TIERS:
            for kind in range(len(KIND_NAMES)):
                resident = rank.cache.tree.residency.resident[tier][kind]
                assert rank.cache.pools[tier][kind].num_taken == resident


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_abort_at_any_moment_returns_every_count_to_its_baseline(
    kind: str, policy: str, ranks: int
) -> None:
    plot = plot_of(kind, write_policy=policy, num_ranks=ranks, storage=SLOW)
    for seed in range(2):
        assert sum(given_up_on(World(plot), hurried(seed), seed).values()) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_aborts_come_at_every_moment_there_is(ranks: int) -> None:
    limits = SchedulerConfig(
        chunk_tokens=64, max_running=16, new_token_ratio=0.0, new_token_ratio_floor=0.0
    )
    plot = plot_of(
        "full",
        num_ranks=ranks,
        device=(27, 0, 0),
        scheduler=limits,
        storage=replace(SLOW, write="on_back_up"),
        prefetch=PrefetchConfig(threshold=16, occupied_share=1.0, stop="wait_complete"),
    )
    seen: Counter[str] = Counter()
    for seed in range(8):
        for requests in (hurried(seed), crowd(seed)):
            seen += given_up_on(World(plot, checks=False), requests, seed)
    states = {
        "not looked at",
        "waiting",
        "being asked about",
        "being read",
        "prefill",
        "half-way",
        "decode",
    }
    copies = {kind.__name__ for kind in (BackUp, LoadBack, StorageWrite)}
    assert set(seen) == states | copies


def test_a_request_that_was_sent_back_can_be_given_up_on() -> None:
    limits = SchedulerConfig(
        chunk_tokens=256, max_running=16, new_token_ratio=0.0, new_token_ratio_floor=0.0
    )
    plot = plot_of("full", device=(24, 0, 0), scheduler=limits, has_storage=False)
    requests = [
        request_of(number, range(number * 100, number * 100 + 20), [number] * 60)
        for number in range(6)
    ]
    sent_back: list[tuple[int, int]] = []
    calm, world = World(plot), World(plot)

    def look(now_ns: int) -> None:
        for req in calm.scheduler.waiting:
            if req.retractions:
                sent_back.append((req.request.id, now_ns))

    calm.hooks.append(look)
    calm.serve(requests)
    request_id, when_ns = sent_back[0]
    world.serve(requests, patience_ns={request_id: when_ns})
    ((req, _),) = world.aborted
    assert req.retractions == 1
    assert req.admitted_ns is not None
    assert len(world.finished) == 5
    assert_baseline(world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_taken_one_by_one_come_to_the_same_with_aborts(ranks: int) -> None:
    for seed in range(4):
        outcomes = []
        for may_jump in (True, False):
            plot = plot_of("all", num_ranks=ranks, may_jump=may_jump, storage=SLOW)
            world = World(plot, checks=False)
            given_up_on(world, hurried(seed), seed)
            outcomes.append(world.outcome())
        assert outcomes[0] == outcomes[1], f"seed {seed}"


def test_an_aborted_request_leaves_with_what_it_had_said() -> None:
    world = World(plot_of("full", has_storage=False))
    prefill_ns = STEP_NS + 10 * TOKEN_NS
    patience_ns = {0: prefill_ns + 3 * STEP_NS + 1}
    world.serve([request_of(0, range(10), [1] * 9)], patience_ns=patience_ns)
    ((req, end_ns),) = world.aborted
    assert req.decoded == 5
    assert end_ns == prefill_ns + 4 * STEP_NS
    assert world.finished == []


def test_who_is_answered_in_the_step_in_which_they_give_up_is_answered() -> None:
    world = World(plot_of("full", has_storage=False))
    prefill_ns = STEP_NS + 10 * TOKEN_NS
    world.serve([request_of(0, range(10), [1] * 3)], patience_ns={0: prefill_ns + STEP_NS + 1})
    assert [req.request.id for req, _ in world.finished] == [0]
    assert world.aborted == []


def test_nothing_happens_when_the_patience_of_an_answered_request_ends() -> None:
    calm, patient = (World(plot_of("full", has_storage=False)) for _ in range(2))
    requests = [request_of(0, range(10), [1] * 3), request_of(1, range(50), [1], 500_000_000)]
    calm.serve(requests)
    patient.serve(requests, patience_ns={0: 600_000_000, 1: 10**12})
    assert patient.outcome() == calm.outcome()
    assert patient.clock.now() == calm.clock.now()


def test_whoever_waits_is_looked_at_when_an_abort_makes_room() -> None:
    limits = SchedulerConfig(chunk_tokens=64, max_running=1)
    world = World(plot_of("full", has_storage=False, scheduler=limits))
    requests = [request_of(0, range(10), [1] * 200), request_of(1, range(90, 99), [1])]
    world.serve(requests, patience_ns={0: 5 * STEP_NS})
    ((req, _),) = world.finished
    ((_, end_ns),) = world.aborted
    assert req.admitted_ns == end_ns


def test_a_wait_for_storage_ends_with_the_abort() -> None:
    plot = plot_of(
        "full",
        storage=replace(SLOW, delay_s=0.0),
        prefetch=PrefetchConfig(threshold=16, stop="wait_complete"),
    )
    world = World(plot)
    request = request_of(0, range(104), [1])
    warm_storage(StandIns(world.storages[0]), [request], world.cache.tree)
    world.serve([request], patience_ns={0: 7_000_000})
    ((req, end_ns),) = world.aborted
    assert end_ns == req.storage_wait_ns == 7_000_000
    assert world.counters["prefetch/aborted_count"] == 1
    assert world.counters["prefetch/discarded_aborted_pages"] == 0  # the reader has them still
    assert world.counters["prefetch/late_pages"] == 2
    assert world.counters["prefetch/discarded_unread_pages"] == 10


def test_an_abort_of_nobody_changes_nothing() -> None:
    world = World(plot_of("full"))
    world.engine.abort(7, 0)
    world.serve([request_of(0, range(30), [1, 2])])
    assert [req.request.id for req, _ in world.finished] == [0]


def aborted_at(patience_ns: int, kind: str = "full") -> World:
    """A request with a prompt of three chunks and a long answer, aborted after so many ns."""
    limits = SchedulerConfig(chunk_tokens=64, max_running=1)
    world = World(plot_of(kind, has_storage=False, scheduler=limits))
    world.serve([request_of(0, range(160), [7] * 90)], patience_ns={0: patience_ns})
    assert len(world.aborted) == 1
    assert_baseline(world)
    return world


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_abort_in_mid_prompt_leaves_the_chunks_that_were_published(kind: str) -> None:
    cache = aborted_at(2 * STEP_NS + 65 * TOKEN_NS, kind).cache
    ends = {node.end * cache.page_size for node in cache.tree.nodes()}
    assert max(ends) == 128
    assert cache.tree.residency.resident[0][0] * cache.page_size == 128
    assert (
        cache.match(Sequence(request_of(1, range(160), [1]).prompt.to_bytes()), 160).full_len == 128
    )


def test_an_abort_leaves_the_answer_so_far() -> None:
    cache = aborted_at(3 * STEP_NS + 160 * TOKEN_NS + 40 * STEP_NS).cache
    assert 160 < max(node.end * cache.page_size for node in cache.tree.nodes()) < 160 + 60
