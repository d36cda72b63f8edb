"""Where states are kept, and which slots they are captured into."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import SWA, Kinds
from hicache.config import CacheConfig, QuirksConfig
from hicache.policies.policy import presets
from hicache.scheduler.checkpoints import CheckpointSaver
from tests.cache.small import named_kinds, world_of
from tests.scheduler.world import World, plot_of, request_of

PAGE = 16
GRID = 64
STATES = named_kinds(PAGE, has_states=True)


@pytest.mark.parametrize(
    ("name", "start", "branch", "wanted"),
    [
        ("end", 0, None, {240}),
        ("end", 0, 100, {240}),
        ("end_branch", 0, None, {240}),
        ("end_branch", 0, 100, {100, 240}),
        ("branch_or_end", 0, None, {240}),
        ("branch_or_end", 0, 100, {100}),
        ("every", 0, None, {64, 128, 192, 240}),
        ("every", 63, None, {64, 128, 192, 240}),
        ("every", 64, None, {128, 192, 240}),  # the state at 64 is there
        ("every", 70, 100, {100, 128, 192, 240}),
    ],
)
def test_a_placement_keeps_states_at_these_lengths(
    name: str, start: int, branch: int | None, wanted: set[int]
) -> None:
    config = CacheConfig(checkpoints=name, checkpoint_tokens=GRID, page_size=PAGE)
    policy = presets(world_of(STATES, cache=config))
    assert set(policy.checkpoints("mamba", start, 240, branch)) == wanted


class Asked:
    """A placement that wants what it is told, and remembers what it was asked."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.asked: tuple[int, int, int | None] | None = None

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        self.asked = start, end, branch
        return list(self._lengths)


def checkpoints(
    placement: Asked,
    *,
    slots: int = 9,
    kinds: Kinds = STATES,
) -> CheckpointSaver:
    free = list(range(slots))
    cache: Any = SimpleNamespace(
        page_size=PAGE,
        tree=SimpleNamespace(kinds=kinds, policy=placement),
        counters=Counter(),
        take_state_slot=lambda _: [free.pop(0)] if free else None,
    )
    return CheckpointSaver(cache)


def req(kv_len: int = 0, target_len: int = 250, boundary: int | None = 77) -> Any:
    slot = None if boundary is None else np.array([boundary], np.int32)
    return SimpleNamespace(
        kv_len=kv_len,
        target_len=target_len,
        saves=[32, 100 // PAGE * PAGE, 240],
        sequence=SimpleNamespace(boundary_slot=slot),
    )


def test_lengths_are_whole_pages_ascending_once_and_only_where_it_computes() -> None:
    placement = Asked(240, 100, 98, 32, 47, 48, 31, 256)
    match: Any = SimpleNamespace(branch_len=98)
    asked = req(kv_len=32)
    checkpoints(placement).place(asked, match)
    assert asked.saves == asked.boundaries == [48, 96, 240]
    assert placement.asked == (32, 240, 98)


def test_without_states_there_are_none() -> None:
    match: Any = SimpleNamespace(branch_len=None)
    asked = req()
    checkpoints(Asked(240), kinds=named_kinds(PAGE)).place(asked, match)
    assert (asked.saves, asked.boundaries) == ([], [250])


@pytest.mark.parametrize(
    ("windows", "wanted"),
    [(Asked(96), [96]), (Asked(240, 96), [96, 250]), (Asked(16), [250])],
    ids=["at a branch", "at both", "where nothing is computed"],
)
def test_a_prompt_is_published_up_to_each_of_its_windows(windows: Asked, wanted: list[int]) -> None:
    match: Any = SimpleNamespace(branch_len=98)
    asked = req(kv_len=32)
    checkpoints(windows, kinds=named_kinds(PAGE, window_len=8)).place(asked, match)
    assert asked.boundaries == wanted


@pytest.mark.parametrize(("trims", "on_device"), [(False, 7), (True, 2)])
def test_the_host_has_one_window_of_a_prompt_and_the_device_its_last_chunk(
    on_device: int, *, trims: bool
) -> None:
    quirks = QuirksConfig(trims_windows=trims)
    world = World(plot_of("full_swa", window_len=16, has_storage=False, quirks=quirks))
    world.serve([request_of(0, range(100), [7])])  # 64 + 36 tokens, in pages of 8
    device, host = world.cache.tree.residency.resident
    assert (device[SWA], host[SWA]) == (on_device, 2)


def slots_of(saves: list[tuple[int, Any]]) -> list[tuple[int, int]]:
    return [(length, int(slot[0])) for length, slot in saves]


def test_a_step_captures_the_states_of_its_own_tokens() -> None:
    kept = checkpoints(Asked())
    assert slots_of(kept.slots(req(), 95)) == [(32, 0)]
    assert slots_of(kept.slots(req(kv_len=32), 96)) == [(96, 1)]  # that at 32 is captured


def test_the_state_at_the_end_takes_the_slot_that_the_request_runs_on() -> None:
    asked = req(kv_len=96)
    assert slots_of(checkpoints(Asked()).slots(asked, 250)) == [(240, 77)]
    assert asked.sequence.boundary_slot is None


def test_a_state_without_a_slot_is_left_out_and_counted() -> None:
    kept = checkpoints(Asked(), slots=1)
    assert slots_of(kept.slots(req(boundary=None), 250)) == [(32, 0)]
    assert kept._cache.counters["scheduler/missed_checkpoint_count"] == 2


@pytest.mark.parametrize(
    ("placement", "cached"),
    [
        ("end", [0, 0, 0]),
        ("end_branch", [0, 0, 64]),
        ("branch_or_end", [0, 0, 64]),
        ("every", [0, 64, 64]),
    ],
)
def test_a_prompt_that_leaves_another_goes_on_from_the_nearest_state(
    placement: str, cached: list[int]
) -> None:
    world = World(plot_of("full_mamba", has_storage=False, checkpoints=placement))
    prompts = [[*range(70), *range(1000 * n, 1000 * n + 40)] for n in (1, 2, 3)]
    for number, prompt in enumerate(prompts):
        world.serve([request_of(number, prompt, [9, 9])])
    assert [req.cached_len for req, _ in world.finished] == cached
