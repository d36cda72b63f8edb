"""The oracles against definitions too slow to be useful."""

from itertools import combinations

import numpy as np
import pytest

from hicache.workload.oracle import Visit, Visits, infinite, lru_depths, min_hits, visits_of
from tests.validity import runs

PAGE = 4


def random_visits(seed: int, count: int, depth: int, branching: int) -> Visits:
    """Requests down a random tree: of each, a path of pages and how much of it is its prompt."""
    generator = np.random.default_rng(seed)
    ids: dict[tuple[int, ...], int] = {}
    visits = []
    for _ in range(count):
        path = tuple(generator.integers(0, branching, generator.integers(1, depth + 1)).tolist())
        chain = [ids.setdefault(path[: end + 1], len(ids)) for end in range(len(path))]
        reach = int(generator.integers(0, len(chain) + 1))
        visits.append(Visit(np.array(chain), reach, (reach + 1) * PAGE))
    return Visits(visits=visits, num_pages=len(ids), page_size=PAGE)


def hit_pages(visit: Visit, held: frozenset[int]) -> int:
    pages = 0
    for page in visit.chain[: visit.reach].tolist():
        if page not in held:
            break
        pages += 1
    return pages


def best_of_all(visits: Visits, capacity: int) -> int:
    """Pages hit by the best of all ways to keep at most `capacity` pages between requests."""
    best = {frozenset[int](): 0}
    for visit in visits.visits:
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hits += hit_pages(visit, held)
            offered = held | set(visit.chain.tolist())
            for size in range(min(capacity, len(offered)) + 1):
                for kept in map(frozenset, combinations(sorted(offered), size)):
                    following[kept] = max(following.get(kept, 0), hits)
        best = following
    return max(best.values())


def lru_by_hand(visits: Visits, capacity: int) -> int:
    """Pages hit by a list in order of use, cut to what fits after every request."""
    order: list[int] = []  # pages, the last used at the end
    hits = 0
    for visit in visits.visits:
        hits += hit_pages(visit, frozenset(order[-capacity:]))
        chain = visit.chain.tolist()[::-1]
        order = [page for page in order if page not in chain] + chain
    return hits


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_min_hits_as_much_as_the_best_of_all_policies(seed: int, capacity: int) -> None:
    visits = random_visits(seed, count=8, depth=3, branching=2)

    assert min_hits(visits, capacity) == best_of_all(visits, capacity) * PAGE


@pytest.mark.parametrize("seed", range(4))
def test_min_with_room_for_everything_hits_as_much_as_the_infinite_cache(seed: int) -> None:
    visits = random_visits(seed, count=60, depth=6, branching=3)

    assert min_hits(visits, visits.num_pages) == infinite(visits) > 0


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_gives_what_lru_hits_at_every_capacity_and_min_hits_no_less(seed: int) -> None:
    visits = random_visits(seed, count=60, depth=6, branching=3)
    depths = lru_depths(visits)

    for capacity in range(1, visits.num_pages + 1, 7):
        hits = int((depths <= capacity).sum())
        assert hits == lru_by_hand(visits, capacity)
        assert hits * PAGE <= min_hits(visits, capacity)


def test_pages_are_named_by_all_tokens_up_to_their_end() -> None:
    made = runs.strangers([0, 1], [9, 9], [1, 1])
    twice = [*made.requests, made.requests[0]]

    visits = visits_of(twice, PAGE)

    assert visits.num_pages == 4
    assert visits.visits[2].chain.tolist() == visits.visits[0].chain.tolist()
    assert infinite(visits) == 2 * PAGE


def test_a_prompt_is_never_hit_to_its_last_token() -> None:
    made = runs.strangers([0], [2 * PAGE], [1])

    visits = visits_of([made.requests[0]] * 2, PAGE)

    assert infinite(visits) == PAGE
