"""Random walks over every mix of kinds, page sizes, write policies and pool sizes.

Each walk checks the invariants, the matches and the content of every page after each operation,
and that nothing is left when all has ended (`walk.py`). A cache that is wrong on purpose shows that
these checks can fail.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.cache.tiers.transfer import LoadBack, StorageWrite
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from tests.cache.ghost import Payload
from tests.cache.oracle import longest_match, nothing_held
from tests.cache.small import named_kinds, tokens_of
from tests.cache.walk import Walk, random_setting

NUM_WALKS = 150
NUM_SOAK_WALKS = 5000


@pytest.mark.parametrize("block", range(10))
def test_random_walks_keep_the_invariants_and_agree_with_the_naive_cache(block: int) -> None:
    for seed in range(block, NUM_WALKS, 10):
        Walk(random_setting(seed)).run(100)


@pytest.mark.parametrize("seed", [904, 1241])
def test_a_last_page_is_loaded_only_after_the_back_up_that_reads_its_target_page(seed: int) -> None:
    Walk(random_setting(seed)).run(250)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_long_walks_keep_the_invariants(block: int) -> None:
    for seed in range(NUM_WALKS + block, NUM_WALKS + NUM_SOAK_WALKS, 10):
        Walk(random_setting(seed)).run(250)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by a call of `around`, whose first argument is the method."""
    setattr(owner, name, partial(around, getattr(owner, name)))


def free_nothing_at_an_abort(walk: Walk) -> None:
    wrap(walk.cache, "abandon", lambda abandon, sequence: None)


def match_without_windows(walk: Walk) -> None:
    def match(method: Any, *args: Any, **how: Any) -> object:
        walk.tree._windows, kept = (), walk.tree._windows
        result = method(*args, **how)
        walk.tree._windows = kept
        return result

    wrap(walk.tree, "match", match)


def swap_two_loaded_pages(walk: Walk) -> None:
    def book(method: Any, work: Any) -> None:
        if isinstance(work, LoadBack):
            move = work.moves[0]
            work.moves[0] = move._replace(targets=move.targets[1:] + move.targets[:1])
        method(work)

    wrap(walk.memory, "book", book)


def write_under_the_keys_of_other_pages(walk: Walk) -> None:
    def book(method: Any, work: Any) -> None:
        if isinstance(work, StorageWrite):
            work.keys = work.keys[::-1]
        method(work)

    wrap(walk.memory, "book", book)


def leave_windows_too_early(walk: Walk) -> None:
    def leave(method: Any, sequence: Sequence, length: int) -> None:
        method(sequence, length + 3 * walk.page)

    wrap(walk.cache, "leave_window", leave)


MISTAKES = {
    free_nothing_at_an_abort: "BrokenLawError",
    match_without_windows: "WrongMatchError",
    swap_two_loaded_pages: "WrongPageError",
    write_under_the_keys_of_other_pages: "WrongPageError",
    leave_windows_too_early: "WrongPageError BrokenLawError WrongMatchError",
}


def error_of(seed: int, mutate: Callable[[Walk], None]) -> str | None:
    walk = Walk(random_setting(seed))
    mutate(walk)
    try:
        walk.run(80)
    except (AssertionError, ValueError, KeyError) as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize("mutate", MISTAKES, ids=lambda mutate: mutate.__name__)
def test_random_walks_notice_a_cache_with_a_mistake(mutate: Callable[[Walk], None]) -> None:
    errors = MISTAKES[mutate].split()
    assert any(error_of(seed, mutate) in errors for seed in range(40))


@pytest.mark.parametrize(
    ("window_pages", "window_len", "usable_len"),
    [({1, 2}, 8, 8), ({5, 6}, 8, 24), ({5, 6}, 12, 0), ({1, 2, 5, 6}, 12, 8)],
)
def test_the_naive_cache_finds_hand_computed_usable_lengths(window_pages, window_len, usable_len):
    """Six pages of 4 tokens are cached; the window only of those in `window_pages`."""
    tokens, kinds = tokens_of(24), named_kinds(4, window_len=window_len)
    held = nothing_held(kinds)
    for page in range(1, 7):
        payload = Payload("a", tokens[: page * 16])
        held[DEVICE][FULL][payload] = page
        if page in window_pages:
            held[DEVICE][SWA][payload] = page
    assert longest_match(held, kinds, tokens, 24, "a").usable_len == usable_len
    assert longest_match(held, kinds, tokens, 24, "b").usable_len == 0
