"""Random requests on real memory: logits are those of a cold start, bit for bit, or it shows."""

from collections import Counter
from collections.abc import Callable

import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.cache.tiers.transfer import Move
from hicache.executor.real.model_runner import ModelRunner
from tests.executor.mixes import run_mix

PART = 10  # mixes a test
NUM_MIXES = 20
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


def unequal(first: int, end: int, device: str = "cpu") -> dict[int, str]:
    verdicts = {seed: run_mix(seed, device=device).verdict for seed in range(first, end)}
    assert all(verdict.num_checked for verdict in verdicts.values())
    return {
        seed: str(verdict)
        for seed, verdict in verdicts.items()
        if verdict.num_equal != verdict.num_checked
    }


@pytest.mark.parametrize("first", range(0, NUM_MIXES, PART))
def test_logits_equal_a_cold_start(first):
    assert unequal(first, first + PART) == {}


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_MIXES, 5_000, 80))
def test_logits_equal_a_cold_start_in_many_mixes(first):
    assert unequal(first, first + 80) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 100, PART))
def test_logits_equal_a_cold_start_on_a_gpu(first):
    assert unequal(first, first + PART, device="cuda") == {}


def test_the_mixes_meet_every_event():
    seen: Counter[str] = Counter()
    for seed in range(300):
        mix = run_mix(seed, computes=False)
        seen += mix.seen + Counter({name: mix.counters[name] for name in COUNTED})
        if all(seen[name] for name in (*EVENTS, *COUNTED)):
            return
    assert [name for name in (*EVENTS, *COUNTED) if not seen[name]] == []


@pytest.mark.parametrize("seed", [62, 184])
def test_a_request_that_its_own_hit_leaves_no_room_runs_without_it(seed):
    mix = run_mix(seed)
    assert mix.counters["scheduler/hit_given_up_count"] > 0
    assert mix.seen["rejected"] == 0
    assert mix.verdict.num_equal == mix.verdict.num_checked


# -- faults, each of which must show -------------------------------------------------------------


def one_wrong_page_loaded(runner: ModelRunner) -> None:
    load = runner.pools.load

    def wrong(move):
        if move.kind != FULL:
            return move
        first = (move.sources[0] + 1) % len(runner.pools.ranks[0].host[FULL])
        return move._replace(sources=[first, *move.sources[1:]])

    runner.pools.load = lambda arrivals: load(
        [each._replace(moves=list(map(wrong, each.moves))) for each in arrivals]
    )


def one_wrong_page_saved(runner: ModelRunner) -> None:
    save = runner.pools.save

    def spoiled(moves):
        save([Move(k, s[::-1].copy() if k == FULL else s, t) for k, s, t, _ in moves])

    runner.pools.save = spoiled


def one_rank_left_out(runner: ModelRunner) -> None:
    load, ranks = runner.pools.load, runner.pools.ranks

    def spoiled(arrivals):
        runner.pools.ranks = ranks[:-1] if len(ranks) > 1 else ranks
        load(arrivals)
        runner.pools.ranks = ranks
        if len(ranks) > 1:
            runner.pools.landed[:, 1] += len(arrivals)

    runner.pools.load = spoiled


def window_one_page_short(runner: ModelRunner) -> None:
    load = runner.pools.load

    def short(move):
        if move.kind != SWA:
            return move
        return move._replace(sources=move.sources[1:], targets=move.targets[1:])

    runner.pools.load = lambda arrivals: load(
        [each._replace(moves=list(map(short, each.moves))) for each in arrivals]
    )


def stale_checkpoint(runner: ModelRunner) -> None:
    copy = runner.pools.copy_states
    number = 0

    def spoiled(sources, targets):
        nonlocal number
        number += 1
        if number % 2:
            copy(sources, targets)

    runner.pools.copy_states = spoiled


def state_not_copied_to_a_request(runner: ModelRunner) -> None:
    load = runner.pools.load

    def spoiled(arrivals):
        load([each if not each.is_within else each._replace(moves=[]) for each in arrivals])

    runner.pools.load = spoiled


def taps_off_by_one(runner: ModelRunner) -> None:
    copy = runner.pools.copy_states

    def spoiled(sources, targets):
        copy(sources, targets)
        for rank in runner.pools.ranks:
            for taps in rank.taps:
                for target in targets:
                    taps[target] = taps[target].roll(1, dims=1)

    runner.pools.copy_states = spoiled


def layers_do_not_wait(runner: ModelRunner) -> None:
    runner._ready = lambda layer: None


def fences_are_forgotten(runner: ModelRunner) -> None:
    submit = runner.submit

    def spoiled(work):
        submit(work)
        runner._fences.clear()

    runner.submit = spoiled


FAULTS = {
    one_wrong_page_loaded: 120,
    one_wrong_page_saved: 120,
    one_rank_left_out: 120,
    window_one_page_short: 120,
    stale_checkpoint: 40,
    state_not_copied_to_a_request: 40,
    taps_off_by_one: 40,
    layers_do_not_wait: 120,
    fences_are_forgotten: 200,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_shows(fault: Callable[[ModelRunner], None]):
    for seed in _affected(fault, FAULTS[fault]):
        verdict = run_mix(seed, fault=fault).verdict
        if verdict.num_equal < verdict.num_checked:
            return
    pytest.fail(f"{fault.__name__} changed no logit")


def _affected(fault: Callable[[ModelRunner], None], num_seeds: int):
    """Mixes in which what the fault spoils happens at all: found without computing."""
    wanted = {
        one_wrong_page_loaded: "host hit",
        one_wrong_page_saved: "host hit",
        one_rank_left_out: "host hit",
        window_one_page_short: "load back of a window alone",
        layers_do_not_wait: "LoadBack",
        fences_are_forgotten: "fence",
    }.get(fault, "CopyState")
    return (seed for seed in range(num_seeds) if run_mix(seed, computes=False).seen[wanted])
