"""Lives of a prefetch, from the request for it to the last of its pages, and all they count."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.tiers.transfer import FATES
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.sequence import Sequence
from hicache.config import (
    CommitPolicy,
    CutPolicy,
    PrefetchConfig,
    QuirksConfig,
    StageAt,
)
from hicache.observe import invariants
from tests.cache.small import (
    PAGE,
    complete_all,
    evict_all,
    make_cache,
    prefetcher_of,
    run_request,
    tokens_of,
)

EARLY = PrefetchConfig(threshold=2 * PAGE, stage_at=StageAt.enqueue, stop="best_effort")
LATE = PrefetchConfig(threshold=2 * PAGE, stage_at=StageAt.hit, stop="best_effort")


class Story:
    """Requests for prompts that begin alike, on a host of so many pages and states."""

    def __init__(
        self,
        config: PrefetchConfig,
        *,
        host: tuple[int, int, int] = (20, 20, 4),
        window_len: int = 0,
        has_states: bool = False,
        host_tokens: int | None = None,
        evicts_whole: bool = False,
    ) -> None:
        self.cache = make_cache(
            device=(20, 20, 4),
            host=host,
            window_len=window_len,
            has_states=has_states,
            load_back_threshold=0,
            quirks=QuirksConfig(evicts_whole=evicts_whole),
        )
        self.prefetcher = prefetcher_of(self.cache, config, host_tokens)

    def ask(self, num_pages: int, number: int = 0) -> Prefetch | None:
        """For so many pages, and a token that is left to compute."""
        num_tokens = num_pages * PAGE + 1
        sequence = Sequence(tokens_of(num_tokens))
        match = self.cache.match(sequence, num_tokens)
        return self.prefetcher.prefetch_from_storage(number, sequence, match, num_tokens, 0)

    def begin(self, num_pages: int, number: int = 0, *, found: int | None = None) -> Prefetch:
        """A read of them begins, or of the first that were found."""
        prefetch = self.ask(num_pages, number)
        assert prefetch is not None
        self.answer(prefetch, num_pages if found is None else found)
        return prefetch

    def answer(self, prefetch: Prefetch, found: int) -> None:
        prefetch.restorable = list(range(1, found + 1))
        self.prefetcher.on_queried(prefetch)

    def end(self, prefetch: Prefetch, completed: int, *, sidecars: bool = False) -> None:
        """The reader lets go."""
        prefetch.completed_pages = completed
        if sidecars:
            prefetch.restored_pages = completed
        prefetch.is_read = True
        self.prefetcher.on_read(prefetch)

    def go_on(self, number: int = 0, *, used: int = 0) -> None:
        """The request is let go, and starts; one for `used` pages may be another."""
        assert self.prefetcher.check(number, 0)
        self.prefetcher.forget(number)
        if used:
            run_request(self.cache, tokens_of(used * PAGE + 1), used * PAGE + 1)
            complete_all(self.cache)

    def evict(self) -> None:
        """All that the host can spare leaves it."""
        evict_all(self.cache, HOST, FULL)


def read_and_used(story: Story) -> None:
    story.end(story.begin(5), 5)
    story.go_on(used=3)


def used_for_more_than_it_brought(story: Story) -> None:
    story.end(story.begin(5), 5)
    story.go_on(used=9)


def let_go_halfway(story: Story) -> None:
    prefetch = story.begin(5)
    prefetch.completed_pages = 2
    story.go_on(used=2)
    story.end(prefetch, 4)


def let_go_before_the_answer(story: Story) -> None:
    prefetch = story.ask(5)
    assert prefetch is not None
    story.go_on()
    story.answer(prefetch, 5)


def let_go_without_sidecars(story: Story) -> None:
    prefetch = story.begin(5)
    prefetch.completed_pages = 5
    story.go_on()
    story.end(prefetch, 5, sidecars=True)


def read_short(story: Story) -> None:
    story.end(story.begin(5), 2)
    story.go_on(used=2)


def read_short_with_a_window(story: Story) -> None:
    prefetch = story.begin(5)
    prefetch.restored_pages = 2
    story.end(prefetch, 3)
    story.go_on(used=2)


def read_whole_with_sidecars(story: Story) -> None:
    story.end(story.begin(5), 5, sidecars=True)
    story.go_on(used=5)


def aborted_before_the_answer(story: Story) -> None:
    assert story.ask(5)
    story.prefetcher.abort(0)


def aborted_while_reading(story: Story) -> None:
    prefetch = story.begin(5)
    story.prefetcher.abort(0)
    story.end(prefetch, 3)


def aborted_after_reading(story: Story) -> None:
    story.end(story.begin(5), 5)
    story.prefetcher.abort(0)


def read_and_evicted(story: Story) -> None:
    story.end(story.begin(5), 5)
    story.go_on()
    story.evict()


def let_go_without_sidecars_that_another_brings(story: Story) -> None:
    let_go_without_sidecars(story)
    story.end(story.begin(5, number=1), 5, sidecars=True)
    story.go_on(number=1, used=5)


def used_twice_and_evicted(story: Story) -> None:
    story.end(story.begin(5), 5)
    for _ in range(2):
        story.go_on(used=5)
        evict_all(story.cache, DEVICE, FULL)
    story.evict()


def two_bring_the_same(story: Story) -> None:
    first, second = story.begin(5), story.begin(4, number=1)
    story.end(first, 5)
    story.end(second, 4)
    story.go_on(used=5)
    story.go_on(number=1, used=4)


def anchored_nowhere(story: Story) -> None:
    run_request(story.cache, tokens_of(2 * PAGE), 2 * PAGE)
    assert story.ask(7) is None


def one_after_the_other(story: Story) -> None:
    first = story.begin(3)
    assert story.ask(4, number=1) is None
    story.end(first, 3)


def found_in_part(story: Story) -> None:
    story.end(story.begin(5, found=2), 2, sidecars=True)
    story.go_on(used=2)


def cut(story: Story) -> None:
    prefetch = story.ask(5)
    assert prefetch is not None
    assert prefetch.num_pages == 3
    story.answer(prefetch, 3)
    story.end(prefetch, 3)


BEGUN = {"started_count": 1, "staged_pages": 5}
LET_GO = {**BEGUN, "terminated_count": 1}
REVOKED = {"started_count": 1, "revoked_count": 1}
WINDOW = {"window_len": 2 * PAGE}
# what happens, where, and all that is counted of it
LIVES: dict[str, tuple[Callable[[Story], object], Callable[[], Story], dict[str, int]]] = {
    "read and used": (
        read_and_used,
        partial(Story, LATE),
        {**BEGUN, "used_pages": 3, "unused_at_end_pages": 2},
    ),
    "used for more than it brought": (
        used_for_more_than_it_brought,
        partial(Story, EARLY),
        {**BEGUN, "used_pages": 5},
    ),
    "let go halfway": (
        let_go_halfway,
        partial(Story, LATE),
        {**LET_GO, "used_pages": 2, "late_pages": 2, "discarded_unread_pages": 1},
    ),
    "let go before the answer, not staged": (
        let_go_before_the_answer,
        partial(Story, LATE),
        {**REVOKED, "terminated_count": 1},
    ),
    "let go before the answer, staged": (
        let_go_before_the_answer,
        partial(Story, EARLY),
        {**LET_GO, "revoked_count": 1, "discarded_terminated_pages": 5},
    ),
    "let go before its state came": (
        let_go_without_sidecars,
        partial(Story, LATE, has_states=True),
        {**LET_GO, "terminated_without_sidecars_count": 1, "not_restorable_pages": 5},
    ),
    "let go before its window came, which another brings": (
        let_go_without_sidecars_that_another_brings,
        partial(Story, LATE, **WINDOW),
        {
            "started_count": 2,
            "staged_pages": 10,
            "terminated_count": 1,
            "terminated_without_sidecars_count": 1,
            "not_restorable_pages": 5,
            "used_pages": 5,
        },
    ),
    "read short, of which a part is kept with its window": (
        read_short_with_a_window,
        partial(Story, replace(LATE, commit=CommitPolicy.usable), **WINDOW),
        {**BEGUN, "used_pages": 2, "not_restorable_pages": 1, "discarded_short_pages": 2},
    ),
    "read short": (
        read_short,
        partial(Story, LATE),
        {**BEGUN, "used_pages": 2, "discarded_short_pages": 3},
    ),
    "read short, with a window to come": (
        read_short,
        partial(Story, LATE, **WINDOW),
        {**BEGUN, "not_restorable_pages": 2, "discarded_short_pages": 3},
    ),
    "read whole with window and state": (
        read_whole_with_sidecars,
        partial(Story, LATE, **WINDOW, has_states=True),
        {**BEGUN, "used_pages": 5},
    ),
    "aborted before the answer": (
        aborted_before_the_answer,
        partial(Story, EARLY),
        {**BEGUN, "aborted_count": 1, "discarded_aborted_pages": 5},
    ),
    "aborted while reading": (
        aborted_while_reading,
        partial(Story, EARLY),
        {**BEGUN, "aborted_count": 1, "late_pages": 3, "discarded_unread_pages": 2},
    ),
    "aborted after reading": (
        aborted_after_reading,
        partial(Story, LATE),
        {**BEGUN, "unused_at_end_pages": 5},
    ),
    "read and evicted": (
        read_and_evicted,
        partial(Story, LATE),
        {**BEGUN, "evicted_unused_pages": 5},
    ),
    "used twice and evicted": (
        used_twice_and_evicted,
        partial(Story, LATE),
        {**BEGUN, "used_pages": 5},
    ),
    "two bring the same": (
        two_bring_the_same,
        partial(Story, LATE),
        {"started_count": 2, "staged_pages": 9, "used_pages": 5, "duplicate_pages": 4},
    ),
    "found nowhere": (
        lambda story: story.begin(5, found=0),
        partial(Story, EARLY),
        {**BEGUN, "revoked_count": 1, "discarded_miss_pages": 5},
    ),
    "found below the threshold": (
        lambda story: story.begin(5, found=1),
        partial(Story, LATE),
        REVOKED,
    ),
    "found in part": (
        found_in_part,
        partial(Story, EARLY, window_len=4 * PAGE),
        {**BEGUN, "discarded_miss_pages": 3, "used_pages": 2},
    ),
    "cut to the room there is": (
        cut,
        partial(Story, EARLY, host=(3, 0, 0)),
        {
            "started_count": 1,
            "staged_pages": 3,
            "cut_count": 1,
            "cut_tokens": 2 * PAGE,
            "unused_at_end_pages": 3,
        },
    ),
    "no room as it is asked for": (
        lambda story: story.ask(5),
        partial(Story, replace(EARLY, cut=CutPolicy.abandon), host=(4, 0, 0)),
        {"abandoned_count": 1, "abandoned_host_room_tokens": 5 * PAGE},
    ),
    "no room when it is found": (
        lambda story: story.begin(5),
        partial(Story, replace(LATE, cut=CutPolicy.abandon), host=(4, 0, 0)),
        {**REVOKED, "abandoned_count": 1, "abandoned_host_room_tokens": 5 * PAGE},
    ),
    "no room for its window": (
        lambda story: story.ask(5),
        partial(Story, EARLY, host=(20, 1, 4), **WINDOW),
        {"abandoned_count": 1, "abandoned_sidecar_room_tokens": 5 * PAGE},
    ),
    "too short": (
        lambda story: story.ask(1),
        partial(Story, LATE),
        {"declined_count": 1, "declined_too_short_tokens": PAGE},
    ),
    "too much is on its way": (
        one_after_the_other,
        partial(Story, LATE, host_tokens=5 * PAGE),
        {
            "started_count": 1,
            "staged_pages": 3,
            "unused_at_end_pages": 3,
            "declined_count": 1,
            "declined_rate_limited_tokens": 4 * PAGE,
        },
    ),
    "goes on from what is not on the host": (
        anchored_nowhere,
        partial(Story, LATE, host=(0, 0, 0)),
        {"declined_count": 1, "declined_anchor_not_on_host_tokens": 5 * PAGE},
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_all_that_becomes_of_a_prefetch_is_counted_once(name: str) -> None:
    happens, make_story, wanted = LIVES[name]
    story = make_story()
    happens(story)
    for number in list(story.prefetcher.active):
        story.go_on(number)
    totals = story.cache.counters + story.cache.fates.fates_now()
    counted = {key[9:]: n for key, n in totals.items() if key.startswith("prefetch/")}
    assert counted.pop("read_pages", 0) == sum(counted.get(f"{fate}_pages", 0) for fate in FATES)
    assert counted == wanted
    complete_all(story.cache)
    invariants.check(story.cache, story.prefetcher, [])
    invariants.check_drained(story.cache, story.prefetcher)


def test_a_prefetch_that_evicts_drops_as_much_as_it_wants_or_only_what_it_lacks() -> None:
    for evicts_whole, left in ((False, 3), (True, 0)):
        story = Story(EARLY, host=(8, 0, 0), evicts_whole=evicts_whole)
        for first in (100, 200):
            run_request(story.cache, tokens_of(3 * PAGE, first), 3 * PAGE)
            complete_all(story.cache)
        evict_all(story.cache, DEVICE, FULL)
        story.end(story.begin(5), 5)
        assert story.cache.tree.residency.resident[HOST][FULL] == 5 + left
        story.go_on(used=5)


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("has_sidecars", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_every_prefetch_that_is_let_go_between_pages_and_window_counts(
    *, is_complete: bool, has_sidecars: bool, is_read: bool
) -> None:
    done: list[str] = []
    prefetcher = SimpleNamespace(
        counters=Counter(),
        _count_stop=lambda _: done.append("counted"),
        _stop=lambda _: done.append("stopped"),
        _publish=lambda _: done.append("published"),
    )
    prefetch = SimpleNamespace(
        is_complete=is_complete, has_sidecars=has_sidecars, is_read=is_read, phase=Phase.reading
    )
    for _ in range(3):
        Prefetcher._terminate(prefetcher, prefetch)  # type: ignore[arg-type]
    counts = 3 if (is_complete, has_sidecars, is_read) == (True, True, False) else 0
    assert prefetcher.counters["prefetch/terminated_without_sidecars_count"] == counts
    assert done == ["counted", "stopped", "published"] * 3
