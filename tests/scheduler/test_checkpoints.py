"""The lengths at which states and windows are kept, and the slots that states are saved in."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import FULL, SWA, Kinds
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import CacheConfig
from hicache.policies.policy import presets
from hicache.rules import Rules
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
from tests.scheduler.world import World, bare_world, fresh, plot_of

PAGE = 16
STATES = named_kinds(PAGE, has_states=True)
WINDOWED = named_kinds(PAGE, window_len=8)
Published = list[list[tuple[int, bool]]]


class Fixed:
    """A placement that returns fixed lengths, and records what it was asked."""

    in_chunk = None
    publishes_end = True

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.asked: tuple[int, int, int | None] | None = None

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        self.asked = start, end, branch
        return list(self._lengths)


def saver_of(
    placement: Any = None, *, slots: int = 9, kinds: Kinds = STATES
) -> tuple[CheckpointSaver, Counter[str]]:
    free, counters = list(range(slots)), Counter[str]()
    cache: Any = SimpleNamespace(
        knobs=CacheConfig(),
        rules=Rules(),
        page_size=PAGE,
        tree=RadixTree(kinds=kinds),
        counters=counters,
        take_state_slot=lambda _: [free.pop(0)] if free else None,
    )
    return CheckpointSaver(cache, placement or Fixed()), counters


def req(kv_len: int = 0, boundary: int | None = 77) -> Any:
    """A request with a prompt of 250 tokens, and states placed at 32, 96 and 240."""
    slot = None if boundary is None else np.array([boundary], np.int32)
    return SimpleNamespace(
        kv_len=kv_len,
        target_len=250,
        placed=[32, 96, 240],
        branch_len=None,
        request=SimpleNamespace(prompt_len=250),
        sequence=SimpleNamespace(boundary_slot=slot),
    )


def published(
    placement: Any, *ends: int, kinds: Kinds = STATES, branch: int | None = None, start: int = 0
) -> Published:
    """By chunk of a prompt, cut at `ends`: each published length, and if data is kept there."""
    asked, (saver, _) = req(start), saver_of(placement, kinds=kinds)
    match: Any = SimpleNamespace(branch_len=branch)
    saver.place(asked, match)
    found = []
    for end in ends:
        found.append(saver.chunk(asked, end).published)
        asked.kv_len = end
    return found


def test_placed_lengths_are_rounded_sorted_and_limited_to_what_is_computed() -> None:
    placement = Fixed(240, 100, 98, 32, 47, 48, 31, 256)
    lengths = published(placement, 250, start=32, branch=98)
    assert lengths == [[(48, True), (96, True), (240, True)]]
    assert placement.asked == (32, 240, 98)


@pytest.mark.parametrize(
    ("placement", "ends", "kinds", "branch", "wanted"),
    [
        (Fixed(240), (128, 250), named_kinds(PAGE), None, [[(128, True)], [(250, True)]]),
        (Fixed(96), (250,), WINDOWED, 98, [[(96, True), (250, False)]]),
        (Fixed(240, 96), (250,), WINDOWED, 98, [[(96, True), (250, True)]]),
        (Fixed(16), (250,), WINDOWED, 98, [[(250, False)]]),  # where nothing is computed
        # a window at a branch on the last page is that before the branch
        (Fixed(240), (250,), WINDOWED, 240, [[(240, True)]]),
    ],
)
def test_chunk_is_published_up_to_its_windows_and_its_end(
    placement: Any, ends: tuple[int, ...], kinds: Kinds, branch: int | None, wanted: Published
) -> None:
    start = 0 if len(ends) > 1 else 32
    assert published(placement, *ends, kinds=kinds, branch=branch, start=start) == wanted


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
        ("branch_or_end", None, [[(128, True)], [(240, True)]]),
        ("every", 96, [[(64, True), (96, True), (128, True)], [(192, True), (240, True)]]),
    ],
)
def test_each_checkpoint_setting_publishes_chunks_at_its_branch_end_or_regular_lengths(
    name: str, branch: int | None, wanted: Published, kinds: Kinds
) -> None:
    grid = {"checkpoint_tokens": 64, "page_size": PAGE}
    config = CacheConfig(checkpoints=name, **grid)
    policy = presets(world_of(kinds, cache=config)).requests.placement
    if kinds is WINDOWED:  # the window before the last token, not before the last page
        wanted = [
            [(250 if length == 240 else length, keeps) for length, keeps in each] for each in wanted
        ]
    assert published(policy, 128, 250, kinds=kinds, branch=branch) == wanted


@pytest.mark.parametrize(("trims", "on_device"), [(False, 7), (True, 2)])
def test_host_keeps_the_last_window_and_the_device_the_last_chunk_unless_trimmed(
    on_device: int, *, trims: bool
) -> None:
    world = bare_world("full_swa", window_len=16, rules=Rules(trims_windows=trims))
    world.serve([fresh(0, 100, 1)])  # 64 + 36 tokens, in pages of 8
    device, host = world.cache.tree.residency.resident
    assert (device[SWA], host[SWA]) == (on_device, 2)


@pytest.mark.parametrize(
    ("asked", "end", "slots", "saves", "left", "missed"),
    [
        (req(), 95, 9, [(32, 0)], 77, 0),
        (req(32), 96, 9, [(96, 0)], 77, 0),  # the state at 32 is there
        (req(96), 250, 1, [(240, 0)], 77, 0),
        (req(96), 250, 0, [(240, 77)], None, 0),  # the last takes the slot for the answer
        (req(boundary=None), 250, 1, [(32, 0)], None, 2),
    ],
)
def test_chunk_saves_its_states_in_free_slots_and_counts_those_it_misses(
    asked: Any, end: int, slots: int, saves: list[tuple[int, int]], left: int | None, missed: int
) -> None:
    saver, counters = saver_of(slots=slots)
    found = [(length, int(slot[0])) for length, slot in saver.chunk(asked, end).saves]
    assert (found, asked.sequence.boundary_slot) == (saves, left)
    assert counters["scheduler/missed_checkpoint_count"] == missed


@pytest.mark.parametrize(
    ("kind", "keeps_for_repeats", "usable"),
    [
        ("full_swa", False, [16, 24, 40]),
        ("full_swa", True, [16, 16, 16]),
        ("full_mamba", False, [0, 24, 40]),
        ("full_mamba", True, [16, 16, 16]),
    ],
)
def test_repeated_prompt_longer_prompt_and_next_turn_hit_the_lengths_that_are_kept(
    kind: str, usable: list[int], *, keeps_for_repeats: bool
) -> None:
    world = World(plot_of(kind, keeps_for_repeats=keeps_for_repeats))
    request = fresh(0, 24, 20)
    world.serve([request])
    tokens = request.prompt.to_bytes() + request.output.to_bytes()
    found = [world.cache.match(Sequence(tokens), length) for length in (24, 25, 42)]
    assert [match.usable_len for match in found] == usable


@pytest.mark.parametrize(("keeps_for_repeats", "branch"), [(False, 8), (True, None)])
def test_branch_point_is_found_on_pages_of_any_tier_or_if_set_of_the_device_alone(
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
