"""Prefetches from storage to host: when they start and stop, what they read, what is counted."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.tiers.transfer import FATES
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.sequence import Sequence
from hicache.clock import SECOND_NS
from hicache.config import CommitPolicy, CutPolicy, PrefetchConfig, StageAt
from hicache.observe import invariants
from hicache.rules import DeadlineFrom, Rules
from tests.cache.small import PAGE, make_cache, prefetcher_of, tokens_of

EARLY = PrefetchConfig(threshold=2 * PAGE, stage_at=StageAt.enqueue, stop="best_effort")
LATE = PrefetchConfig(threshold=2 * PAGE, stage_at=StageAt.hit, stop="best_effort")
TIMEOUT = replace(LATE, stop="timeout", commit=CommitPolicy.usable)
WINDOW = {"window_len": 2 * PAGE}
STATES = {"has_states": True}
LONG_AFTER = 100 * SECOND_NS


class Scenario:
    """Requests whose prompts have a common start; most methods are steps and return `self`.

    A request number `number` submits a prompt of some whole pages and one token more.
    """

    def __init__(
        self,
        config: PrefetchConfig,
        *,
        host: tuple[int, int, int] = (20, 20, 4),
        host_tokens: int | None = None,
        **shape: Any,
    ) -> None:
        self.cache = make_cache(device=(20, 20, 4), host=host, load_back_threshold=0, **shape)
        self.prefetcher = prefetcher_of(self.cache, config, host_tokens)
        self.prefetches: dict[int, Any] = {}  # None if the prefetch was declined

    def submit(self, num_pages: int, number: int = 0) -> "Scenario":
        num_tokens = num_pages * self.cache.page_size + 1
        sequence = Sequence(tokens_of(num_tokens))
        match = self.cache.match(sequence, num_tokens)
        self.prefetches[number] = self.prefetcher.prefetch_from_storage(
            number, sequence, match, num_tokens, 0
        )
        return self

    def answer(self, *restorable: int, number: int = 0) -> "Scenario":
        """Storage reports the lengths that it can restore."""
        self.prefetches[number].restorable = list(restorable)
        self.prefetcher.on_queried(self.prefetches[number])
        return self

    def begin(
        self, num_pages: int, number: int = 0, *, found: int | None = None, **progress: Any
    ) -> "Scenario":
        """Submit a request; storage has the `found` first pages of it, and the read begins."""
        self.submit(num_pages, number)
        self.answer(*range(1, (num_pages if found is None else found) + 1), number=number)
        return self.read(number, **progress)

    def read(self, number: int = 0, **progress: Any) -> "Scenario":
        for name, value in progress.items():
            setattr(self.prefetches[number], name, value)
        return self

    def end(self, completed: int, number: int = 0, *, restored: int = 0) -> "Scenario":
        """The read ends with `completed` pages, and a window or state after `restored` pages."""
        progress = {"completed_pages": completed, "restored_pages": restored, "is_read": True}
        self.read(number, **progress).prefetcher.on_read(self.prefetches[number])
        return self

    def admit(self, number: int = 0, *, uses: int = 0, now_ns: int = 0) -> "Scenario":
        """The request no longer waits; it, or another one, computes a prompt of `uses` pages."""
        assert self.prefetcher.check(number, now_ns)
        self.prefetcher.forget(number)
        if uses:
            self.cache.serve(uses * PAGE + 1)
            self.cache.complete_all()
        return self

    def defer(self, now_ns: int = LONG_AFTER) -> "Scenario":
        """The request goes on waiting."""
        assert not self.prefetcher.check(0, now_ns)
        return self

    def abort(self) -> "Scenario":
        self.prefetcher.abort(0)
        return self

    def evict(self, tier: int = HOST) -> "Scenario":
        self.cache.evict_all(tier, FULL)
        return self

    def publish(self, num_pages: int) -> "Scenario":
        """Another request computes the first pages, and no copy is made of them."""
        self.cache.serve(num_pages * PAGE)
        return self


def counts(started: int = 1, staged: int = 5, **others: int) -> dict[str, int]:
    """The counters that are not 0, by name without the suffixes `_count` and `_pages`."""
    counted = {"started": started, "staged": staged, **others}
    return {name: count for name, count in counted.items() if count}


early, late = partial(Scenario, EARLY), partial(Scenario, LATE)
keeps_part = partial(Scenario, replace(LATE, commit=CommitPolicy.usable))
no_read = partial(counts, 0, 0)


def timed_out(completed: int) -> Scenario:
    """A prefetch of 8 pages, `completed` of them read; states are stored after 4 and 8 pages."""
    return Scenario(TIMEOUT, **STATES).submit(8).answer(4, 8).read(completed_pages=completed)


# what happens, and all that is counted of it
PREFETCHES: dict[str, Callable[[], tuple[Scenario, dict[str, int]]]] = {
    "read, then used in part": lambda: (
        late().begin(5).end(5).admit(uses=3),
        counts(used=3, unused_at_end=2),
    ),
    "stopped halfway": lambda: (
        late().begin(5, completed_pages=2).admit(uses=2).end(4),
        counts(terminated=1, used=2, late=2, discarded_unread=1),
    ),
    "stopped when the last page has come": lambda: (
        late().begin(5, completed_pages=5).admit().end(5),
        counts(terminated=1, unused_at_end=5),
    ),
    "stopped before the answer, not staged": lambda: (
        late().submit(5).admit().answer(1, 2, 3, 4, 5),
        counts(staged=0, revoked=1, terminated=1),
    ),
    "stopped before the answer, staged": lambda: (
        early().submit(5).admit().answer(1, 2, 3, 4, 5),
        counts(terminated=1, revoked=1, discarded_terminated=5),
    ),
    "stopped before its state was read": lambda: (
        late(**STATES).begin(5, completed_pages=5).admit().end(5, restored=5),
        counts(terminated=1, terminated_without_sidecars=1, not_restorable=5),
    ),
    "stopped while pages are read, by a request that never waits for states": lambda: (
        keeps_part(**STATES).begin(5, completed_pages=2).admit().end(2),
        counts(terminated=1, not_restorable=2, discarded_unread=3),
    ),
    "stopped before its window was read, which a second read brings": lambda: (
        late(**WINDOW)
        .begin(5, completed_pages=5)
        .admit()
        .end(5, restored=5)
        .begin(5, 1)
        .end(5, 1, restored=5)
        .admit(1, uses=5),
        counts(2, staged=10, terminated=1, terminated_without_sidecars=1, not_restorable=5, used=5),
    ),
    "read short, of which a part is kept with its window": lambda: (
        keeps_part(**WINDOW).begin(5).end(3, restored=2).admit(uses=2),
        counts(used=2, not_restorable=1, discarded_short=2),
    ),
    "read short": lambda: (late().begin(5).end(2).admit(uses=2), counts(used=2, discarded_short=3)),
    "read short, without the window": lambda: (
        late(**WINDOW).begin(5).end(2).admit(uses=2),
        counts(not_restorable=2, discarded_short=3),
    ),
    "read whole with window and state": lambda: (
        late(**WINDOW, **STATES).begin(5).end(5, restored=5).admit(uses=5),
        counts(used=5),
    ),
    "aborted before the answer": lambda: (
        early().submit(5).abort().answer(1, 2),
        counts(aborted=1, discarded_aborted=5),
    ),
    "aborted while reading": lambda: (
        early().begin(5).abort().end(3),
        counts(aborted=1, late=3, discarded_unread=2),
    ),
    "read and evicted": lambda: (late().begin(5).end(5).admit().evict(), counts(evicted_unused=5)),
    "used twice and evicted": lambda: (
        late().begin(5).end(5).admit(uses=5).evict(DEVICE).admit(uses=5).evict(DEVICE).evict(),
        counts(used=5),
    ),
    "two reads of the same": lambda: (
        late().begin(5).begin(4, 1).end(5).end(4, 1).admit(uses=5).admit(1, uses=4),
        counts(2, staged=9, used=5, duplicate=4),
    ),
    "not in storage": lambda: (early().begin(5, found=0), counts(revoked=1, discarded_miss=5)),
    "less in storage than the threshold": lambda: (
        late().begin(5, found=1),
        counts(staged=0, revoked=1),
    ),
    "a part in storage": lambda: (
        early(window_len=4 * PAGE).begin(5, found=2).end(2, restored=2).admit(uses=2),
        counts(discarded_miss=3, used=2),
    ),
    "cut to the room on the host": lambda: (
        early(host=(3, 0, 0)).submit(5).answer(1, 2, 3).end(3),
        counts(staged=3, cut=1, cut_tokens=2 * PAGE, unused_at_end=3),
    ),
    "no room when it is submitted": lambda: (
        Scenario(replace(EARLY, cut=CutPolicy.abandon), host=(4, 0, 0)).submit(5),
        no_read(abandoned=1, abandoned_host_room_tokens=5 * PAGE),
    ),
    "no room when it is found": lambda: (
        Scenario(replace(LATE, cut=CutPolicy.abandon), host=(4, 0, 0)).begin(5),
        counts(staged=0, revoked=1, abandoned=1, abandoned_host_room_tokens=5 * PAGE),
    ),
    "no room for its window": lambda: (
        early(host=(20, 1, 4), **WINDOW).submit(5),
        no_read(abandoned=1, abandoned_sidecar_room_tokens=5 * PAGE),
    ),
    "too short": lambda: (late().submit(1), no_read(declined=1, declined_too_short_tokens=PAGE)),
    "half of the host is taken by prefetches": lambda: (
        late(host_tokens=6 * PAGE).begin(3).submit(4, 1).end(3),
        counts(staged=3, unused_at_end=3, declined=1, declined_rate_limited_tokens=4 * PAGE),
    ),
    "less than half of the host is taken by prefetches": lambda: (
        late(host_tokens=7 * PAGE).begin(3).submit(4, 1).end(3),
        counts(2, staged=3, unused_at_end=3, terminated=1, revoked=1),
    ),
    "continues pages that the host lacks": lambda: (
        late(host=(0, 0, 0)).publish(2).submit(7),
        no_read(declined=1, declined_anchor_not_on_host_tokens=5 * PAGE),
    ),
    "timed out before a length with a state": lambda: (
        timed_out(3).admit(now_ns=LONG_AFTER).end(3),
        counts(staged=8, terminated=1, not_restorable=3, discarded_unread=5),
    ),
    "timed out, and the state of the part is lost": lambda: (
        timed_out(5).defer().end(5).admit(now_ns=LONG_AFTER),
        counts(staged=8, terminated=1, not_restorable=5, discarded_unread=3),
    ),
    "timed out, and aborted while the state of the part is read": lambda: (
        timed_out(5).defer().abort().end(5, restored=4),
        counts(staged=8, terminated=1, aborted=1, late=5, discarded_unread=3),
    ),
}


@pytest.mark.parametrize("name", PREFETCHES)
def test_everything_that_happens_to_a_prefetch_is_counted_once(name: str) -> None:
    scenario, wanted = PREFETCHES[name]()
    for number in list(scenario.prefetcher.active):
        scenario.admit(number)
    totals = scenario.cache.counters + scenario.cache.fates.fates_now()
    counted = {
        key.removeprefix("prefetch/").removesuffix("_pages").removesuffix("_count"): count
        for key, count in totals.items()
        if key.startswith("prefetch/")
    }
    assert counted.pop("read", 0) == sum(counted.get(fate, 0) for fate in FATES)
    assert counted == wanted
    scenario.cache.complete_all()
    invariants.check(scenario.cache, scenario.prefetcher, [])
    invariants.check_drained(scenario.cache, scenario.prefetcher)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "num_pages"),
    [(255, 1, None), (256, 1, 256), (255, 64, None), (319, 64, 4), (511, 512, None)],
)
def test_a_prefetch_has_whole_pages_and_at_least_the_threshold(num_tokens, page_size, num_pages):
    cache = make_cache(host=(1000, 0, 0), page_size=page_size)
    sequence = Sequence(tokens_of(num_tokens + 1))
    match = cache.match(sequence, num_tokens + 1)
    prefetcher = prefetcher_of(cache, PrefetchConfig())
    prefetch = prefetcher.prefetch_from_storage(0, sequence, match, num_tokens + 1, 0)
    assert (prefetch and prefetch.num_pages) == num_pages


@pytest.mark.parametrize(("room", "num_pages"), [(7, 7), (2, 2), (1, None), (8, 8)])
@pytest.mark.parametrize("config", [EARLY, LATE], ids=["enqueue", "hit"])
def test_a_prefetch_is_cut_to_the_room_on_the_host_but_its_state_is_not(config, room, num_pages):
    scenario = Scenario(config, host=(room, 0, 1), **STATES).submit(8)
    if config is LATE:
        scenario.answer(*range(1, 9))
    prefetch = scenario.prefetches[0]
    if num_pages is None:
        assert prefetch is None or prefetch.is_settled
        assert scenario.prefetcher.occupied_tokens == 0
        return
    assert prefetch is not None
    assert [len(each) for each in prefetch.staged] == [num_pages, 0, 1]
    assert len(prefetch.keys(FULL, 0, 8)) == (num_pages if config is EARLY else 8)
    assert scenario.cache.counters["prefetch/cut_tokens"] == (8 - num_pages) * PAGE
    assert scenario.cache.counters["prefetch/cut_count"] == (num_pages < 8)


@pytest.mark.parametrize("room", [15, 8])
def test_a_cut_to_what_can_be_restored_skips_lengths_without_a_state(room):
    scenario = Scenario(replace(LATE, cut=CutPolicy.restorable), host=(room, 0, 1), **STATES)
    assert scenario.submit(16).answer(4, 8, 16).prefetches[0].num_pages == 8


@pytest.mark.parametrize(
    ("first", "start", "num_pages", "left"), [(0, 4, 12, 4), (9_000, 0, 16, 0)]
)
def test_a_prefetch_evicts_other_data_from_the_host_but_not_the_prefix_that_it_continues(
    first, start, num_pages, left
):
    scenario = Scenario(EARLY, host=(16, 0, 0))
    scenario.cache.serve(4 * PAGE, first)
    scenario.cache.complete_all()
    prefetch = scenario.evict(DEVICE).submit(start + 16).prefetches[0]
    assert (prefetch.start_page, prefetch.num_pages) == (start, num_pages)
    assert scenario.cache.resident(HOST)[FULL] == left


@pytest.mark.parametrize(("evicts_whole", "left"), [(False, 3), (True, 0)])
def test_a_prefetch_evicts_as_many_pages_as_it_lacks_or_if_set_as_it_reads(*, evicts_whole, left):
    rules = Rules(evicts_whole=evicts_whole)
    scenario = Scenario(EARLY, host=(8, 0, 0), rules=rules)
    for first in (100, 200):
        scenario.cache.serve(3 * PAGE, first)
        scenario.cache.complete_all()
    scenario.evict(DEVICE).begin(5).end(5)
    assert scenario.cache.resident(HOST)[FULL] == 5 + left


class Listener:
    def found(self, *report: object) -> None:
        self.report = report


def test_a_listener_gets_the_lengths_found_in_storage_and_the_kinds_they_need():
    scenario = Scenario(LATE, **WINDOW, **STATES)
    listener: Any = Listener()
    scenario.cache.tree.listener = listener
    prefetch = scenario.submit(8).prefetches[0]
    prefetch.restorable = [4, 8]
    scenario.prefetcher.on_queried(prefetch, 7)
    needs = ((SWA, Window(2)), (MAMBA, Window(1)))
    assert listener.report == (prefetch.sequence, 0, [4, 8], needs)
    assert prefetch.answered_ns == 7


# -- stopping -----------------------------------------------------------------------------------

ALL_PAGES, BUT_ONE = {"completed_pages": 8}, {"completed_pages": 7}


@pytest.mark.parametrize(
    ("stop", "shape", "progress", "now_ns", "may_stop"),
    [
        ("timeout", {}, BUT_ONE, 2 * SECOND_NS, False),
        ("timeout", {}, BUT_ONE, 2 * SECOND_NS + 1, True),
        ("timeout", STATES, BUT_ONE, 2 * SECOND_NS + 1, True),
        ("timeout", STATES, ALL_PAGES, LONG_AFTER, False),
        ("timeout", WINDOW, ALL_PAGES, LONG_AFTER, False),
        ("best_effort", {}, BUT_ONE, 0, True),
        ("best_effort", STATES, ALL_PAGES, 0, True),
        ("best_effort", WINDOW, ALL_PAGES, 0, True),
        ("wait_complete", {}, BUT_ONE, LONG_AFTER, False),
        ("wait_complete", {}, ALL_PAGES, 0, True),
        ("wait_complete", STATES, ALL_PAGES, LONG_AFTER, False),
        ("wait_complete", WINDOW, ALL_PAGES, LONG_AFTER, False),
        ("wait_complete", STATES, {**ALL_PAGES, "is_read": True}, 0, True),
        ("wait_complete", {}, {**ALL_PAGES, "restorable": None}, LONG_AFTER, False),
    ],
)
def test_a_stop_policy_decides_when_a_prefetch_may_stop(stop, shape, progress, now_ns, may_stop):
    # 8 pages of 512 tokens: the time limit is 2 s
    config = PrefetchConfig(stop=stop)
    scenario = Scenario(config, page_size=512, **shape).begin(8, **progress)
    prefetcher, prefetch = scenario.prefetcher, scenario.prefetches[0]
    assert prefetcher.can_terminate_prefetch(prefetch, now_ns) is may_stop
    assert prefetcher.is_blocking(0, now_ns) is not may_stop
    assert prefetch.first_poll_ns is None
    assert not prefetcher.is_blocking(1, now_ns)
    if not may_stop:
        scenario.end(8, restored=8)
        assert not prefetcher.is_blocking(0, now_ns)


def test_a_request_may_run_before_its_state_is_read_if_set():
    config = PrefetchConfig(stop="wait_complete", await_sidecars=False)
    scenario = Scenario(config, page_size=512, **STATES).begin(8, **ALL_PAGES)
    assert scenario.prefetcher.can_terminate_prefetch(scenario.prefetches[0], 0)


def test_the_timeout_of_a_prefetch_may_count_from_its_first_check():
    config = PrefetchConfig(stop="timeout")
    rules = Rules(deadline_from=DeadlineFrom.first_poll)
    scenario = Scenario(config, page_size=512, rules=rules).begin(8).defer(10 * SECOND_NS)
    scenario.defer(12 * SECOND_NS).admit(now_ns=12 * SECOND_NS + 1)


def test_the_time_limit_of_a_cut_prefetch_is_that_of_its_whole_length():
    config = PrefetchConfig(stop="timeout", stage_at=StageAt.enqueue)
    scenario = Scenario(config, page_size=512, host=(4, 0, 0)).submit(8)
    assert scenario.prefetches[0].num_pages == 4
    assert scenario.prefetcher.policy.deadline_ns(scenario.prefetches[0]) == 2 * SECOND_NS


@pytest.mark.parametrize(
    ("shape", "held"), [({"window_len": 5 * PAGE}, [8, 5, 0]), (STATES, [8, 0, 1])]
)
def test_a_timeout_keeps_the_longest_part_whose_window_or_state_is_read(shape, held):
    scenario = Scenario(TIMEOUT, **shape).submit(16).answer(4, 8, 16).read(completed_pages=10)
    prefetcher, cache = scenario.prefetcher, scenario.cache
    assert not prefetcher.is_blocking(0, LONG_AFTER)
    scenario.defer()  # the window or state after 8 pages is read now
    assert scenario.prefetches[0].stop_pages == 8
    assert prefetcher.is_blocking(0, LONG_AFTER)
    scenario.end(12, restored=8).admit(now_ns=LONG_AFTER)  # two more pages were on their way
    assert cache.resident(HOST) == held
    assert [pool.num_taken for pool in cache.pools[HOST]] == held
    assert cache.match(scenario.prefetches[0].sequence, 16 * PAGE + 1).usable_len == 8 * PAGE
    counted = {name: cache.counters[f"prefetch/{name}"] for name in STOPPED}
    assert counted == STOPPED
    invariants.check(cache, prefetcher, [])


@pytest.mark.parametrize(
    ("short_windows", "num_read", "num_published"),
    [(True, 2, 2), (False, 2, 0), (True, 6, 4), (False, 6, 4)],
)
def test_a_read_shorter_than_the_window_publishes_window_pages_by_rule(
    *, short_windows, num_read, num_published
):
    shape = {"window_len": 4 * PAGE, "short_windows": short_windows}
    scenario = Scenario(LATE, **shape).publish(4)
    before = [*scenario.cache.resident(HOST)]
    scenario.begin(12, found=num_read).end(num_read, restored=num_read).admit()
    assert scenario.prefetches[0].start_page == 4
    after = scenario.cache.resident(HOST)
    new = [now - then for now, then in zip(after, before, strict=True)]
    assert new == [num_read, num_published, 0]


STOPPED = {"not_restorable_pages": 4, "discarded_unread_pages": 4, "terminated_count": 1}


# -- what storage can restore -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window_pages", "has_state", "found", "restorable"),
    [
        (0, False, ["1101"], [1, 2]),
        (0, False, ["0111"], []),
        (0, True, ["1111", "1101"], [1, 2, 4]),
        (0, True, ["1111", "1001"], [1, 4]),
        (2, False, ["1111", "1011"], [1, 4]),
    ],
)
def test_storage_can_restore_prefixes_with_their_window_and_state(
    window_pages, has_state, found, restorable
):
    windows = [(SWA, Window(window_pages))] * (window_pages > 0)
    states = [(MAMBA, Window(1))] * has_state
    prefetch = replace(Scenario(LATE).begin(4).prefetches[0], needs=(*windows, *states))
    answers = iter([[each == "1" for each in part] for part in found])
    assert prefetch.ask(lambda keys: next(answers)) == restorable


@pytest.mark.parametrize(("anchors_full", "start"), [(False, 0), (True, 4)])
def test_a_prefetch_begins_at_the_end_of_the_usable_prefix_or_of_the_hosts_full_kv(
    *, anchors_full, start
):
    scenario = Scenario(LATE, anchors_full=anchors_full, **STATES)
    cache, prompt = scenario.cache, 8 * PAGE + 1
    for num_tokens in (4 * PAGE, 8 * PAGE):
        cache.serve(num_tokens)
        cache.complete_all()
    cache.evict_all(DEVICE, FULL)
    for kind in (MAMBA, FULL):  # the first state leaves the host, then the last pages
        pool = cache.pools[HOST][kind]
        pool.free(cache.host.allocate(kind, pool.num_free + 1))
    match = cache.match(Sequence(tokens_of(prompt)), prompt)
    assert (match.usable_len, match.full_len) == (0, 4 * PAGE)
    prefetch = scenario.submit(8).prefetches[0]
    assert prefetch.start_page == start
    scenario.answer(8 - start).end(8 - start, restored=8 - start).admit()
    assert cache.match(Sequence(tokens_of(prompt)), prompt).usable_len == 8 * PAGE
    assert prefetch.published_pages == 4
