"""When a request marks its cached prefix as just used."""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE
from hicache.config import Refresh
from hicache.runs.schema import config_of
from tests.scheduler.world import SCHEDULER, World, plot_of, request_of

OLD, NEW, BUSY = range(16), range(100, 116), range(200, 216)


def world_of(refresh: Refresh, *, has_storage: bool, max_running: int = 2) -> World:
    """Two cached prompts, the older one first; a third one runs."""
    config = replace(SCHEDULER, refresh=refresh, max_running=max_running)
    world = World(plot_of("full", scheduler=config, has_storage=has_storage))
    world.serve([request_of(number, tokens, [1]) for number, tokens in enumerate((OLD, NEW))])
    world.scheduler.submit(request_of(2, BUSY, [1] * 40), 0)
    batch = world.scheduler.plan(0)
    assert batch is not None
    world.scheduler.commit(batch, 1, 0)
    return world


def first_token_of_victim(world: World) -> int:
    found = world.cache.tree.victim(DEVICE, FULL, 1)
    assert found is not None
    return int.from_bytes(found[0].edge[:4], "little")


@pytest.mark.parametrize("has_storage", [False, True])
@pytest.mark.parametrize("refresh", Refresh)
def test_a_request_that_arrives_protects_its_hit_only_where_sglang_reads_storage(
    refresh: Refresh, *, has_storage: bool
) -> None:
    world = world_of(refresh, has_storage=has_storage)
    world.scheduler.submit(request_of(3, [*OLD, *range(300, 320)], [1]), 0)
    is_protected = has_storage and refresh is Refresh.arrived
    assert first_token_of_victim(world) == (NEW if is_protected else OLD)[0]


@pytest.mark.parametrize(
    ("refresh", "is_protected"),
    [(Refresh.admitted, False), (Refresh.considered, True), (Refresh.arrived, True)],
)
def test_a_deferred_request_protects_its_hit_unless_only_admission_counts(
    refresh: Refresh, *, is_protected: bool
) -> None:
    world = world_of(refresh, has_storage=False)
    # it fits in the pool of 320 tokens alone, and not beside the request that runs
    world.scheduler.submit(request_of(3, [*OLD, *range(300, 570)], [1]), 0)
    world.scheduler.plan(0)
    assert world.counters["scheduler/deferred_tokens_count"] == 1
    assert first_token_of_victim(world) == (NEW if is_protected else OLD)[0]


@pytest.mark.parametrize("refresh", Refresh)
def test_an_admitted_request_marks_its_hit_as_used(refresh: Refresh) -> None:
    world = world_of(refresh, has_storage=False)
    world.scheduler.submit(request_of(3, [*OLD, *range(300, 400)], [1]), 0)
    world.scheduler.plan(0)
    assert world.scheduler.abort(3, 0) is not None  # releases the lock, and publishes nothing
    assert first_token_of_victim(world) == NEW[0]


def test_each_preset_has_the_rule_of_its_engine() -> None:
    rules = {
        name: config_of(f"compat={name}").scheduler.refresh
        for name in ("vllm_0_33", "sglang_0_5_23", "reports", "hicache")
    }
    assert rules == {
        "vllm_0_33": Refresh.admitted,
        "sglang_0_5_23": Refresh.arrived,
        "reports": Refresh.considered,
        "hicache": Refresh.considered,
    }
