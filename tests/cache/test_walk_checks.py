"""The checks of the random walks notice a cache that is wrong on purpose."""

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
def test_walks_notice_a_cache_with_this_mistake(mutate: Callable[[Walk], None]) -> None:
    errors = MISTAKES[mutate].split()
    assert any(error_of(seed, mutate) in errors for seed in range(40))


@pytest.mark.parametrize(
    ("window_pages", "window_len", "usable_len"),
    [({1, 2}, 8, 8), ({5, 6}, 8, 24), ({5, 6}, 12, 0), ({1, 2, 5, 6}, 12, 8)],
)
def test_the_naive_cache_finds_what_was_worked_out_by_hand(window_pages, window_len, usable_len):
    """Six pages of 4 tokens; their window pages are held at some ends."""
    tokens, kinds = tokens_of(24), named_kinds(4, window_len=window_len)
    held = nothing_held(kinds)
    for page in range(1, 7):
        payload = Payload("a", tokens[: page * 16])
        held[DEVICE][FULL][payload] = page
        if page in window_pages:
            held[DEVICE][SWA][payload] = page
    assert longest_match(held, kinds, tokens, 24, "a").usable_len == usable_len
    assert longest_match(held, kinds, tokens, 24, "b").usable_len == 0
