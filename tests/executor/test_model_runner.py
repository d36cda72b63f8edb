"""Random requests on real memory: logits equal those of a cold start bit for bit."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import CopyState, LoadBack, Move
from hicache.executor.real.model_runner import merged
from tests.executor.mixes import run_mix

NUM_MIXES = 4
EVENTS = (
    "finished",
    "device hit",
    "host hit",
    "storage hit",
    "LoadBack",
    "load back of a window alone",
    "load back of a state alone",
    "CopyState",
    "BackUp",
    "fence",
    "StorageWrite",
    "retracted",
    "aborted while waiting",
    "aborted while running",
)
COUNTED = (
    "prefetch/cut_count",
    "prefetch/terminated_count",
    "prefetch/used_pages",
    "scheduler/hit_given_up_count",
)


@cache
def events_of(seed):
    """What is seen in the mix and counted; nothing is computed."""
    mix = run_mix(seed, computes=False)
    return mix.seen + Counter({name: mix.counters[name] for name in COUNTED})


def assert_equal_logits(seeds, device="cpu", **options):
    verdicts = {seed: run_mix(seed, device=device, **options).verdict for seed in seeds}
    assert all(verdict.num_checked for verdict in verdicts.values())
    wrong = {s: str(v) for s, v in verdicts.items() if v.num_equal != v.num_checked}
    assert wrong == {}


@pytest.mark.parametrize(
    "seeds",
    [
        range(NUM_MIXES),
        *(
            pytest.param(range(first, first + 80), marks=pytest.mark.soak)
            for first in range(NUM_MIXES, 5_000, 80)
        ),
    ],
    ids=str,
)
def test_logits_equal_those_of_a_cold_start(seeds):
    assert_equal_logits(seeds)


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 400), marks=pytest.mark.soak)], ids=str
)
def test_pipeline_stages_with_their_own_memory_give_the_same_logits(seeds):
    assert_equal_logits(seeds, num_stages=2)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_logits_equal_those_of_a_cold_start_on_a_gpu(first):
    assert_equal_logits(range(first, first + 10), device="cuda")


def test_random_runs_cover_every_listed_event():
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += events_of(seed)
        if all(seen[name] for name in (*EVENTS, *COUNTED)):
            return
    assert [name for name in (*EVENTS, *COUNTED) if not seen[name]] == []


def test_a_request_whose_own_hit_leaves_no_room_runs_without_it():
    mix = run_mix(62)
    assert mix.counters["scheduler/hit_given_up_count"] > 0
    assert mix.seen["rejected"] == 0
    assert mix.verdict.num_equal == mix.verdict.num_checked


# each changes a data runner so that logits are wrong


def other_moves(runner, change):
    """Make load-backs use the moves that `change` returns for each arrival."""
    load = runner.pools.load
    runner.pools.load = lambda arrivals: load(
        [each._replace(moves=change(each)) for each in arrivals]
    )


def wrong_page_loaded(runner):
    def wrong(move):
        if move.kind != FULL:
            return move
        first = (move.sources[0] + 1) % len(runner.pools.ranks[0].host[FULL])
        return move._replace(sources=[first, *move.sources[1:]])

    other_moves(runner, lambda each: list(map(wrong, each.moves)))


def window_one_page_short(runner):
    def short(move):
        if move.kind != SWA:
            return move
        return move._replace(sources=move.sources[1:], targets=move.targets[1:])

    other_moves(runner, lambda each: list(map(short, each.moves)))


def state_not_copied_to_a_request(runner):
    other_moves(runner, lambda each: [] if each.is_within else each.moves)


def stale_checkpoint(runner):
    copy, calls = runner.pools.copy_states, []

    def spoiled(sources, targets):
        calls.append(1)
        if len(calls) % 2:
            copy(sources, targets)

    runner.pools.copy_states = spoiled


def layers_do_not_wait(runner):
    runner._ready = lambda layer: None


def fences_are_forgotten(runner):
    submit = runner.submit

    def spoiled(work):
        submit(work)
        runner._fences.clear()

    runner.submit = spoiled


FAULTS = {  # the event that the fault spoils
    wrong_page_loaded: "host hit",
    window_one_page_short: "load back of a window alone",
    stale_checkpoint: "CopyState",
    state_not_copied_to_a_request: "CopyState",
    layers_do_not_wait: "LoadBack",
    fences_are_forgotten: "fence",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_data_runner_changes_logits(fault):
    for seed in range(200):
        if events_of(seed)[FAULTS[fault]]:
            verdict = run_mix(seed, fault=fault).verdict
            if verdict.num_equal < verdict.num_checked:
                return
    pytest.fail(f"{fault.__name__} changed no logit")


def ids(*values):
    return np.array(values, np.int32)


def load_back(*moves):
    return LoadBack(
        moves=[Move(kind, ids(*s), ids(*t)) for kind, s, t in moves],
        num_bytes=0,
        node=None,
    )


def copy_state(source, target):
    return CopyState(source=ids(source), target=ids(target))


@pytest.mark.parametrize(
    ("pending", "wanted"),
    [
        ([], []),
        (
            [load_back((FULL, [1], [2]), (SWA, [3], [4])), load_back((FULL, [5, 6], [7, 8]))],
            [(False, FULL, [1, 5, 6], [2, 7, 8]), (False, SWA, [3], [4])],
        ),
        # one slot for two requests
        ([copy_state(1, 2), copy_state(1, 3)], [(True, MAMBA, [1, 1], [2, 3])]),
        # what was just written is read: not together
        ([copy_state(1, 2), copy_state(2, 3)], [(True, MAMBA, [1], [2]), (True, MAMBA, [2], [3])]),
        ([copy_state(1, 2), copy_state(3, 1)], [(True, MAMBA, [1], [2]), (True, MAMBA, [3], [1])]),
        # one page for two, one after another
        (
            [load_back((FULL, [1], [2])), load_back((FULL, [3], [2]))],
            [(False, FULL, [1], [2]), (False, FULL, [3], [2])],
        ),
        # a state is loaded, given to a request, and its slot is loaded anew
        (
            [load_back((MAMBA, [1], [2])), copy_state(2, 3), load_back((MAMBA, [4], [2]))],
            [(False, MAMBA, [1], [2]), (True, MAMBA, [2], [3]), (False, MAMBA, [4], [2])],
        ),
    ],
)
def test_copies_into_the_device_are_merged_by_kind_and_never_out_of_order(pending, wanted):
    got = [
        (is_within, move.kind, move.sources, move.targets)
        for is_within, moves in merged(pending)
        for move in moves
    ]
    assert got == wanted
