"""The prefill half of the scheduler: queue, chunks, deferrals, rejections, waits for storage."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Phase
from hicache.cache.prefix_cache import Acquired
from hicache.cache.tree.node import DEVICE, HOST
from hicache.config import Batching
from hicache.observe.timeline import RecordedWaits, Turn
from hicache.rules import Refresh
from hicache.scheduler.admission import StepBudget
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.decision import Reason
from hicache.scheduler.queue_waits import NO_CHUNK, Cause, Shortage
from tests.scheduler.world import World, bare_world, chunks, ended, fresh, ids, plot_of, request_of

# -- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_tokens", "ends"),
    [
        (64, [64, 128, 150]),
        (60, [56, 112, 150]),  # a cut chunk ends at a page
        (150, [150]),
        (149, [144, 150]),
        (3, [*range(8, 150, 8), 150]),  # a page at least
    ],
)
def test_prompt_is_computed_in_chunks_that_end_at_pages(chunk_tokens: int, ends: list[int]) -> None:
    world = bare_world(chunk_tokens=chunk_tokens)
    world.submit(fresh(0, 150))
    found = []
    while not world.scheduler.running:
        found += chunks(world.step())
    assert found == [(0, *each) for each in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("lengths", "chunk_tokens", "page", "steps"),
    [
        ((24, 30, 40, 8), 64, 8, [[(0, 0, 24), (1, 0, 30), (2, 0, 8)], [(2, 8, 40), (3, 0, 8)]]),
        ((64, 8), 64, 8, [[(0, 0, 64)], [(1, 0, 8)]]),
        ((9, 5), 10, 1, [[(0, 0, 9), (1, 0, 1)], [(1, 1, 5)]]),
    ],
)
def test_step_computes_prompts_in_order_until_its_tokens_are_spent(
    lengths: tuple[int, ...], chunk_tokens: int, page: int, steps: list[list[tuple[int, int, int]]]
) -> None:
    world = bare_world(chunk_tokens=chunk_tokens, page_size=page)
    for number, length in enumerate(lengths):
        world.submit(fresh(number, length))
    found = [chunks(world.step())]
    if world.scheduler.waiting:
        assert world.scheduler.prefill.queue_waits.lacks == NO_CHUNK
    assert [*found, chunks(world.step())] == steps


@pytest.mark.parametrize("batching", Batching)
def test_a_request_that_the_policy_holds_back_lets_others_pass_and_starts_when_none_runs(
    batching: Batching,
) -> None:
    world = bare_world(batching=batching)
    world.scheduler.prefill._starts = lambda request: request.id != 1
    for number in range(3):
        world.submit(fresh(number, 10, 2))
    assert chunks(world.step()) == [(0, 0, 10), (2, 0, 10)]
    assert world.scheduler.prefill.queue_waits.lacks == Shortage(Cause.tokens, 1)
    world = bare_world(batching=batching)
    world.scheduler.prefill._starts = lambda request: request.id != 1
    world.serve([fresh(number, 10, 2) for number in range(3)])
    (first, _), (third, ended_ns), (second, _) = world.finished
    assert ids([first, second, third]) == [0, 1, 2]
    assert (first.admitted_ns, third.admitted_ns) == (0, 0)
    assert second.admitted_ns is not None
    assert second.admitted_ns >= ended_ns


# -- deferrals and rejections --------------------------------------------------------------------


def test_no_more_than_max_running_requests_run_and_a_deferred_one_keeps_its_place() -> None:
    world = bare_world(max_running=2, host=(0, 0, 0))
    for number, sizes in enumerate(((10, 3), (200, 20), (200, 20), (8, 20))):
        world.submit(fresh(number, *sizes))
    most = 0
    while not world.scheduler.is_idle:
        world.step()
        most = max(most, len(world.scheduler.running))
    assert most == 2
    assert ids(world.scheduler.ended.take().finished) == [0, 1, 2, 3]
    counters = world.counters
    assert counters["scheduler/deferred_running_count"] == 1
    assert counters["scheduler/deferred_tokens_count"] == 1
    assert counters["scheduler/deferred_count"] == 2


@pytest.mark.parametrize(
    ("prompt_len", "device_pages", "max_len", "reason"),
    [
        (70, 10, 100, None),
        (71, 10, 100, "needs more tokens than the pools have"),
        (72, 10, 100, "needs 11 pages, and the device pool has 10"),
        (49, 10, 50, None),
        (50, 10, 50, "prompt and answer have 51 tokens, more than model.max_len=50"),
    ],
)
def test_request_that_never_fits_is_rejected_with_the_reason(
    prompt_len: int, device_pages: int, max_len: int, reason: str | None
) -> None:
    world = bare_world(device=(device_pages, 0, 0))
    world.scheduler.prefill._max_len = max_len
    world.serve([fresh(0, prompt_len, 1), fresh(1, 8, 1)])
    assert [why for _, why in world.rejected] == [reason] * (reason is not None)
    assert ended(world.finished)[-1] == 1


def test_rejection_drops_the_prefetch_of_the_request() -> None:
    world = World(plot_of("full"))
    assert world.prefetcher is not None
    world.submit(fresh(0, 304, 8))  # fits, and leaves no token over
    world.prefetcher.active[0].phase = Phase.ended
    assert world.scheduler.plan(0) is None
    assert ended(world.scheduler.ended.take().rejected) == [0]
    assert not world.prefetcher.active


def running_world(*lengths: int) -> World:
    """A world whose running requests have these prompt lengths, and no pages yet."""
    world = bare_world()
    for number, length in enumerate(lengths):
        world.scheduler.running.append(world.submit(fresh(number, length, 90)))
    world.scheduler.waiting.clear()
    return world


@pytest.mark.parametrize(
    ("copies", "lingering", "settled", "others", "is_final"),
    [
        ([], [], [], {}, True),
        ([], [], [True, True], {}, True),
        # a copy or a prefetch in flight may free memory
        (["copy"], [], [True], {}, False),
        ([], [], [True, False], {}, False),
        ([], ["pages"], [], {}, False),
        # another request has pages
        ([], [], [], {"num_running": 1}, False),
        ([], [], [], {"num_ending": 1}, False),
    ],
)
def test_refusal_is_final_unless_memory_may_become_free(
    copies: list[Any], lingering: list[str], settled: list[bool], others: Any, *, is_final: bool
) -> None:
    prefill = bare_world().scheduler.prefill
    prefill.cache.in_flight.update(copies)
    reads = {number: SimpleNamespace(is_settled=each) for number, each in enumerate(settled)}
    prefill.prefetcher = SimpleNamespace(active=reads, lingering=lingering)
    assert prefill.may_get_room == (not is_final and not others)
    budget = StepBudget(chunk_tokens=16, reserved_tokens=0, **others)
    assert prefill._is_final(Batch(), budget) == is_final
    (other,) = running_world(10).scheduler.running
    assert not prefill._is_final(Batch(extends=[Extend(other, 0, 8, [])]), budget)
    prefill.partial = other
    assert not prefill._is_final(Batch(), budget)


@pytest.mark.parametrize("waits_for", ["a running request", "a copy", None])
def test_partial_prompt_without_pages_starts_over_only_if_nothing_may_free_any(
    waits_for: str | None,
) -> None:
    world = running_world(10, 40)
    half = world.scheduler.prefill.partial = world.scheduler.running.pop()
    if waits_for == "a copy":
        world.cache.in_flight.add(object())
    world.cache.extend = lambda *_: False
    num_running = int(waits_for == "a running request")
    budget = StepBudget(chunk_tokens=16, reserved_tokens=0, num_running=num_running)
    world.scheduler.prefill._continue_partial(half, Batch(), budget)
    assert (world.scheduler.prefill.partial is half) == (waits_for is not None)
    assert world.counters["scheduler/prefill_oom_count"] == (waits_for is None)


def test_deferral_is_counted_once_until_its_reason_changes() -> None:
    world = running_world(10)
    (req,) = world.scheduler.running
    for reason in (Reason.tokens, Reason.tokens, Reason.slots, Reason.tokens):
        world.scheduler.prefill._count_deferral(req, reason)
    names = ("deferred", "deferred_tokens", "deferred_slots")
    assert [world.counters[f"scheduler/{name}_count"] for name in names] == [3, 2, 1]


def test_prompt_tokens_are_attributed_to_tiers_at_the_first_admission_alone() -> None:
    world = running_world(100)
    (req,) = world.scheduler.running
    names = ("device_len", "host_len", "storage_len")
    for now_ns, hits in ((77, (30, 20, 10)), (99, (90, 0, 0))):
        req.cached_len = sum(hits)
        lengths: Any = dict(zip(names, hits, strict=True))
        acquired = Acquired(cached_len=req.cached_len, load_back=None, **lengths)
        world.scheduler.prefill._account(req, acquired, now_ns)
    parts = (req.device_len, req.host_len, req.storage_len, req.computed_len, req.recomputed_len)
    assert (req.admitted_ns, parts) == (77, (30, 20, 10, 40, 10))
    names = ("device_hit", "host_hit", "storage_hit", "computed", "recomputed")
    assert [world.counters[f"cache/{name}_tokens"] for name in names] == list(parts)


def test_queue_time_is_attributed_to_the_shortage_found_by_the_last_plan() -> None:
    turns: list[Turn] = []
    waits = RecordedWaits(turns)
    lacks = Shortage(Cause.tokens, first=3)
    for now_ns, shortage in ((10, NO_CHUNK), (25, lacks), (30, lacks)):
        waits.turn(now_ns, shortage)
    by_cause = {cause: ns for cause, ns in waits.mark(60).items() if ns}
    assert by_cause == {Cause.step: 10, Cause.chunk: 15, Cause.tokens: 35}
    assert turns == [Turn(10, NO_CHUNK), Turn(25, lacks)]


# -- requests that wait for storage --------------------------------------------------------------


def scanned(blocked: set[int], **knobs: int) -> tuple[list[int], World]:
    """The requests (of four) that start in step 1 if `blocked` ones wait for storage; the world."""
    world = World(plot_of("full", **knobs))
    prefetcher: Any = world.prefetcher
    prefetcher.check = lambda request_id, now_ns: request_id not in blocked
    prefetcher.is_blocking = lambda request_id, now_ns: request_id in blocked
    for number in range(4):
        world.submit(fresh(number, 10, 1))
    batch = world.scheduler.plan(0)
    assert prefetcher.rates.num_waiting == 4
    return [number for number, *_ in chunks(batch)] if batch else [], world


@pytest.mark.parametrize(
    ("blocked", "scan_limit", "started"),
    [
        (set(), 1, [0, 1, 2, 3]),
        ({0}, 2, [1, 2, 3]),
        ({0}, 1, []),
        ({1}, 1, [0]),
        ({0, 2}, 3, [1, 3]),
        ({0, 2}, 2, [1]),
    ],
)
def test_scan_of_the_queue_passes_over_fewer_blocked_requests_than_its_limit(
    blocked: set[int], scan_limit: int, started: list[int]
) -> None:
    assert scanned(blocked, scan_limit=scan_limit)[0] == started


def test_backlog_counts_only_requests_that_do_not_wait_for_storage() -> None:
    assert not scanned({0, 1, 2, 3})[1].scheduler.prefill.has_backlog
    assert scanned({0}, max_running=1)[1].scheduler.prefill.has_backlog


def test_waits_for_storage_end_also_for_requests_that_a_scan_does_not_reach() -> None:
    _, world = scanned({3}, chunk_tokens=10)  # the first takes all tokens of the step
    reqs = list(world.scheduler.waiting)
    for req in reqs[1:]:
        req.blocked_since_ns = 5
        world.scheduler.prefill._blocked[req] = None
    world.scheduler.plan(100)
    assert [(req.storage_wait_ns, req.blocked_since_ns) for req in reqs[1:]] == [(95, None), (0, 5)]


# -- when a request refreshes its cached prefix --------------------------------------------------

OLD, NEW = range(16), range(100, 116)


def evicts_new(world: World) -> bool:
    """True if the next victim is the prompt `NEW`, which was published last."""
    found = world.cache.tree.victim(DEVICE, FULL, 1)
    assert found is not None
    return int.from_bytes(found[0].edge[:4], "little") == NEW[0]


@pytest.mark.parametrize("has_storage", [False, True])
@pytest.mark.parametrize("refresh", Refresh)
def test_request_refreshes_its_hit_on_arrival_when_considered_or_when_admitted(
    refresh: Refresh, *, has_storage: bool
) -> None:
    world = World(plot_of("full", refresh=refresh, max_running=2, has_storage=has_storage))
    world.serve([request_of(number, tokens, [1]) for number, tokens in enumerate((OLD, NEW))])
    world.submit(fresh(2, 16, 40))
    world.step()
    # it fits in the pool of 320 tokens alone, and not beside the request that runs
    world.submit(request_of(3, [*OLD, *range(300, 570)], [1]))
    # SGLang matches on arrival only to read storage
    assert evicts_new(world) == (has_storage and refresh is Refresh.arrived)
    if not has_storage:
        world.scheduler.plan(0)
        assert world.counters["scheduler/deferred_tokens_count"] == 1
        assert evicts_new(world) == (refresh is not Refresh.admitted)
        world.scheduler.abort(3, 0)
        world.submit(request_of(4, [*OLD, *range(300, 400)], [1]))
        world.scheduler.plan(0)
        assert world.scheduler.abort(4, 0) is not None  # releases its lock, and publishes nothing
        assert evicts_new(world)


@pytest.mark.parametrize(
    ("answer", "backs_up_answers", "copied"), [(20, 1, 4), (20, 0, 2), (1, 0, 2)]
)
def test_prompt_is_backed_up_and_its_answer_if_set(
    answer: int, backs_up_answers: int, copied: int
) -> None:
    world = World(plot_of("full", backs_up_answers=bool(backs_up_answers)))
    world.serve([fresh(0, 20, answer)])
    assert world.cache.tree.residency.resident[HOST][FULL] == copied
