"""Taking decode steps at once changes nothing: not what happens, nor what somebody sees who looks.

With one rank and with two, late storage, every stop policy and every order of eviction.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE
from hicache.config import (
    STOP_POLICIES,
    CommitPolicy,
    PrefetchConfig,
    QuirksConfig,
    SchedulerConfig,
    StageAt,
    StorageConfig,
)
from hicache.engine.warm import warm_storage
from hicache.executor.simulated.stores import StandIns
from hicache.request import Request
from tests.cache.small import RANKED
from tests.fuzz.policies import FirstQuarter
from tests.scheduler.world import KINDS, Plot, World, plot_of, random_requests

STOPS = (*STOP_POLICIES, FirstQuarter)


def late_plot(seed: int, ranks: int) -> Plot:
    """Full pools, and storage that is late at random; all of it drawn from the seed."""
    rng = Random(seed)
    stop = rng.choice(STOPS)
    return plot_of(
        rng.choice(sorted(KINDS)),
        num_ranks=ranks,
        policy=None if isinstance(stop, str) else stop(),
        eviction=rng.choice(RANKED),
        device=(rng.choice([28, 32]), 30, 16),
        host=(60, 50, 16),
        scheduler=SchedulerConfig(
            chunk_tokens=rng.choice([64, 256]),
            max_running=rng.choice([4, 16]),
            new_token_ratio=0.0,
            new_token_ratio_floor=0.0,
        ),
        prefetch=PrefetchConfig(
            threshold=16,
            occupied_share=1.0,
            stop=stop if isinstance(stop, str) else "timeout",
            timeout_base_s=rng.choice([0.01, 0.1]),
            timeout_per_ki_token_s=0,
            commit=rng.choice(list(CommitPolicy)),
            stage_at=rng.choice(list(StageAt)),
        ),
        quirks=QuirksConfig(await_sidecars=rng.random() < 0.5),
        storage=StorageConfig(
            kind="memory",
            read_gbps=rng.choice([0.1, 0.5]),
            write_gbps=0.5,
            batch_pages=rng.choice([1, 4]),
            delay_s=rng.choice([0, 0.01, 0.05]),
            sidecar_s=rng.choice([0, 0.03]),
            read_workers=rng.choice([1, 2]),
        ),
    )


def served(plot: Plot, seed: int, hook: Callable[[World, int], None] | None = None) -> World:
    """A world whose storage knew most of what it was asked for."""
    rng = Random(seed)
    world = World(plot, checks=False)
    hurry = rng.choice([1, 4])
    requests = [
        replace(each, arrival_ns=each.arrival_ns // hurry) for each in random_requests(seed)
    ]
    known = [each for each in requests if rng.random() < 0.7]
    for storage in world.storages:
        warm_storage(StandIns(storage), known, world.cache.tree)
    if hook is not None:
        world.hooks.append(lambda now_ns: hook(world, now_ns))
    world.serve(requests)
    return world


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.soak)], ids=str
)
def test_steps_taken_one_by_one_come_to_the_same(seeds: Sequence[int], ranks: int) -> None:
    num_hits = 0
    for seed in seeds:
        plot = late_plot(seed, ranks)
        jumping, stepping = (
            served(replace(plot, may_jump=may_jump), seed) for may_jump in (True, False)
        )
        assert jumping.outcome() == stepping.outcome(), f"seed {seed}"
        num_hits += jumping.counters["cache/storage_hit_tokens"]
    assert num_hits > 0


def glances(plot: Plot, seed: int, every_ns: int) -> tuple[list[object], World]:
    """What is seen at regular moments, which are not those at which anything happens."""
    seen: list[object] = []
    next_ns = every_ns

    def look(world: World, now_ns: int) -> None:
        nonlocal next_ns
        while next_ns <= now_ns:
            world.engine.catch_up(next_ns)
            for rank in world.ranks:
                running = [(req.request.id, req.decoded) for req in rank.scheduler.running]
                free = rank.cache.pools[DEVICE][FULL].num_free
                counters = sorted(item for item in rank.cache.counters.items() if item[1])
                seen.append((next_ns, rank.num_steps, running, free, counters))
            next_ns += every_ns

    return seen, served(plot, seed, look)


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_looks_sees_every_step_that_has_ended(ranks: int) -> None:
    for seed in range(4):
        plot = late_plot(seed, ranks)
        jumping, stepping = (
            glances(replace(plot, may_jump=may_jump), seed, 37_000_001)
            for may_jump in (True, False)
        )
        assert jumping[0] == stepping[0], f"seed {seed}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_sees_every_step_that_has_ended(ranks: int) -> None:
    seen = []
    for may_jump in (True, False):
        world = World(plot_of("full", num_ranks=ranks, may_jump=may_jump))
        running: list[list[tuple[int, int]]] = []

        def look(request: Request, world: World = world, seen: Any = running) -> int:
            seen.append([(req.request.id, req.decoded) for req in world.scheduler.running])
            return 0

        world.serve(random_requests(0), route=look)
        seen.append(running)
    assert seen[0] == seen[1]
    assert any(decoded > 1 for running in seen[0] for _, decoded in running)


@pytest.mark.parametrize("ranks", [1, 2])
def test_looking_changes_nothing(ranks: int) -> None:
    for seed in range(4):
        plot = late_plot(seed, ranks)
        _, watched = glances(plot, seed, 10_000_000)  # as long as a step: many moments are its end
        assert watched.outcome() == served(plot, seed).outcome(), f"seed {seed}"
