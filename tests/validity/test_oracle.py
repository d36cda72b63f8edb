"""The oracles against definitions too slow to be useful."""

from itertools import combinations

import numpy as np
import pytest

from hicache.workload.oracle import (
    CheckpointRule,
    Curve,
    Visit,
    Visits,
    infinite,
    lru_curve,
    min_hits,
    visits_of,
)
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
        visits.append(Visit(np.array(chain), reach, reach, (reach + 1) * PAGE))
    return Visits(visits=visits, num_pages=len(ids), page_size=PAGE)


def test_a_capacity_hits_what_the_curve_has_from_its_size_on() -> None:
    curve = Curve(capacity_bytes=np.array([10, 20]), hit_tokens=np.array([3, 6]), prompt_tokens=12)
    assert [curve.hit_rate(size) for size in (9, 10, 19, 20, 99)] == [0, 0.25, 0.25, 0.5, 0.5]


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


def lru_by_hand(
    visits: Visits, capacity: int, page_bytes: int, checkpoints: CheckpointRule | None
) -> int:
    """Tokens hit by a list in order of use, cut to what fits after every request."""
    order: list[tuple[int, bool]] = []  # (page, is a checkpoint), the last used at the end
    known: set[int] = set()
    marked: set[int] = set()
    hits = 0
    sizes = {False: page_bytes, True: checkpoints.num_bytes if checkpoints else 0}
    for visit in visits.visits:
        held: set[tuple[int, bool]] = set()
        room = capacity
        for item in reversed(order):
            room -= sizes[item[1]]
            if room < 0:
                break
            held.add(item)
        chain = visit.chain.tolist()
        usable = leading = 0
        for depth, page in enumerate(chain[: visit.reach], start=1):
            if (page, False) not in held:
                break
            if checkpoints is None or (page, True) in held:
                usable = depth
        for page in chain[: visit.reach]:
            if page not in known:
                break
            leading += 1
        hits += usable * PAGE
        places: set[int] = set()
        if checkpoints is not None:
            start = max((d for d in range(1, leading + 1) if chain[d - 1] in marked), default=0)
            places = {start, visit.prompt_pages, len(chain)}
            if checkpoints.branch and leading > start:
                places.add(leading)
        used = []
        for depth in range(len(chain), 0, -1):
            if depth in places:
                used.append((chain[depth - 1], True))
                marked.add(chain[depth - 1])
            used.append((chain[depth - 1], False))
        order = [item for item in order if item not in used] + used
        known |= set(chain)
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
def test_no_capacity_lets_lru_hit_more_than_min(seed: int) -> None:
    visits = random_visits(seed, count=60, depth=6, branching=3)
    curve = lru_curve(visits, page_bytes=1)

    for capacity in range(1, visits.num_pages, 7):
        assert curve.hit_rate(capacity) * visits.prompt_tokens <= min_hits(visits, capacity) + 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "checkpoints",
    [None, CheckpointRule(num_bytes=3), CheckpointRule(num_bytes=7, branch=True)],
    ids=["pages", "end", "end_branch"],
)
def test_one_pass_gives_what_lru_hits_at_every_capacity(
    seed: int, checkpoints: CheckpointRule | None
) -> None:
    visits = random_visits(seed, count=40, depth=6, branching=3)
    curve = lru_curve(visits, page_bytes=2, checkpoints=checkpoints)

    for capacity in (1, 2, 5, 10, 20, 50, 100, 10_000):
        by_hand = lru_by_hand(visits, capacity, 2, checkpoints)
        assert round(curve.hit_rate(capacity) * visits.prompt_tokens) == by_hand


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
