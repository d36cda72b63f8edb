"""Users who abort requests at any time: every rank drops the request, and all memory is freed."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from hicache.cache.kinds import KIND_NAMES
from hicache.cache.tree.node import TIERS
from hicache.cache.tree.sequence import Sequence
from hicache.config import WRITE_POLICIES, PrefetchConfig, StorageConfig
from hicache.engine.loop import Engine
from hicache.observe import invariants
from hicache.request import Request
from tests.scheduler.world import (
    EAGER,
    KINDS,
    STEP_NS,
    TOKEN_NS,
    World,
    bare_world,
    ended,
    fresh,
    ids,
    plot_of,
    random_requests,
    request_of,
)

SLOW = StorageConfig(kind="memory", read_gbps=0.2, write_gbps=0.2, batch_pages=2, delay_s=0.01)
WAITING = PrefetchConfig(threshold=16, occupied_share=1.0, stop="wait_complete")


def state_of(engine: Engine, request_id: int) -> set[str]:
    """What a request is doing at an abort, and which copies are in flight while it runs."""
    scheduler = engine.scheduler
    places = {
        "waiting": scheduler.waiting,
        "prefill": [extend.req for extend in engine.extending],
        "half-way": scheduler.prefill.partials,
        "decode": scheduler.running,
    }
    found = {place for place, reqs in places.items() if request_id in ids(reqs)}
    if found - {"waiting"}:
        found |= {type(each).__name__ for each in engine.cache.in_flight}
    prefetch = engine.prefetcher and engine.prefetcher.active.get(request_id)
    if prefetch and not prefetch.is_settled:
        found.add("being read" if prefetch.is_reading else "being asked about")
    if any(request.id == request_id for _, request in engine._arrived):
        found.add("not looked at")
    return found


def hurried(seed: int) -> list[Request]:
    """20 requests of random conversations that arrive twice as fast as elsewhere."""
    return [replace(each, arrival_ns=each.arrival_ns // 2) for each in random_requests(seed, 20)]


def crowd(seed: int) -> list[Request]:
    """20 requests with prompts of several chunks, and answers that outgrow the pool."""
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


def serve_impatient(world: World, requests: list[Request], seed: int) -> Counter[str]:
    """Serve requests of which 60 % may be aborted; return the states that aborts found."""
    rng = Random(seed)
    patience_ns = {
        request.id: rng.choice([1, rng.randint(1, 30_000_000), rng.randint(1, 250_000_000)])
        for request in requests
        if rng.random() < 0.6
    }
    world.warm([request for request in requests if request.id % 3])
    seen: Counter[str] = Counter()
    abort = world.engine.abort

    def look_and_abort(request_id: int, now_ns: int) -> None:
        seen.update(state_of(world.engine, request_id))
        abort(request_id, now_ns)

    world.engine.abort = look_and_abort
    world.serve(requests, patience_ns=patience_ns)
    all_ended = [*world.finished, *world.rejected, *world.aborted]
    assert sorted(ended(all_ended)) == [request.id for request in requests]
    assert set(ended(world.aborted)) <= set(patience_ns)
    for req, end_ns in world.aborted:
        assert end_ns >= req.submitted_ns + patience_ns[req.request.id]
        assert req.remaining_output
    for req, end_ns in world.finished:  # answered in time, or in the step of the abort
        if req.request.id in patience_ns:
            limit_ns = req.submitted_ns + patience_ns[req.request.id]
            assert end_ns <= limit_ns + STEP_NS + 64 * TOKEN_NS
    assert_drained(world)
    return seen


def assert_drained(world: World) -> None:
    """Check that all memory in use belongs to the tree, and that nothing in it is locked."""
    for rank in world.ranks:
        invariants.check_drained(rank.cache, rank.prefetcher)
        if rank.prefetcher is not None:
            assert not {*rank.prefetcher.active, *rank.prefetcher.lingering}
            assert rank.prefetcher.occupied_tokens == 0
        for tier in TIERS:
            for kind in range(len(KIND_NAMES)):
                resident = rank.cache.tree.residency.resident[tier][kind]
                assert rank.cache.pools[tier][kind].num_taken == resident


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 1) for kind in KINDS), ("all", 2)])
def test_requests_aborted_in_any_state_free_all_memory_and_locks(kind: str, ranks: int) -> None:
    plot = plot_of(
        kind,
        num_ranks=ranks,
        device=(40, 40, 16),
        write_policy=Random(kind).choice(WRITE_POLICIES),
        scheduler=replace(EAGER, chunk_tokens=64),
        storage=replace(SLOW, write="on_back_up"),
        prefetch=WAITING,
    )
    seen: Counter[str] = Counter()
    for seed in range(3):
        for requests in (hurried(seed), crowd(seed)):
            seen += serve_impatient(World(plot), requests, seed)
    states = {"not looked at", "waiting", "being asked about", "being read", "prefill", "decode"}
    copies = {"BackUp", "StorageWrite", *["LoadBack"] * (kind == "full")}
    assert set(seen) >= states | copies | {"half-way"}


def test_retracted_requests_can_be_aborted_while_they_wait_in_the_queue() -> None:
    world = bare_world(device=(24, 0, 0), scheduler=EAGER)
    requests = [fresh(number, 20, 60) for number in range(6)]
    world.serve(requests, patience_ns=dict.fromkeys(range(6), 45 * STEP_NS))
    assert any(req.retractions and not req.kv_len for req, _ in world.aborted)
    assert_drained(world)


PREFILL_NS = STEP_NS + 10 * TOKEN_NS


@pytest.mark.parametrize(
    ("answer", "patience_ns", "aborted_ns", "decoded"),
    [
        (9, PREFILL_NS + 3 * STEP_NS + 1, PREFILL_NS + 4 * STEP_NS, 5),
        (3, PREFILL_NS + STEP_NS + 1, None, 3),  # the step at hand ends the answer
        (3, 600_000_000, None, 3),  # long after the answer
    ],
)
def test_abort_takes_effect_at_the_end_of_a_step_unless_the_answer_is_complete(
    answer: int, patience_ns: int, aborted_ns: int | None, decoded: int
) -> None:
    world = bare_world()
    world.engine.abort(7, 0)  # no such request
    requests = [fresh(0, num_answers=answer), fresh(1, 50, 1, 500_000_000)]
    world.serve(requests, patience_ns={0: patience_ns, 1: 10**12})
    (req,) = (each for each, _ in [*world.finished, *world.aborted] if each.request.id == 0)
    assert req.decoded == decoded
    assert [end_ns for _, end_ns in world.aborted] == [aborted_ns] * (aborted_ns is not None)
    assert world.clock.now() < 600_000_000  # the run does not wait for the end of a patience


def test_waiting_request_is_admitted_when_an_abort_makes_room() -> None:
    world = bare_world(max_running=1)
    world.serve([fresh(0, num_answers=200), fresh(1)], patience_ns={0: 5 * STEP_NS})
    ((req, _),) = world.finished
    ((_, end_ns),) = world.aborted
    assert req.admitted_ns == end_ns


def test_abort_ends_a_wait_for_storage_and_discards_the_prefetch() -> None:
    world = World(plot_of("full", storage=replace(SLOW, delay_s=0.0), prefetch=WAITING))
    request = fresh(0, 104, 1)
    world.warm([request])
    world.serve([request], patience_ns={0: 7_000_000})
    ((req, end_ns),) = world.aborted
    assert end_ns == req.storage_wait_ns == 7_000_000
    assert world.counters["prefetch/aborted_count"] == 1
    assert world.counters["prefetch/discarded_aborted_pages"] == 0  # the reader still has them
    assert world.counters["prefetch/late_pages"] == 2
    assert world.counters["prefetch/discarded_unread_pages"] == 10


@pytest.mark.parametrize(
    ("kind", "patience_ns", "least", "most"),
    [
        *((kind, 2 * STEP_NS + 65 * TOKEN_NS, 128, 128) for kind in sorted(KINDS)),  # two chunks
        ("full", 43 * STEP_NS + 160 * TOKEN_NS, 161, 219),  # and a part of the answer
    ],
)
def test_abort_leaves_published_chunks_and_the_answer_so_far_in_the_cache(
    kind: str, patience_ns: int, least: int, most: int
) -> None:
    world = bare_world(kind, max_running=1)
    request = fresh(0, 160, 90)
    world.serve([request], patience_ns={0: patience_ns})
    assert ended(world.aborted) == [0]
    assert_drained(world)
    cache = world.cache
    assert least <= max(node.end * cache.page_size for node in cache.tree.nodes()) <= most
    tokens = Sequence(request.prompt.to_bytes() + request.output.to_bytes())
    cached = cache.tree.residency.resident[0][0] * cache.page_size
    assert cache.match(tokens, 250).full_len == cached >= least
