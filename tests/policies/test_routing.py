"""Which engine a router chooses."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.lookup import usable_len
from hicache.cache.tree.node import DEVICE
from hicache.engine.loop import Engine
from hicache.policies.routing import (
    ROUTERS,
    Approximate,
    PrefixLoad,
    Replica,
    RoundRobin,
    Scored,
    Sticky,
    router_named,
)
from tests.cache.small import evict_all
from tests.scheduler.world import World, plot_of, request_of

Router = Any
OTHER = range(900, 999)  # a prompt without a common prefix


def engines_that_served(*prompts: Sequence[int]) -> list[Engine]:
    """An engine for each prompt, which it has answered."""
    worlds = [World(plot_of("full")) for _ in prompts]
    for world, prompt in zip(worlds, prompts, strict=True):
        world.serve([request_of(0, prompt, [1, 2, 3])])
    return [world.engine for world in worlds]


def choice(
    router: Router, engines: Sequence[Engine], prompt: Sequence[int], number: int = 9
) -> int:
    """The engine that a router chooses for a request with this prompt."""
    return router.route(request_of(number, prompt, [1]), replicas_of(engines))


def replicas_of(engines: Sequence[Engine]) -> list[Replica]:
    return [Replica(each.scheduler, each.num_requests) for each in engines]


def load(engine: Engine, count: int) -> None:
    """Submit `count` requests to an engine; they stay queued."""
    for number in range(count):
        engine.scheduler.submit(request_of(100 + number, [number] * 20, [1]), 0)


PAGE = plot_of("full").page_size


@pytest.mark.parametrize(
    ("served", "queued", "prompt", "chosen"),
    [
        ((range(64), range(128), OTHER), (0, 0, 0), range(140), 1),  # the longest prefix
        ((range(64),) * 3, (2, 1, 3), range(700, 800), 1),  # none: the least load
        ((range(64),) * 2, (0, 0), range(64), 0),  # equal: the first
        ((OTHER, range(64)), (0, 8), range(64), 1),  # a prefix is worth eight requests
        ((OTHER, range(64)), (0, 9), range(64), 0),
        # the last token of a prompt must be computed: its page counts for nothing
        ((range(3 * PAGE), range(4 * PAGE)), (0, 0), range(4 * PAGE), 0),
        ((range(3 * PAGE), range(4 * PAGE)), (0, 0), range(4 * PAGE + 1), 1),
    ],
)
def test_prefix_load_chooses_the_longest_prefix_unless_that_engine_has_much_more_load(
    served, queued, prompt, chosen
):
    engines = engines_that_served(*served)
    for engine, count in zip(engines, queued, strict=True):
        load(engine, count)
    assert choice(PrefixLoad(), engines, prompt) == chosen


def test_an_engine_with_a_role_counts_the_requests_whose_kv_it_sends_or_receives():
    scheduler: Any = SimpleNamespace(started=[1, 2], cache=None)
    replicas = [Replica(scheduler, lambda: 0, role=role) for role in ("both", "prefill", "decode")]
    assert [each.num_transfers for each in replicas] == [0, 2, 2]


def test_prefix_load_spreads_requests_that_arrive_together():
    engines = engines_that_served(OTHER, OTHER)
    chosen = []
    for number in range(4):
        prompt = range(number * 50, number * 50 + 40)
        chosen.append(choice(PrefixLoad(), engines, prompt, number))
        engines[chosen[-1]].submit(request_of(number, prompt, [1]), 0)
    assert chosen == [0, 1, 0, 1]


def test_in_a_score_a_queued_request_outweighs_a_match_on_both_tiers():
    engines = engines_that_served(OTHER, range(64))
    assert choice(Scored(), engines, range(64)) == 1
    load(engines[1], 1)
    assert choice(Scored(), engines, range(64)) == 0


def test_a_match_on_the_device_scores_above_one_on_the_host():
    engines = engines_that_served(range(64), range(64))
    evict_all(engines[0].cache, DEVICE, FULL)
    tree = engines[0].cache.tree
    tokens = tree.names.tokens(request_of(9, range(64), [1]))
    assert usable_len(tree, tokens, 63, on_device=True) == 0
    assert usable_len(tree, tokens, 63) > 0
    assert choice(Scored(), engines, range(64)) == 1


def test_scored_counts_a_match_on_the_host_and_scored_device_does_not():
    engines = engines_that_served(range(900, 964), range(64))
    evict_all(engines[1].cache, DEVICE, FULL)
    assert [
        choice(router, engines, range(64)) for router in (Scored(), ROUTERS["scored_device"]())
    ] == [1, 0]


def test_the_score_of_an_engine_falls_with_the_memory_that_requests_hold():
    engines = engines_that_served(OTHER, OTHER)
    pages = engines[0].cache.device_pages
    engines[0].cache.device.allocate(FULL, 10)
    assert [each.free_share for each in replicas_of(engines)] == [1 - 10 / pages, 1]
    assert choice(Scored(), engines, range(64)) == 1


@pytest.mark.parametrize(
    ("make", "numbers", "chosen"),
    [
        (Scored, [9] * 5, [0, 1, 2, 0, 1]),  # equal scores
        (RoundRobin, [9] * 5, [0, 1, 2, 0, 1]),
        (Sticky, [5, 3, 8, 4, 8, 3, 5], [0, 1, 2, 0, 2, 1, 0]),  # by session
    ],
)
def test_routers_take_turns_between_equal_engines_or_by_session(make, numbers, chosen):
    router, engines = make(), engines_that_served(range(9), range(9), range(9))
    assert [choice(router, engines, range(700, 740), number) for number in numbers] == chosen


@pytest.mark.parametrize(("slack", "chosen"), [(8, 0), (16, 1)])
def test_the_slack_of_prefix_load_is_a_setting(slack, chosen):
    engines = engines_that_served(OTHER, range(64))
    load(engines[1], 9)
    assert choice(router_named("prefix_load", {"slack": slack}), engines, range(64)) == chosen


def test_the_weights_of_a_score_are_settings():
    engines = engines_that_served(OTHER, range(64))
    load(engines[1], 1)
    heavy = router_named("scored", {"device": 3.0})
    assert [choice(router, engines, range(64)) for router in (Scored(), heavy)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "known"), [("sticky", "none"), ("prefix_load", "slack"), ("scored", "queue, memory")]
)
def test_an_argument_that_a_router_does_not_take_is_refused(name, known):
    with pytest.raises(ValueError, match=f"{name} takes {known}.*got patience"):
        router_named(name, {"patience": 1.0})


def test_approximate_matches_prompts_that_it_sent_and_not_what_engines_hold():
    engines = engines_that_served(OTHER, range(64))  # without the router
    router = Approximate(block_tokens=4)
    chosen = [choice(router, engines, prompt) for prompt in (range(64), range(80))]
    assert chosen == [0, 0]
    evict_all(engines[0].cache, DEVICE, FULL)
    assert choice(router, engines, range(80)) == 0


@pytest.mark.parametrize(
    ("sizes", "chosen"), [({}, 0), ({"blocks": 8}, 1), ({"most_blocks": 0}, 1)]
)
def test_the_index_of_approximate_is_capped(sizes, chosen):
    engines = engines_that_served(OTHER, OTHER)
    router = Approximate(block_tokens=4, device=0, **sizes)
    router.route(request_of(9, range(40), [1]), replicas := replicas_of(engines))
    # in turn to engine 1, then to 0, whose index of 8 blocks has lost the first prompt
    router.route(request_of(10, range(100, 140), [1]), replicas)
    router.route(request_of(11, range(200, 240), [1]), replicas)
    assert router.route(request_of(12, range(40), [1]), replicas) == chosen


def test_the_keys_of_a_prompt_are_those_of_the_pages_that_hold_it() -> None:
    prompt = range(3 * PAGE)
    (engine,) = engines_that_served(prompt)
    (replica,) = replicas_of([engine])
    keys = replica.keys(request_of(9, [*prompt, 5, 6], [1]))
    (node,) = engine.cache.tree.root("").children.values()
    names = engine.cache.tree.names
    assert keys == tuple(names.contents(names.of_node(node)))
    assert len(keys) == 3
