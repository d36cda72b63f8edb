"""Taking many decode steps at once gives the same results and the same intermediate states.

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
    StageAt,
    StorageConfig,
)
from hicache.request import Request
from tests.cache.small import RANKED
from tests.fuzz.policies import FirstQuarter
from tests.scheduler.world import EAGER, KINDS, Plot, World, plot_of, random_requests


def late_plot(seed: int, ranks: int) -> Plot:
    """Small pools, and storage that is late at random; all of it drawn from the seed."""
    rng = Random(seed)
    stop = rng.choice((*STOP_POLICIES, FirstQuarter))
    return plot_of(
        rng.choice(sorted(KINDS)),
        num_ranks=ranks,
        policy=None if isinstance(stop, str) else stop(),
        eviction=rng.choice(RANKED),
        device=(rng.choice([28, 32]), 30, 16),
        host=(60, 50, 16),
        scheduler=EAGER,
        chunk_tokens=rng.choice([64, 256]),
        max_running=rng.choice([4, 16]),
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
    """A world whose storage has most of the pages from the start."""
    rng = Random(seed)
    world = World(plot, checks=False)
    hurry = rng.choice([1, 4])
    requests = [
        replace(each, arrival_ns=each.arrival_ns // hurry) for each in random_requests(seed)
    ]
    world.warm([each for each in requests if rng.random() < 0.7])
    if hook is not None:
        world.hooks.append(lambda now_ns: hook(world, now_ns))
    world.serve(requests)
    return world


def glances(plot: Plot, seed: int, every_ns: int) -> tuple[list[object], World]:
    """The states seen at regular moments, most of which are no events."""
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
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.soak)], ids=str
)
def test_single_steps_and_observers_change_nothing(seeds: Sequence[int], ranks: int) -> None:
    num_hits = 0
    for seed in seeds:
        plot = late_plot(seed, ranks)
        jumping = served(plot, seed)
        seen, watched = glances(plot, seed, 10_000_000)  # as long as a step: often its end
        stepped, stepping = glances(replace(plot, may_jump=False), seed, 10_000_000)
        assert jumping.outcome() == watched.outcome() == stepping.outcome(), f"seed {seed}"
        assert seen == stepped, f"seed {seed}"
        num_hits += jumping.counters["cache/storage_hit_tokens"]
    assert num_hits > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_router_sees_every_step_that_has_ended(ranks: int) -> None:
    seen = []
    for may_jump in (True, False):
        world = World(plot_of("full", num_ranks=ranks, may_jump=may_jump))
        running: list[list[tuple[int, int]]] = []

        def look(request: Request, world: World = world, seen: Any = running) -> int:
            seen.append([(req.request.id, req.decoded) for req in world.scheduler.running])
            return 0

        world.serve(random_requests(0, 20), route=look)
        seen.append(running)
    assert seen[0] == seen[1]
    assert any(decoded > 1 for running in seen[0] for _, decoded in running)
