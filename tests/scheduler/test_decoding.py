"""How many decode steps may be taken at once, on pools of a known size."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.scheduler.admission import (
    are_free,
    pages_for,
    steps_in_free_pages,
    steps_in_page,
    steps_with_pages,
)
from tests.cache.small import named_kinds

PAGE = 16


def req(kv_len: int, num_pages: int | None = None) -> Any:
    pages = -(-kv_len // PAGE) if num_pages is None else num_pages
    return SimpleNamespace(kv_len=kv_len, sequence=SimpleNamespace(num_pages=pages))


@pytest.mark.parametrize(
    ("kv_len", "steps", "pages"),
    [(31, 1, 0), (32, 1, 1), (33, 15, 0), (33, 16, 1), (33, 31, 1), (33, 32, 2)],
)
def test_a_page_is_taken_for_the_first_token_that_the_last_one_cannot_hold(
    kv_len: int, steps: int, pages: int
) -> None:
    assert pages_for([req(kv_len)], PAGE, steps) == pages


def test_pages_add_up_and_one_taken_ahead_is_no_credit_to_others() -> None:
    ahead = req(33, num_pages=5)
    assert pages_for([req(32), req(40), ahead], PAGE, 16) == 2


@pytest.mark.parametrize(("wanted", "steps"), [(64, 3), (3, 3), (2, 2), (0, 1)])
def test_steps_in_a_page_end_with_the_first_page_that_is_full(wanted: int, steps: int) -> None:
    assert steps_in_page([req(40), req(45), req(33)], PAGE, wanted) == steps


def test_a_request_whose_page_is_full_takes_one_step_by_itself() -> None:
    assert steps_in_page([req(40), req(48)], PAGE, 64) == 1


def cache(
    *,
    free: dict[int, int],
    evictable: dict[int, int] | None = None,
    policy: str = "write_through",
) -> Any:
    """Pages free and evictable, by kind."""
    more = evictable or {}
    return SimpleNamespace(
        page_size=PAGE,
        tree=SimpleNamespace(
            kinds=named_kinds(PAGE, window_len=int(SWA in free)), demotes=policy == "write_back"
        ),
        available_size=lambda kind: free[kind] * PAGE,
        room=lambda kind: (free[kind] + more.get(kind, 0)) * PAGE,
        growth_pages=lambda kind, tokens: tokens // PAGE,
        device=SimpleNamespace(is_shared=False),
    )


def test_with_pages_for_all_of_them_as_many_steps_are_taken_as_were_wanted() -> None:
    assert steps_with_pages(cache(free={FULL: 2}), [req(32)], 32) == 32


def test_evictable_pages_count_where_the_device_is_not_the_only_copy() -> None:
    assert steps_with_pages(cache(free={FULL: 0}, evictable={FULL: 2}), [req(32)], 32) == 32


def test_too_few_pages_halve_the_steps_until_they_do() -> None:
    assert steps_with_pages(cache(free={FULL: 1}), [req(32)], 64) == 16
    assert steps_with_pages(cache(free={FULL: 0}), [req(33)], 60) == 15


def test_without_a_page_for_one_step_there_is_none() -> None:
    assert steps_with_pages(cache(free={FULL: 0}), [req(32)], 64) == 0


def test_a_victim_must_be_saved_first_so_steps_end_within_a_page() -> None:
    scarce = cache(free={FULL: 1}, evictable={FULL: 9}, policy="write_back")
    assert steps_with_pages(scarce, [req(33)], 64) == 15
    assert steps_with_pages(scarce, [req(33)], 31) == 31  # one page, and it is free


def test_window_pages_are_taken_within_a_page_unless_they_are_free() -> None:
    roomy = cache(free={FULL: 9, SWA: 1}, evictable={SWA: 9})
    assert steps_with_pages(roomy, [req(33)], 64) == 15
    assert steps_with_pages(roomy, [req(33)], 31) == 31


@pytest.mark.parametrize(("spare", "steps"), [(0, 31), (1, 15)])
def test_spare_pages_stay_free(spare: int, steps: int) -> None:
    scarce = cache(free={FULL: 9, SWA: 1}, evictable={SWA: 9})
    assert steps_in_free_pages(scarce, [req(33)], 31, spare=spare) == steps


def test_the_kind_with_the_least_room_decides() -> None:
    scarce = cache(free={FULL: 9, SWA: 0})
    assert steps_with_pages(scarce, [req(32)], 64) == 0


@pytest.mark.parametrize(
    ("kv_len", "free", "must"), [(31, 0, False), (32, 0, True), (32, 1, False)]
)
def test_the_next_step_must_evict_if_the_pages_of_that_step_alone_are_not_free(
    kv_len: int, free: int, *, must: bool
) -> None:
    assert are_free(cache(free={FULL: free}), [FULL], [req(kv_len)], 1) is not must
