"""When an engine looks, and what several ranks of it agree on, in small worlds."""

import pytest

from hicache.cache.kinds import FULL, KEY_TAGS, SWA
from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.node import DEVICE
from hicache.config import PrefetchConfig, StorageConfig
from hicache.engine.warm import warm_storage
from hicache.executor.simulated.stores import StandIns
from hicache.request import Request
from tests.scheduler.world import STEP_NS, World, plot_of, request_of


def stranger(number: int, prompt_len: int = 20, answer: int = 60, arrival_ns: int = 0) -> Request:
    first = 1000 * number
    return request_of(number, range(first, first + prompt_len), [number] * answer, arrival_ns)


@pytest.mark.parametrize("kind", ["full", "all"])
def test_whoever_comes_during_a_run_of_steps_is_looked_at_when_the_step_at_hand_ends(
    kind: str,
) -> None:
    world = World(plot_of(kind, has_storage=False))
    came_ns = 20 * STEP_NS + STEP_NS // 2
    world.serve([stranger(0), stranger(1, answer=2, arrival_ns=came_ns)])
    (second,) = (req for req, _ in world.finished if req.request.id == 1)
    assert second.admitted_ns is not None
    assert came_ns < second.admitted_ns <= came_ns + STEP_NS
    assert second.submitted_ns == came_ns


def test_what_a_step_extends_is_known_while_it_runs_and_not_after_it() -> None:
    world = World(plot_of("full", has_storage=False))
    seen = []
    world.hooks.append(
        lambda now_ns: seen.append([(each.start, each.end) for each in world.engine.extending])
    )
    world.serve([stranger(0, prompt_len=30, answer=2)])
    assert [(0, 30)] in seen
    assert world.engine.extending == []


# -- ranks ---------------------------------------------------------------------------------------

STORED = StorageConfig(kind="memory", read_gbps=1.0, write_gbps=1.0, batch_pages=2, query_s=1e-4)
WAITING = PrefetchConfig(threshold=16, occupied_share=1.0, stop="wait_complete")


def ranked(num_lost: int, num_ranks: int = 2) -> World:
    """Ranks that serve a prompt of 15 pages whose storages hold it; the last one's lost some."""
    world = World(plot_of("full", storage=STORED, prefetch=WAITING, num_ranks=num_ranks))
    request = stranger(0, prompt_len=120, answer=2)
    for storage in world.storages:
        warm_storage(StandIns(storage), [request], world.cache.tree)
    digests = page_digests(chain_seed(""), request.prompt.to_bytes(), 8 * 4)[:14]
    lost = digests[len(digests) - num_lost :]
    world.storages[-1].delete([digest + KEY_TAGS[FULL : FULL + 1] for digest in lost])
    world.serve([request])
    return world


def test_windows_are_given_back_while_an_answer_grows() -> None:
    world = World(plot_of("full_swa", has_storage=False, may_jump=False))
    taken = []
    world.hooks.append(lambda now_ns: taken.append(world.cache.pools[DEVICE][SWA].num_taken))
    world.serve([stranger(0, prompt_len=20, answer=120)])
    # its window of 20 tokens and what lies before it as published with the prompt; not 18 pages
    assert max(taken) <= 3 + 3 + 2


@pytest.mark.parametrize("num_lost", [0, 1, 4, 14])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_go_on_with_what_all_of_their_storages_hold(num_ranks: int, num_lost: int) -> None:
    world = ranked(num_lost, num_ranks)
    counters = world.counters
    assert counters["agreement/unequal_hits_count"] == (num_lost > 0)
    assert counters["agreement/given_up_pages"] == num_lost
    assert counters["agreement/query_collectives_count"] == 1
    assert counters["agreement/illegal_lengths_count"] == 0
    ((req, _),) = world.finished
    assert req.storage_len == 8 * (14 - num_lost)
    assert req.computed_len == 120 - req.storage_len


def test_a_page_that_goes_missing_between_question_and_read_is_read_by_nobody() -> None:
    world = World(plot_of("full", storage=STORED, prefetch=WAITING, num_ranks=2))
    request = stranger(0, prompt_len=120, answer=2)
    for storage in world.storages:
        warm_storage(StandIns(storage), [request], world.cache.tree)
    key = (
        page_digests(chain_seed(""), request.prompt.to_bytes(), 8 * 4)[9]
        + KEY_TAGS[FULL : FULL + 1]
    )

    def lose(now_ns: int) -> None:
        prefetch = world.prefetcher and world.prefetcher.active.get(0)
        if prefetch and prefetch.is_reading:
            world.storages[-1].delete([key])

    world.hooks.append(lose)
    world.serve([request])
    ((req, _),) = world.finished
    assert req.storage_len == 8 * 9
    assert world.counters["agreement/unequal_reads_count"] > 0


def test_every_step_of_ranks_has_its_collective() -> None:
    world = ranked(0)
    assert world.counters["agreement/step_collectives_count"] >= world.engine.num_steps > 0
