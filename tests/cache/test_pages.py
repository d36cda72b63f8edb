"""The ids of one pool: each is free or taken, and never both."""

from random import Random

import pytest

from hicache.cache.pages import PageAllocator, PageIds


def taken(pool: PageAllocator, count: int) -> PageIds:
    page_ids = pool.allocate(count)
    assert page_ids is not None
    return page_ids


def test_a_pool_gives_each_of_its_ids_once_and_then_none() -> None:
    pool = PageAllocator(5)
    assert sorted([*taken(pool, 2), *taken(pool, 3)]) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert taken(pool, 0) == []


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = PageAllocator(5)
    taken(pool, 2)
    assert pool.allocate(4) is None
    assert (pool.num_taken, pool.num_free) == (2, 3)


def test_what_was_given_back_is_given_out_again() -> None:
    pool = PageAllocator(5)
    taken(pool, 1)
    some = taken(pool, 3)
    pool.free(some)
    assert (pool.num_taken, pool.num_free) == (1, 4)
    again = taken(pool, 4)
    assert set(some) < set(again)
    assert sorted(again) == [1, 2, 3, 4]


def test_an_id_that_is_not_out_cannot_be_given_back() -> None:
    pool = PageAllocator(5)
    some = taken(pool, 3)
    pool.free(some[:1])
    with pytest.raises(ValueError, match=f"page {some[0]} is freed but was not allocated"):
        pool.free(some)
    with pytest.raises(ValueError, match="page 4 "):
        pool.free([4])


def test_an_id_cannot_be_given_back_twice_at_once() -> None:
    for count in (2, 3):
        pool = PageAllocator(5)
        some = taken(pool, count)
        with pytest.raises(ValueError, match="twice"):
            pool.free([some[0], *some[1:-1], some[0]])


def test_a_pool_without_an_end_keeps_what_is_out_and_what_came_back_as_it_grows() -> None:
    pool = PageAllocator(None)
    rng = Random(5)
    out: set[int] = set()
    for _ in range(400):
        if out and rng.random() < 0.4:
            back = rng.sample(sorted(out), rng.randint(1, min(40, len(out))))
            pool.free(back)
            out -= set(back)
        fresh = taken(pool, rng.randint(1, 30))
        assert out.isdisjoint(fresh)
        assert len(set(fresh)) == len(fresh)
        out |= set(fresh)
        assert pool.num_taken == len(out)
        assert pool.taken == out
    assert len(out) > 2 * 1024  # it grew, more than once


def test_a_pool_without_an_end_makes_no_new_ids_while_old_ones_are_free() -> None:
    pool = PageAllocator(None)
    some = taken(pool, 1500)
    pool.free(some)
    assert set(taken(pool, 1500)) == set(some)
    assert pool.num_free >= 1 << 40


def test_a_pool_without_an_end_gives_more_at_once_than_it_has_made_so_far() -> None:
    pool = PageAllocator(None)
    taken(pool, 10)
    assert sorted(taken(pool, 5000)) == list(range(10, 5010))


def test_an_unchecked_pool_knows_what_is_out_all_the_same() -> None:
    pools = [PageAllocator(9, is_checked=each) for each in (True, False)]
    for pool in pools:
        pool.allocate(5)
        pool.free([3, 1])
        pool.allocate(1)
    assert pools[0].taken == pools[1].taken
    assert {pool.num_taken for pool in pools} == {4}
