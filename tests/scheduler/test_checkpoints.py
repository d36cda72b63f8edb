"""Where states are kept, and which slots they are captured into."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import FULL, SWA, Kinds
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.config import CacheConfig, QuirksConfig
from hicache.policies.policy import presets
from hicache.scheduler.checkpoints import CheckpointSaver
from tests.cache.small import (
    complete_all,
    evict_all,
    make_cache,
    named_kinds,
    run_request,
    tokens_of,
    world_of,
)
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
        ("chunk_branch", 0, 100, {100, 240}),
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
    policy = presets(world_of(STATES, cache=config)).requests.placement
    assert set(policy.checkpoints("mamba", start, 240, branch)) == wanted


class Asked:
    """A placement that wants what it is told, and remembers what it was asked."""

    in_chunk = None
    publishes_end = True

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.asked: tuple[int, int, int | None] | None = None

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        self.asked = start, end, branch
        return list(self._lengths)


def checkpoints(placement: Any, *, slots: int = 9, kinds: Kinds = STATES) -> CheckpointSaver:
    free = list(range(slots))
    cache: Any = SimpleNamespace(
        knobs=CacheConfig(),
        page_size=PAGE,
        tree=SimpleNamespace(kinds=kinds),
        counters=Counter(),
        take_state_slot=lambda _: [free.pop(0)] if free else None,
    )
    return CheckpointSaver(cache, placement)


def req(kv_len: int = 0, target_len: int = 250, boundary: int | None = 77) -> Any:
    slot = None if boundary is None else np.array([boundary], np.int32)
    return SimpleNamespace(
        kv_len=kv_len,
        target_len=target_len,
        placed=[32, 100 // PAGE * PAGE, 240],
        branch_len=None,
        request=SimpleNamespace(prompt_len=target_len),
        sequence=SimpleNamespace(boundary_slot=slot),
    )


def published(
    placement: Any, *ends: int, kinds: Kinds = STATES, branch: int | None = None, start: int = 0
) -> list[list[tuple[int, bool]]]:
    """What each chunk of a prompt publishes; the chunks end at `ends`."""
    asked, saver = req(start), checkpoints(placement, kinds=kinds)
    match: Any = SimpleNamespace(branch_len=branch)
    saver.place(asked, match)
    found = []
    for end in ends:
        found.append(saver.chunk(asked, end).published)
        asked.kv_len = end
    return found


def test_lengths_are_whole_pages_ascending_once_and_only_where_it_computes() -> None:
    placement = Asked(240, 100, 98, 32, 47, 48, 31, 256)
    lengths = published(placement, 250, start=32, branch=98)
    assert lengths == [[(48, True), (96, True), (240, True)]]
    assert placement.asked == (32, 240, 98)


def test_full_attention_alone_publishes_each_chunk_to_its_end() -> None:
    chunks = published(Asked(240), 128, 250, kinds=named_kinds(PAGE))
    assert chunks == [[(128, True)], [(250, True)]]


WINDOWED = named_kinds(PAGE, window_len=8)


@pytest.mark.parametrize(
    ("windows", "wanted"),
    [
        (Asked(96), [(96, True), (250, False)]),
        (Asked(240, 96), [(96, True), (250, True)]),
        (Asked(16), [(250, False)]),
    ],
    ids=["at a branch", "at both", "where nothing is computed"],
)
def test_a_prompt_is_published_up_to_each_of_its_windows(
    windows: Asked, wanted: list[tuple[int, bool]]
) -> None:
    assert published(windows, 250, kinds=WINDOWED, branch=98, start=32) == [wanted]


def test_a_window_at_a_branch_on_the_last_page_is_that_before_the_branch() -> None:
    assert published(Asked(240), 250, kinds=WINDOWED, branch=240) == [[(240, True)]]


@pytest.mark.parametrize("kinds", [STATES, WINDOWED], ids=["states", "windows"])
@pytest.mark.parametrize(
    ("name", "branch", "wanted"),
    [
        ("end", 96, [[(128, False)], [(240, True)]]),
        ("end_branch", 96, [[(96, True), (128, False)], [(240, True)]]),
        ("chunk_branch", 96, [[(96, True), (128, True)], [(240, True)]]),
        ("chunk_branch", None, [[(128, True)], [(240, True)]]),
        ("branch_or_end", 96, [[(96, True)], [(240, True)]]),
        ("branch_or_end", 208, [[(128, True)], [(208, True)]]),
    ],
)
def test_each_chunk_is_published_as_its_placement_says(
    name: str, branch: int | None, wanted: list[list[tuple[int, bool]]], kinds: Kinds
) -> None:
    config = CacheConfig(checkpoints=name, windows=name, page_size=PAGE)
    policy = presets(world_of(kinds, cache=config)).requests.placement
    if kinds is WINDOWED:  # the window before the last token, not before the last page
        wanted = [
            [(250 if length == 240 else length, keeps) for length, keeps in each] for each in wanted
        ]
    assert published(policy, 128, 250, kinds=kinds, branch=branch) == wanted


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
    assert slots_of(kept.chunk(req(), 95).saves) == [(32, 0)]
    assert slots_of(kept.chunk(req(kv_len=32), 96).saves) == [(96, 1)]  # that at 32 is captured


@pytest.mark.parametrize(("slots", "state", "left"), [(1, 0, 77), (0, 77, None)])
def test_the_state_at_the_end_takes_the_slot_for_the_answer_if_no_other_is_free(
    slots: int, state: int, left: int | None
) -> None:
    asked = req(kv_len=96)
    assert slots_of(checkpoints(Asked(), slots=slots).chunk(asked, 250).saves) == [(240, state)]
    assert asked.sequence.boundary_slot == left


def test_a_state_without_a_slot_is_left_out_and_counted() -> None:
    kept = checkpoints(Asked(), slots=1)
    assert slots_of(kept.chunk(req(boundary=None), 250).saves) == [(32, 0)]
    assert kept._cache.counters["scheduler/missed_checkpoint_count"] == 2


@pytest.mark.parametrize(
    ("placement", "cached"),
    [
        ("end", [0, 0, 0]),
        ("end_branch", [0, 0, 64]),
        ("chunk_branch", [0, 64, 64]),
        ("branch_or_end", [0, 64, 64]),
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


@pytest.mark.parametrize(
    ("kind", "keeps_for_repeats", "usable"),
    [
        ("full_swa", False, [16, 24, 40]),
        ("full_swa", True, [16, 16, 16]),
        ("full_mamba", False, [0, 24, 40]),
        ("full_mamba", True, [16, 16, 16]),
    ],
)
def test_an_equal_prompt_a_longer_one_and_the_next_turn_resume_where_an_end_was_kept(
    kind: str, usable: list[int], *, keeps_for_repeats: bool
) -> None:
    world = World(plot_of(kind, keeps_for_repeats=keeps_for_repeats))
    request = request_of(0, range(24), range(100, 120))
    world.serve([request])
    tokens = request.prompt.to_bytes() + request.output.to_bytes()
    found = [world.cache.match(Sequence(tokens), length) for length in (24, 25, 42)]
    assert [match.usable_len for match in found] == usable


@pytest.mark.parametrize(("keeps_for_repeats", "branch"), [(False, 8), (True, None)])
def test_a_prompt_branches_off_what_any_tier_or_the_device_alone_holds(
    *, keeps_for_repeats: bool, branch: int | None
) -> None:
    sizes = (8, 0, 4)
    cache = make_cache(
        device=sizes, host=sizes, has_states=True, keeps_for_repeats=keeps_for_repeats
    )
    run_request(cache, tokens_of(16), 16)
    complete_all(cache)
    other = Sequence(tokens_of(8) + tokens_of(8, 100))
    assert cache.match(other, 16).branch_len == 8
    evict_all(cache, DEVICE, FULL)
    assert cache.match(other, 16).branch_len == branch
