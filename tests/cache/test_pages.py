"""The ids of a pool: each is free or taken, and never both."""

from random import Random

import pytest

from hicache.cache.pages import PageAllocator, PageIds


def taken(pool: PageAllocator, count: int) -> PageIds:
    page_ids = pool.allocate(count)
    assert page_ids is not None
    return page_ids


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("capacity", [50, None])
def test_a_pool_gives_each_id_once_until_it_is_freed_and_nothing_if_too_few_are_free(
    capacity, *, is_checked
):
    pool, rng = PageAllocator(capacity, is_checked=is_checked), Random(5)
    out: set[int] = set()
    num_refused = 0
    for _ in range(400):
        if out and rng.random() < 0.4:
            back = rng.sample(sorted(out), rng.randint(1, min(40, len(out))))
            pool.free(back)
            out -= set(back)
        count = rng.randint(0, 30)
        fresh = pool.allocate(count)
        if fresh is None:
            num_refused += 1
            assert count > (capacity or 10**9) - len(out)
            continue
        assert out.isdisjoint(fresh)
        assert len(set(fresh)) == len(fresh) == count
        out |= set(fresh)
        assert (pool.num_taken, pool.taken) == (len(out), out)
        assert pool.num_free >= 1 << 40 if capacity is None else pool.num_free == 50 - len(out)
    if capacity is None:
        assert len(out) > 2 * 1024  # it grew, more than once
    else:
        assert num_refused > 10
        assert out <= set(range(50))


def test_an_unlimited_pool_makes_new_ids_only_if_all_others_are_taken():
    pool = PageAllocator(None)
    assert sorted(taken(pool, 1500)) == list(range(1500))
    pool.free(list(range(700)))
    assert set(taken(pool, 700)) == set(range(700))
    assert sorted(taken(pool, 5000)) == list(range(1500, 6500))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0], "page 0 is freed but was not allocated"),
        ([4], "page 4 is freed but was not allocated"),
        ([1, 1], "twice"),
        ([1, 2, 1], "twice"),
    ],
)
def test_freeing_an_id_that_is_not_taken_or_is_given_twice_is_refused(wrong, message):
    pool = PageAllocator(5)
    assert sorted(taken(pool, 4)) == [0, 1, 2, 3]
    pool.free([0])
    with pytest.raises(ValueError, match=message):
        pool.free(wrong)
