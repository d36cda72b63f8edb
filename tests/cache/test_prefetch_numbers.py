"""Prefetch to the number (reports 000-003): thresholds, cuts, capacity, deadlines, ownership."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.sequence import Sequence
from hicache.clock import SECOND_NS
from hicache.config import (
    CommitPolicy,
    CutPolicy,
    DeadlineFrom,
    PrefetchConfig,
    QuirksConfig,
    StageAt,
)
from hicache.observe import invariants
from tests.cache import small
from tests.cache.small import complete_all, make_cache, run_request, tokens_of

P = 64
ROOMY = (100, 0, 0)


def prefetcher_of(
    config: PrefetchConfig,
    *,
    host: tuple[int, int, int] = ROOMY,
    window_len: int = 0,
    has_states: bool = False,
    occupied_of: int | None = None,
    page_size: int = P,
) -> Prefetcher:
    cache = make_cache(
        device=(100, 100, 8),
        host=host,
        window_len=window_len,
        has_states=has_states,
        page_size=page_size,
        storage_queue_bytes=100,
    )
    return small.prefetcher_of(cache, config, occupied_of)


def start(prefetcher: Prefetcher, num_tokens: int, request_id: int = 0) -> Prefetch | None:
    """Ask for `num_tokens` of a prompt that has one token more, none of it known."""
    sequence = Sequence(tokens_of(num_tokens + 1))
    match = prefetcher.cache.match(sequence, num_tokens + 1)
    return prefetcher.prefetch_from_storage(request_id, sequence, match, num_tokens + 1, 0)


def taken(prefetcher: Prefetcher) -> list[int]:
    return [pool.num_taken for pool in prefetcher.cache.pools[HOST]]


# -- thresholds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "starts"),
    [(255, 1, False), (256, 1, True), (255, 64, False), (256, 64, True), (511, 512, False)],
)
def test_a_prefetch_below_the_threshold_does_not_start(
    num_tokens: int, page_size: int, *, starts: bool
) -> None:
    prefetcher = prefetcher_of(PrefetchConfig(), host=(1000, 0, 0), page_size=page_size)
    assert (start(prefetcher, num_tokens) is not None) is starts


@pytest.mark.parametrize(("found_pages", "reads"), [(3, False), (4, True)])
def test_what_storage_has_is_read_from_the_threshold_on(found_pages: int, *, reads: bool) -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stage_at=StageAt.hit))
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    prefetch.restorable = list(range(1, found_pages + 1))
    prefetcher.on_queried(prefetch)
    assert (prefetcher.reads == [prefetch]) is reads


def test_the_length_asked_for_is_whole_pages() -> None:
    prefetch = start(prefetcher_of(PrefetchConfig()), 1000)
    assert prefetch is not None
    assert prefetch.num_pages == 15


@pytest.mark.parametrize(("occupied", "starts"), [(4999, True), (5000, False)])
def test_no_prefetch_starts_while_half_of_the_host_is_spoken_for(
    occupied: int, *, starts: bool
) -> None:
    prefetcher = prefetcher_of(PrefetchConfig(), occupied_of=10_000)
    prefetcher.occupied_tokens = occupied
    assert (start(prefetcher, 1024) is not None) is starts


# -- the cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available_pages", "wanted_tokens"), [(15, 960), (5, 320), (4, 256), (3, None), (16, 1024)]
)
@pytest.mark.parametrize("stage_at", list(StageAt), ids=lambda each: each.value)
def test_a_prefetch_is_cut_to_the_pages_there_are(
    stage_at: StageAt, available_pages: int, wanted_tokens: int | None
) -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stage_at=stage_at), host=(available_pages, 0, 0))
    prefetch = start(prefetcher, 1024)
    if stage_at is StageAt.hit:
        assert prefetch is not None
        prefetch.restorable = list(range(1, 17))
        prefetcher.on_queried(prefetch)
        prefetch = prefetch if prefetch.is_staged else None
    if wanted_tokens is None:
        assert prefetch is None
        assert taken(prefetcher) == [0, 0, 0]
        assert prefetcher.occupied_tokens == 0
        prefetcher.forget(0)
        invariants.check_drained(prefetcher.cache, prefetcher)
        return
    assert prefetch is not None
    assert prefetch.num_pages * P == wanted_tokens
    assert len(prefetch.staged[FULL]) == prefetch.num_pages
    assert prefetcher.cache.counters["prefetch/cut_tokens"] == 1024 - wanted_tokens


def test_a_cut_prefetch_asks_storage_for_no_more_keys_than_it_has_pages() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stage_at=StageAt.enqueue), host=(15, 0, 0))
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    assert len(prefetch.keys(FULL, 0, prefetch.num_pages)) == 15


def test_a_prefetch_with_no_room_is_abandoned_whole_when_it_may_not_be_cut() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(cut=CutPolicy.abandon), host=(15, 0, 0))
    assert start(prefetcher, 1024) is None
    assert prefetcher.cache.counters["prefetch/abandoned_host_room_tokens"] == 1024
    assert taken(prefetcher) == [0, 0, 0]


def test_a_prefetch_without_a_state_slot_gives_all_pages_back() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(), host=(100, 0, 0), has_states=True)
    assert start(prefetcher, 1024) is None
    assert prefetcher.cache.counters["prefetch/abandoned_sidecar_room_tokens"] == 1024
    assert taken(prefetcher) == [0, 0, 0]
    invariants.check_drained(prefetcher.cache, prefetcher)


def test_a_cut_does_not_shrink_the_state() -> None:
    prefetcher = prefetcher_of(
        PrefetchConfig(stage_at=StageAt.enqueue), host=(10, 0, 1), has_states=True
    )
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    assert [len(each) for each in prefetch.staged] == [10, 0, 1]


@pytest.mark.parametrize("available_pages", [15, 8])
def test_a_cut_to_what_can_be_restored_skips_lengths_without_a_state(available_pages: int) -> None:
    config = PrefetchConfig(cut=CutPolicy.restorable, stage_at=StageAt.hit)
    prefetcher = prefetcher_of(config, host=(available_pages, 0, 1), has_states=True)
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    prefetch.restorable = [4, 8, 16]
    prefetcher.on_queried(prefetch)
    assert prefetch.num_pages == 8


def test_a_listener_gets_what_storage_reports_with_the_kinds_that_it_includes() -> None:
    prefetcher = prefetcher_of(
        PrefetchConfig(stage_at=StageAt.hit), host=(16, 16, 1), window_len=2 * P, has_states=True
    )
    listener = Mock()
    prefetcher.cache.tree.listener = listener
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    prefetch.restorable = [4, 8]
    prefetcher.on_queried(prefetch, 7)
    listener.found.assert_called_once_with(
        prefetch.sequence, 0, [4, 8], ((SWA, Window(2)), (MAMBA, Window(1)))
    )
    assert prefetch.answered_ns == 7


def test_host_data_is_evicted_before_a_prefetch_is_cut() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stage_at=StageAt.enqueue), host=(16, 0, 0))
    cache = prefetcher.cache
    run_request(cache, tokens_of(4 * P, first=90_000), 4 * P)
    complete_all(cache)
    free_device(cache)
    assert cache.tree.residency.resident[HOST][FULL] == 4
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    assert prefetch.num_pages == 16


def test_the_anchor_survives_the_eviction_that_makes_room() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stage_at=StageAt.enqueue), host=(16, 0, 0))
    cache = prefetcher.cache
    run_request(cache, tokens_of(4 * P), 4 * P)
    complete_all(cache)
    free_device(cache)
    prefetch = start(prefetcher, 4 * P + 1024)
    assert prefetch is not None
    assert prefetch.start_page == 4
    assert prefetch.num_pages == 12
    assert cache.tree.residency.resident[HOST][FULL] == 4


def free_device(cache: object) -> None:
    pool = cache.pools[DEVICE][FULL]  # type: ignore[attr-defined]
    pool.free(cache.device.allocate(FULL, pool.capacity))  # type: ignore[attr-defined]


# -- stopping -----------------------------------------------------------------------------------


def running(config: PrefetchConfig, **shape: object) -> tuple[Prefetcher, Prefetch]:
    """A prefetch of 4096 tokens whose keys are known and whose read has begun."""
    prefetcher = prefetcher_of(config, host=(100, 20, 4), **shape)  # type: ignore[arg-type]
    prefetch = start(prefetcher, 4096)
    assert prefetch is not None
    prefetch.restorable = list(range(1, 65))
    prefetcher.on_queried(prefetch)
    return prefetcher, prefetch


def test_the_deadline_of_4096_tokens_is_two_seconds_after_enqueue() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="timeout"))
    assert not prefetcher.can_terminate_prefetch(prefetch, 2 * SECOND_NS)
    assert prefetcher.can_terminate_prefetch(prefetch, 2 * SECOND_NS + 1)


def test_the_later_deadline_counts_from_the_first_blocked_poll() -> None:
    config = PrefetchConfig(stop="timeout", deadline_from=DeadlineFrom.first_poll)
    prefetcher, _ = running(config)
    assert not prefetcher.check(0, 10 * SECOND_NS)
    assert not prefetcher.check(0, 12 * SECOND_NS)
    assert prefetcher.check(0, 12 * SECOND_NS + 1)


def test_the_deadline_counts_what_was_asked_for_and_not_what_the_cut_left() -> None:
    config = PrefetchConfig(stop="timeout", stage_at=StageAt.enqueue)
    prefetcher = prefetcher_of(config, host=(16, 0, 0))
    prefetch = start(prefetcher, 4096)
    assert prefetch is not None
    assert prefetch.num_pages == 16
    assert prefetcher.policy.deadline_ns(prefetch) == 2 * SECOND_NS


def test_best_effort_stops_at_once() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="best_effort"))
    assert prefetcher.can_terminate_prefetch(prefetch, 0)


def test_wait_complete_stops_only_when_all_pages_are_read() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="wait_complete"))
    prefetch.completed_pages = 63
    assert not prefetcher.can_terminate_prefetch(prefetch, 1000 * SECOND_NS)
    prefetch.completed_pages = 64
    assert prefetcher.can_terminate_prefetch(prefetch, 0)


def test_an_operation_whose_keys_are_not_known_is_not_complete() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(stop="wait_complete", stage_at=StageAt.hit))
    prefetch = start(prefetcher, 1024)
    assert prefetch is not None
    prefetch.num_pages = prefetch.completed_pages = 0
    assert not prefetcher.can_terminate_prefetch(prefetch, 1000 * SECOND_NS)


@pytest.mark.parametrize("shape", [{"has_states": True}, {"window_len": 128}])
@pytest.mark.parametrize(
    ("stop", "may_stop"),
    [
        ("best_effort", True),
        ("wait_complete", False),
        ("timeout", False),
    ],
)
def test_complete_pages_wait_for_their_sidecars(
    stop: str, shape: dict[str, object], *, may_stop: bool
) -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop=stop), **shape)
    prefetch.completed_pages = prefetch.num_pages
    assert prefetcher.can_terminate_prefetch(prefetch, 100 * SECOND_NS) is may_stop
    prefetch.is_read = True
    assert prefetcher.can_terminate_prefetch(prefetch, 0)


def test_a_timeout_with_incomplete_pages_stops_although_sidecars_are_missing() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="timeout"), has_states=True)
    prefetch.completed_pages = 63
    assert prefetcher.can_terminate_prefetch(prefetch, 2 * SECOND_NS + 1)


def test_before_report_003_complete_pages_did_not_wait_for_their_sidecars() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="wait_complete"), has_states=True)
    prefetcher.cache.quirks = QuirksConfig(await_sidecars=False)
    prefetch.completed_pages = prefetch.num_pages
    assert prefetcher.can_terminate_prefetch(prefetch, 0)


# -- who owns staged pages ----------------------------------------------------------------------


@pytest.mark.parametrize("completed", [0, 10, 64])
def test_an_abort_during_a_read_gives_pages_back_with_the_readers_last_word(
    completed: int,
) -> None:
    prefetcher, prefetch = running(PrefetchConfig(), has_states=True)
    prefetch.completed_pages = completed
    prefetcher.abort(0)
    assert taken(prefetcher)[FULL] == 64  # the reader still writes into them
    prefetch.is_read = True
    prefetcher.on_read(prefetch)
    invariants.check_drained(prefetcher.cache, prefetcher)
    assert taken(prefetcher) == [0, 0, 0]


def test_an_early_stop_hands_over_what_is_read_and_leaves_the_rest_to_the_reader() -> None:
    prefetcher, prefetch = running(PrefetchConfig(stop="best_effort"))
    prefetch.completed_pages = 10
    assert prefetcher.check(0, 0)
    assert prefetcher.cache.tree.residency.resident[HOST][FULL] == 10
    assert len(prefetch.staged[FULL]) == 54
    prefetch.completed_pages = 20  # the batch at hand ends
    prefetch.is_read = True
    prefetcher.on_read(prefetch)
    assert taken(prefetcher) == [10, 0, 0]


@pytest.mark.parametrize("commit", CommitPolicy)
def test_a_request_that_never_waits_keeps_no_page_without_its_state(commit: CommitPolicy) -> None:
    config = PrefetchConfig(stop="best_effort", commit=commit)
    prefetcher, prefetch = running(config, has_states=True)
    prefetch.completed_pages = 10
    assert prefetcher.check(0, 0)
    assert taken(prefetcher) == [54, 0, 1]  # the reader's


# 64 pages: the last deadline has passed when 10 are read, and storage has a state after 8
STOPPED = PrefetchConfig(stop="timeout", commit=CommitPolicy.usable)
LATE_NS = 10 * SECOND_NS


def stopped(**shape: object) -> tuple[Prefetcher, Prefetch]:
    prefetcher, prefetch = running(STOPPED, **shape)
    prefetch.restorable = [4, 8, 16, 64]
    prefetch.completed_pages = 10
    return prefetcher, prefetch


@pytest.mark.parametrize("shape", [{"window_len": 5 * P}, {"has_states": True}])
def test_an_early_stop_keeps_the_longest_part_that_can_be_restored(
    shape: dict[str, object],
) -> None:
    prefetcher, prefetch = stopped(**shape)
    assert not prefetcher.is_blocking(0, LATE_NS)
    assert not prefetcher.check(0, LATE_NS)  # the window and the state after 8 pages are read now
    assert prefetch.stop_pages == 8
    assert prefetcher.is_blocking(0, LATE_NS)
    prefetch.completed_pages = 12  # the batch at hand
    prefetch.restored_pages, prefetch.is_read = 8, True
    prefetcher.on_read(prefetch)
    assert prefetcher.check(0, LATE_NS)
    prefetcher.forget(0)
    cache, window_pages = prefetcher.cache, 5 if "window_len" in shape else 0
    assert cache.tree.residency.resident[HOST] == [8, window_pages, "has_states" in shape]
    assert taken(prefetcher) == [8, window_pages, "has_states" in shape]
    assert cache.match(prefetch.sequence, 4097).usable_len == 8 * P
    assert cache.counters["prefetch/not_restorable_pages"] == 4
    assert cache.counters["prefetch/discarded_unread_pages"] == 52
    assert cache.counters["prefetch/terminated_count"] == 1
    invariants.check(cache, prefetcher, [])


def test_an_early_stop_before_anything_can_be_restored_keeps_nothing_and_waits_for_nothing() -> (
    None
):
    prefetcher, prefetch = stopped(has_states=True)
    prefetch.completed_pages = 3
    assert prefetcher.check(0, LATE_NS)
    assert prefetcher.cache.tree.residency.resident[HOST][FULL] == 0
    assert prefetcher.cache.counters["prefetch/not_restorable_pages"] == 3


def test_an_early_stop_whose_state_is_lost_keeps_nothing() -> None:
    prefetcher, prefetch = stopped(has_states=True)
    assert not prefetcher.check(0, LATE_NS)
    prefetch.is_read = True
    prefetcher.on_read(prefetch)
    assert prefetcher.check(0, LATE_NS)
    assert taken(prefetcher) == [0, 0, 0]
    assert prefetcher.cache.counters["prefetch/not_restorable_pages"] == 10


def test_an_abort_while_the_state_of_a_part_is_read_gives_everything_back() -> None:
    prefetcher, prefetch = stopped(has_states=True)
    assert not prefetcher.check(0, LATE_NS)
    prefetcher.abort(0)
    prefetch.restored_pages, prefetch.is_read = 8, True
    prefetcher.on_read(prefetch)
    assert taken(prefetcher) == [0, 0, 0]
    invariants.check_drained(prefetcher.cache, prefetcher)


# -- what storage could restore -----------------------------------------------------------------


def restorable(*found: list[int], window_pages: int = 0, has_state: bool = False) -> list[int]:
    _, prefetch = running(PrefetchConfig(), has_states=True)
    windows, states = (
        [(SWA, Window(window_pages))] * (window_pages > 0),
        [(MAMBA, Window(1))] * has_state,
    )
    shaped = replace(prefetch, needs=(*windows, *states))
    answers = iter([[bool(each) for each in part] for part in found])
    return shaped.ask(lambda keys: next(answers))


def test_without_sidecars_every_leading_page_is_a_length_to_restore() -> None:
    assert restorable([1, 1, 0, 1]) == [1, 2]


def test_a_state_makes_its_own_length_restorable_and_no_other() -> None:
    assert restorable([1, 1, 1, 1], [1, 1, 0, 1], has_state=True) == [1, 2, 4]


def test_a_window_from_the_start_may_be_shorter_than_the_window() -> None:
    assert restorable([1, 1, 1, 1], [1, 0, 1, 1], window_pages=2) == [1, 4]


def test_the_longest_common_restorable_length_is_not_the_least_of_the_longest() -> None:
    first = set(restorable([1, 1, 1, 1], [1, 1, 0, 1], has_state=True))
    second = set(restorable([1, 1, 1, 1], [1, 0, 0, 1], has_state=True))
    assert max(first & second) == 4


def test_no_anchor_off_the_host_is_built_upon() -> None:
    prefetcher = prefetcher_of(PrefetchConfig(), host=(0, 0, 0))
    run_request(prefetcher.cache, tokens_of(4 * P), 4 * P)
    assert start(prefetcher, 4 * P + 1024) is None
    assert prefetcher.cache.counters["prefetch/declined_anchor_not_on_host_tokens"] == 1024


@pytest.mark.parametrize("stop", ["wait_complete", "best_effort"])
def test_a_request_is_blocked_while_its_prefetch_is_waited_for(stop: str) -> None:
    cache = make_cache(device=(16, 0, 0), host=(16, 0, 0), storage_queue_bytes=100)
    prefetcher = small.prefetcher_of(cache, PrefetchConfig(threshold=4, stop=stop), 64)
    sequence = Sequence(tokens_of(16))
    assert not prefetcher.is_blocking(0, 0)
    prefetch = prefetcher.prefetch_from_storage(0, sequence, cache.match(sequence, 16), 16, 0)
    assert prefetch is not None
    assert prefetcher.is_blocking(0, 1) == (stop == "wait_complete")
    assert not prefetcher.is_blocking(1, 1)
    assert prefetch.first_poll_ns is None
    prefetch.restorable = [1, 2, 3]
    prefetcher.on_queried(prefetch)
    prefetch.completed_pages = 2
    assert prefetcher.is_blocking(0, 1) == (stop == "wait_complete")
    prefetch.completed_pages = 3
    assert not prefetcher.is_blocking(0, 1)
    prefetch.is_read = True
    prefetcher.on_read(prefetch)
    prefetch.completed_pages = 0
    assert not prefetcher.is_blocking(0, 1)
