"""Who serves a request, and that asking who should changes nothing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.lookup import usable_len
from hicache.cache.tree.node import DEVICE
from hicache.engine.loop import Engine
from hicache.engine.ranks.agreement import traffic_digest, tree_digest
from hicache.policies.routing import (
    PrefixLoad,
    Replica,
    RoundRobin,
    Scored,
    ScoredDevice,
    Sticky,
)
from tests.cache.portrait import portrait
from tests.cache.small import evict_all
from tests.scheduler.world import KINDS, World, plot_of, request_of


def engines_that_served(*prompts: Sequence[int], kind: str = "full") -> list[Engine]:
    """An engine for each prompt, which it has answered."""
    worlds = [World(plot_of(kind)) for _ in prompts]
    for world, prompt in zip(worlds, prompts, strict=True):
        world.serve([request_of(0, prompt, [1, 2, 3])])
    return [world.engine for world in worlds]


def seen(engines: Sequence[Engine]) -> list[Replica]:
    return [Replica(each.scheduler, each.num_requests) for each in engines]


def load(engine: Engine, count: int) -> None:
    """Let an engine have so many requests waiting."""
    for number in range(count):
        engine.scheduler.submit(request_of(100 + number, [number] * 20, [1]), 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_asking_any_number_of_times_leaves_every_tree_as_it_was(kind: str) -> None:
    engines = engines_that_served(range(100), range(200), kind=kind)
    # ends inside an edge, leaves it there, is not there at all, and is of another namespace
    asked = [
        request_of(1, range(50), [1]),
        request_of(2, [*range(40), 7, 7, 7, 7, 7, 7, 7, 7], [1]),
        request_of(3, range(900, 990), [1]),
        replace(request_of(4, range(100), [1]), namespace="other"),
    ]
    before = [
        (portrait(each.cache.tree), tree_digest(each.cache.tree), traffic_digest(each.cache))
        for each in engines
    ]
    for router in (PrefixLoad(), Scored(), ScoredDevice()):
        for request in asked * 3:
            router.route(request, seen(engines))
    after = [
        (portrait(each.cache.tree), tree_digest(each.cache.tree), traffic_digest(each.cache))
        for each in engines
    ]
    assert after == before


def test_the_engine_that_holds_more_of_the_prompt_is_chosen() -> None:
    engines = engines_that_served(range(64), range(128), range(900, 999))
    assert PrefixLoad().route(request_of(9, range(140), [1]), seen(engines)) == 1


def test_a_prompt_that_nobody_holds_goes_to_the_least_busy_engine() -> None:
    engines = engines_that_served(range(64), range(64), range(64))
    load(engines[0], 2)
    load(engines[1], 1)
    load(engines[2], 3)
    assert PrefixLoad().route(request_of(9, range(700, 800), [1]), seen(engines)) == 1


def test_those_who_come_at_one_moment_are_spread() -> None:
    engines = engines_that_served(range(900, 999), range(900, 999))
    router, chosen = PrefixLoad(), []
    for number in range(4):
        request = request_of(number, range(number * 50, number * 50 + 40), [1])
        chosen.append(router.route(request, seen(engines)))
        engines[chosen[-1]].submit(request, 0)
    assert chosen == [0, 1, 0, 1]


def test_of_engines_that_are_alike_the_first_is_chosen() -> None:
    engines = engines_that_served(range(64), range(64))
    assert PrefixLoad().route(request_of(9, range(64), [1]), seen(engines)) == 0


@pytest.mark.parametrize(("busier_by", "chosen"), [(8, 1), (9, 0)])
def test_eight_more_requests_are_worth_a_match(busier_by: int, chosen: int) -> None:
    engines = engines_that_served(range(900, 999), range(64))
    load(engines[1], busier_by)
    assert PrefixLoad().route(request_of(9, range(64), [1]), seen(engines)) == chosen


def test_the_last_token_of_a_prompt_counts_for_nothing() -> None:
    # both hold three pages of four, and the fourth ends with the token that must be computed
    page = plot_of("full").page_size
    engines = engines_that_served(range(3 * page), range(4 * page))
    assert PrefixLoad().route(request_of(9, range(4 * page), [1]), seen(engines)) == 0
    assert PrefixLoad().route(request_of(9, range(4 * page + 1), [1]), seen(engines)) == 1


def test_a_score_weighs_the_queue_above_a_match_on_both_tiers() -> None:
    engines = engines_that_served(range(900, 999), range(64))
    request = request_of(9, range(64), [1])
    assert Scored().route(request, seen(engines)) == 1
    load(engines[1], 1)
    assert Scored().route(request, seen(engines)) == 0


def test_a_match_on_the_device_scores_above_one_on_the_host() -> None:
    engines = engines_that_served(range(64), range(64))
    evict_all(engines[0].cache, DEVICE, FULL)
    tree, tokens = engines[0].cache.tree, engines[0].cache.tree.names.tokens
    request = request_of(9, range(64), [1])
    assert usable_len(tree, tokens(request), 63, on_device=True) == 0
    assert usable_len(tree, tokens(request), 63) > 0
    assert Scored().route(request, seen(engines)) == 1


def test_only_one_of_the_scores_counts_what_the_host_holds() -> None:
    engines = engines_that_served(range(900, 964), range(64))
    evict_all(engines[1].cache, DEVICE, FULL)
    request = request_of(9, range(64), [1])
    assert Scored().route(request, seen(engines)) == 1
    assert ScoredDevice().route(request, seen(engines)) == 0


def test_a_score_weighs_the_memory_that_requests_hold() -> None:
    engines = engines_that_served(range(900, 999), range(900, 999))
    engines[0].cache.device.allocate(FULL, 10)
    assert Scored().route(request_of(9, range(64), [1]), seen(engines)) == 1


def test_engines_of_equal_score_take_turns() -> None:
    engines = engines_that_served(range(9), range(9), range(9))
    router, request = Scored(), request_of(9, range(700, 740), [1])
    assert [router.route(request, seen(engines)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_round_robin_takes_each_in_turn() -> None:
    engines = engines_that_served(range(9), range(9), range(9))
    router, request = RoundRobin(), request_of(9, range(9), [1])
    assert [router.route(request, seen(engines)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_session_stays_where_it_began_and_sessions_are_dealt_out_evenly() -> None:
    engines = engines_that_served(range(9), range(9))
    router = Sticky()
    sessions = [request_of(number, range(9), [1]) for number in (5, 3, 8)]
    assert [router.route(each, seen(engines)) for each in sessions] == [0, 1, 0]
    assert [router.route(each, seen(engines)) for each in reversed(sessions)] == [0, 1, 0]
