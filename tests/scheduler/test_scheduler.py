"""What the scheduler decides, one decision at a time."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hicache.cache.prefix_cache import Acquired
from hicache.scheduler.admission import StepBudget
from hicache.scheduler.batch import NOTHING, Batch, Extend, Outcome
from hicache.scheduler.decision import Reason
from hicache.scheduler.request_state import RequestState
from tests.scheduler.world import World, plot_of, request_of


def world_with(*running: tuple[int, int, int]) -> World:
    """Requests that run: tokens of the prompt, of the answer, and how many of those are there."""
    world = World(plot_of("full", has_storage=False))
    scheduler = world.scheduler
    for number, (prompt_len, output_len, decoded) in enumerate(running):
        req = scheduler.submit(request_of(number, [number] * prompt_len, [7] * output_len), 0)
        req.remaining_output -= decoded
        scheduler.running.append(req)
    scheduler.waiting.clear()
    return world


BUDGET = StepBudget(chunk_tokens=16, reserved_tokens=0)


def acquired(cached: int, device: int, host: int, storage: int) -> Acquired:
    return Acquired(
        cached_len=cached, device_len=device, host_len=host, storage_len=storage, load_back=None
    )


def ids(reqs: Sequence[RequestState]) -> list[int]:
    return [req.request.id for req in reqs]


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        ([(10, 90, 5), (10, 90, 3), (10, 90, 4)], 1),  # the fewest tokens of an answer
        ([(10, 90, 5), (10, 90, 3), (11, 90, 3)], 2),  # of those, the longest prompt
        ([(10, 90, 3), (9, 90, 3), (99, 90, 4)], 0),
    ],
)
def test_whoever_loses_least_is_sent_back(running: list[tuple[int, int, int]], victim: int) -> None:
    world = world_with(*running)
    assert world.scheduler._retract_one(Batch())
    assert ids(world.scheduler.waiting) == [victim]
    assert ids(world.scheduler.running) == [each for each in range(3) if each != victim]


def test_who_was_sent_back_has_its_answer_in_its_prompt_and_is_counted() -> None:
    world = world_with((10, 90, 5), (20, 80, 3))
    world.scheduler._retract_one(Batch())
    (req,) = world.scheduler.waiting
    assert req.place == (0, 2)
    assert (req.target_len, req.kv_len, req.decoded, req.retractions) == (23, 0, 3, 1)
    assert world.counters["scheduler/retracted_count"] == 1
    world.scheduler._retract_one(Batch())
    assert world.counters["scheduler/retracted_count"] == 2


def test_those_that_stay_say_how_much_of_an_answer_is_reserved() -> None:
    world = world_with((10, 90, 50), (20, 100, 40), (30, 80, 3))
    world.scheduler._retract_one(Batch())
    # (decoded + 20 for each) / (their answers + 1)
    ratio = world.scheduler.prefill.admission.new_token_ratio
    assert ratio.after() == pytest.approx((90 + 2 * 20) / (190 + 1))


def test_the_last_one_is_sent_back_as_well_and_nothing_is_left_to_decode() -> None:
    world = world_with((10, 90, 5))
    before = world.scheduler.prefill.admission.new_token_ratio.after()
    assert not world.scheduler._retract_one(Batch())
    assert world.scheduler.running == []
    assert ids(world.scheduler.waiting) == [0]
    assert world.scheduler.prefill.admission.new_token_ratio.after() == before
    assert world.scheduler.ended.take().rejected == []


def test_the_last_one_waits_for_a_copy_that_is_under_way() -> None:
    world = world_with((10, 90, 5))
    world.cache.in_flight.add(object())  # type: ignore[arg-type]
    assert not world.scheduler._retract_one(Batch())
    assert ids(world.scheduler.running) == [0]


def test_the_last_one_waits_for_whoever_begins_in_the_same_step() -> None:
    world = world_with((10, 90, 5), (10, 90, 5))
    beginner = world.scheduler.running.pop()
    batch = Batch(extends=[Extend(beginner, 0, 8, [])])
    world.scheduler.prefill.partial = beginner
    assert not world.scheduler._retract_one(batch)
    assert ids(world.scheduler.running) == [0]
    assert world.scheduler.prefill.partial is beginner
    assert world.scheduler.waiting == []


def test_a_half_computed_prompt_gives_way_to_the_last_one() -> None:
    world = world_with((10, 90, 5), (10, 90, 0))
    half = world.scheduler.prefill.partial = world.scheduler.running.pop()
    assert world.scheduler._retract_one(Batch())
    assert ids(world.scheduler.running) == [0]
    assert world.scheduler.prefill.partial is None
    assert world.scheduler.waiting == [half]
    assert world.counters["scheduler/prefill_oom_count"] == half.retractions == 1
    assert world.counters["scheduler/retracted_count"] == 0


@pytest.mark.parametrize(
    ("is_copying", "lingering", "settled", "wanted"),
    [
        (False, [], [], False),
        (False, [], [True, True], False),
        (True, [], [True], True),
        (False, [], [True, False], True),
        (False, ["pages"], [True], True),
        (False, ["pages"], [], True),
        (False, ["pages"], [False], True),
    ],
)
def test_copies_and_prefetches_under_way_may_give_room(
    *, is_copying: bool, lingering: list[str], settled: list[bool], wanted: bool
) -> None:
    world = world_with()
    world.cache.in_flight.update([object()] if is_copying else [])  # type: ignore[list-item]
    reads = {number: SimpleNamespace(is_settled=each) for number, each in enumerate(settled)}
    prefetcher = SimpleNamespace(active=reads, lingering=lingering)
    prefill = world.scheduler.prefill
    prefill.prefetcher = prefetcher  # type: ignore[assignment]
    assert prefill.may_get_room == wanted
    assert prefill._is_final(Batch(), BUDGET) == (not wanted)


@pytest.mark.parametrize("place", ["batch", "running", "partial"])
def test_a_refusal_is_not_final_while_another_request_has_pages(place: str) -> None:
    world = world_with((10, 90, 5))
    other = world.scheduler.running.pop()
    batch = Batch(extends=[Extend(other, 0, 8, [])] if place == "batch" else [])
    budget = replace(BUDGET, num_running=int(place == "running"))
    if place == "partial":
        world.scheduler.prefill.partial = other
    assert not world.scheduler.prefill._is_final(batch, budget)


@pytest.mark.parametrize("waits_for", ["a running request", "a copy", None])
def test_a_half_computed_prompt_without_pages_starts_over_only_if_nothing_may_free_any(
    waits_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_with((10, 90, 5), (40, 90, 0))
    half = world.scheduler.prefill.partial = world.scheduler.running.pop()
    if waits_for != "a running request":
        world.scheduler.running.clear()
    if waits_for == "a copy":
        world.cache.in_flight.add(object())  # type: ignore[arg-type]
    monkeypatch.setattr(world.cache, "extend", lambda *_: False)
    budget = replace(BUDGET, num_running=len(world.scheduler.running))
    world.scheduler.prefill._continue_partial(half, Batch(), budget)
    assert (world.scheduler.prefill.partial is half) == (waits_for is not None)
    assert world.counters["scheduler/prefill_oom_count"] == (waits_for is None)


@pytest.mark.parametrize("how", ["finished", "rejected", "aborted"])
def test_requests_that_ended_in_one_way_alone_are_handed_out_once(how: str) -> None:
    scheduler = world_with().scheduler
    ended = Outcome()
    getattr(ended, how).append("a request")
    scheduler.ended.outcome = ended
    assert scheduler.ended.take() is ended
    assert scheduler.ended.take() is NOTHING


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [(72, None), (73, "needs 11 pages, and the device pool has 10")],
)
def test_a_request_fits_a_pool_that_has_a_page_more_than_its_tokens_fill(
    num_tokens: int, reason: str | None
) -> None:
    world = World(plot_of("full", device=(10, 0, 0), has_storage=False))
    req = world.scheduler.submit(request_of(0, range(num_tokens - 2), [7, 7]), 0)
    rejected = world.scheduler.ended.take().rejected
    assert rejected == ([] if reason is None else [(req, reason)])


@pytest.mark.parametrize("num_tokens", [50, 51])
def test_prompt_and_answer_are_no_longer_than_the_model_can_attend_to(num_tokens: int) -> None:
    world = World(plot_of("full", has_storage=False))
    world.scheduler.prefill._max_len = 50
    req = world.scheduler.submit(request_of(0, range(num_tokens - 2), [7, 7]), 0)
    told = (
        [(req, "prompt and answer have 51 tokens, more than model.max_len=50")]
        if num_tokens == 51
        else []
    )
    assert world.scheduler.ended.take().rejected == told


@pytest.mark.parametrize(
    ("kv_len", "extend_len", "chunk_tokens", "end"),
    [
        (0, 20, 20, 20),
        (0, 20, 19, 16),  # pages of 8 tokens
        (0, 20, 3, 8),
        (16, 40, 24, 40),
        (16, 40, 23, 32),
        (16, 3, 2, 19),
    ],
)
def test_a_chunk_is_all_that_is_left_or_ends_at_a_page(
    kv_len: int, extend_len: int, chunk_tokens: int, end: int
) -> None:
    world = world_with((kv_len + extend_len, 1, 0))
    (req,) = world.scheduler.running
    req.kv_len = kv_len
    assert world.scheduler.prefill._chunk_end(req, chunk_tokens) == end


def test_a_deferral_is_counted_once_until_the_reason_changes() -> None:
    world = world_with((10, 90, 0))
    (req,) = world.scheduler.running
    for reason in (Reason.tokens, Reason.tokens, Reason.slots, Reason.tokens):
        world.scheduler.prefill._count_deferral(req, reason)
    assert world.counters["scheduler/deferred_count"] == 3
    assert world.counters["scheduler/deferred_tokens_count"] == 2
    assert world.counters["scheduler/deferred_slots_count"] == 1


def test_tokens_are_dealt_to_tiers_at_the_first_admission_and_recomputed_at_later_ones() -> None:
    world = world_with((100, 9, 0))
    (req,) = world.scheduler.running
    req.cached_len = 60
    world.scheduler.prefill._account(req, acquired(60, 30, 20, 10), 77)
    req.cached_len = 90
    world.scheduler.prefill._account(req, acquired(90, 90, 0, 0), 99)
    parts = (req.device_len, req.host_len, req.storage_len, req.computed_len, req.recomputed_len)
    assert parts == (30, 20, 10, 40, 10)
    assert req.admitted_ns == 77
    names = ("device_hit", "host_hit", "storage_hit", "computed", "recomputed")
    assert [world.counters[f"cache/{name}_tokens"] for name in names] == list(parts)
