"""Admission: the memory that a request is charged, and for how many decode steps it suffices."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import PageAllocator
from hicache.config import SWA_BUDGETS, CacheConfig, SchedulerConfig
from hicache.policies.policy import presets
from hicache.policies.window_charge import swa_budget_for_req
from hicache.rules import Rules
from hicache.scheduler.admission import (
    Admission,
    NewTokenRatio,
    StepBudget,
    ceil_page,
    pages_for,
    steps_in_free_pages,
    steps_in_page,
    steps_with_pages,
)
from hicache.scheduler.decision import Admit, Defer, Reason
from tests.cache.small import named_kinds, world_of

PAGE, WINDOW, PLENTY, FAR = 16, 32, 1 << 20, 64


def cache_of(
    rooms: dict[int, int],
    *,
    free: dict[int, int] | None = None,
    swa_pages: int | None = 1000,
    page: int = PAGE,
    demotes: bool = False,
) -> Any:
    """A cache with this room by kind, in tokens or slots; by default all of it is free pages."""
    has = {"window_len": WINDOW * (SWA in rooms), "has_states": MAMBA in rooms}
    pages = free or {kind: room // page for kind, room in rooms.items()}
    return SimpleNamespace(
        page_size=page,
        knobs=CacheConfig(),
        rules=Rules(),
        tree=SimpleNamespace(kinds=named_kinds(page, **has), demotes=demotes),
        rooms=rooms,
        room=lambda kind=FULL: rooms[kind],
        available_size=lambda kind: pages[kind] * page,
        taken=lambda kind, claims: claims.get(kind, 0),
        growth_pages=lambda kind, tokens: tokens // page,
        device=SimpleNamespace(is_shared=False),
        pools=[[None, PageAllocator(swa_pages), None]],
    )


def admission(cache: Any, window_charge: Any = None, **knobs: Any) -> Admission:
    own = {each.name: knobs.pop(each.name) for each in fields(Rules) if each.name in knobs}
    cache.rules = Rules(**own)
    config = SchedulerConfig(**knobs)
    policy = presets(world_of(scheduler=config)).requests
    return Admission(cache, config, window_charge or policy.window_charge)


def req(prompt: int = 100, answer: int = 8, *, computed: int = 0, **more: int) -> Any:
    pages = {"num_pages": -(-computed // PAGE), "left_page": (computed - 1) // PAGE, **more}
    return SimpleNamespace(
        kv_len=computed,
        target_len=prompt,
        extend_len=prompt - computed,
        remaining_output=answer,
        gains=[],
        most_gain=1,
        sequence=SimpleNamespace(**pages),
    )


def running(kv_len: int, answer: int = 500, **more: int) -> Any:
    return req(kv_len, answer, computed=kv_len, **more)


def match(*, usable: int = 0, host: int = 0, swa_host: int = 0, state_host: int = 0) -> Any:
    hits = (host, swa_host, state_host)
    return SimpleNamespace(usable_len=usable, host_hit_length=host, host_hits=hits)


def budget(*, chunk: int = 4096, reserved: float = 0, reserved_swa: int = 0) -> StepBudget:
    windows = {SWA: reserved_swa}
    return StepBudget(chunk_tokens=chunk, reserved_tokens=reserved, reserved_windows=windows)


# -- the charge of a request ---------------------------------------------------------------------

DEFERRED = Defer(Reason.swa_tokens, stands=True)


def windowed(swa_room: int, swa_pages: int | None = 1000, page: int = PAGE) -> Any:
    return cache_of({FULL: PLENTY, SWA: swa_room}, swa_pages=swa_pages, page=page)


@pytest.mark.parametrize(
    ("kind", "asked", "found", "spent", "least"),
    [
        # a token must be left of what prompt, answer and a page do not take
        (FULL, req(), match(), budget(), 100 + 8 + PAGE + 1),
        (FULL, req(101), match(), budget(), 101 + 8 + PAGE + 1),
        (FULL, req(answer=9), match(), budget(), 100 + 9 + PAGE + 1),
        (FULL, req(answer=50), match(), budget(), 100 + 20 + PAGE + 1),  # the clip
        (FULL, req(), match(usable=48), budget(), 52 + 8 + PAGE + 1),
        (FULL, req(), match(usable=48, host=32), budget(), 52 + 32 + 8 + PAGE + 1),
        (FULL, req(), match(), budget(reserved=50), 100 + 8 + PAGE + 50 + 1),
        # a prompt of 100 fills 7 pages; a host hit of 20 is loaded into two
        (SWA, req(), match(), budget(), 7 * PAGE + PAGE + 1),
        (SWA, req(), match(), budget(reserved_swa=30), 7 * PAGE + PAGE + 30 + 1),
        (SWA, req(), match(usable=64, swa_host=20), budget(), 3 * PAGE + PAGE + 2 * PAGE + 1),
        # two states, and one more for a state on the host
        (MAMBA, req(), match(), budget(), 2),
        (MAMBA, req(), match(state_host=1), budget(), 3),
    ],
)
def test_request_is_admitted_if_the_room_covers_its_charge_and_what_is_reserved(
    kind: int, asked: Any, found: Any, spent: StepBudget, least: int
) -> None:
    deferred, admitted = (
        admission(cache_of({FULL: PLENTY, kind: room}), clip_new_tokens=20).decide(
            asked, found, spent
        )
        for room in (least - 1, least)
    )
    assert admitted == Admit(4096)
    assert isinstance(deferred, Defer)
    assert deferred.stands
    assert deferred.reason == {FULL: Reason.tokens, SWA: Reason.swa_tokens}.get(kind, Reason.slots)
    if kind == FULL:
        needed = least - 1 - spent.reserved_tokens
        assert (deferred.needed, deferred.room) == (needed, least - 1)


def doubled(*, extend: int, chunk: int, page: int, **_: int) -> int:
    """A charge that grows by two tokens with each token of the chunk."""
    return 2 * min(extend, chunk) + page


def squared(*, extend: int, chunk: int, page: int, window: int, **_: int) -> int:
    """A charge that grows faster than the chunk: 1 token for the first page of it, 4 for two ..."""
    return (max(min(extend, chunk) - window, 0) // page) ** 2


@pytest.mark.parametrize(
    ("judging", "asked", "spent", "decision"),
    [
        # in a pool of 160 tokens, a window and a page leave 112
        (admission(windowed(160, 10)), req(144), budget(), Admit(112)),
        (admission(windowed(160, 10)), req(4000), budget(), Admit(112)),
        # whole pages of what is left
        (admission(windowed(160, 10)), req(4000), budget(reserved_swa=15), Admit(96)),
        (admission(windowed(160, 10)), req(4000), budget(reserved_swa=111), DEFERRED),
        # no more than the step allows
        (admission(windowed(160, 4)), req(4000), budget(chunk=64), Admit(64)),
        (admission(windowed(160, 10), doubled), req(4000), budget(), Admit(64)),
        (admission(windowed(160, 10), squared), req(4000), budget(), Admit(192)),
        (admission(windowed(WINDOW + 2, WINDOW + 2, page=1)), req(4000), budget(), Admit(1)),
        # a shortage that will pass: the pool could hold the whole prompt
        (admission(windowed(100, 10)), req(100), budget(), DEFERRED),
        (admission(windowed(100, None)), req(100), budget(), DEFERRED),
    ],
)
def test_prompt_larger_than_the_window_pool_starts_with_the_longest_chunk_that_fits(
    judging: Admission, asked: Any, spent: StepBudget, decision: Admit | Defer
) -> None:
    assert judging.decide(asked, match(), spent) == decision


@pytest.mark.parametrize("form", SWA_BUDGETS)
def test_longest_chunk_is_the_room_that_the_window_and_a_host_hit_leave(form: str) -> None:
    for max_new, window_taken in ((8, 8), (500, WINDOW)):
        held = window_taken if form == "sglang_0_5_23" else WINDOW
        for swa_host in (0, 20):
            host = {"no_host_term": 0, "double": 2}.get(form, 1) * ceil_page(swa_host, PAGE)
            for room, chunk in ((1000, 4096), (1003, 500), (1000, 64)):
                fits = (room - held - PAGE - host) // PAGE * PAGE
                decision = admission(windowed(room, 4), swa_budget=form).decide(
                    req(4000, max_new), match(swa_host=swa_host), budget(chunk=chunk)
                )
                assert decision == Admit(min(chunk, fits))


# -- the charge of a window, by formula: SGLang's pull requests 27391 and 32379 ------------------

SIZES = ("extend", "max_new", "chunk", "window", "page", "swa_host_hit_length")
FORMS = ("no_host_term", "reports", "double", "sglang_0_5_23")


@pytest.mark.parametrize(
    ("sizes", "charges"),
    [
        ((64, 512, None, 128, 16, 0), (144, 144, 144, 144)),
        ((64, 32, None, 128, 16, 0), (144, 144, 144, 112)),
        ((300, 512, None, 128, 16, 0), (316, 316, 316, 316)),
        ((200, 512, 50, 64, 8, 0), (72, 72, 72, 72)),
        ((300, 512, 500, 64, 64, 0), (364, 364, 364, 364)),
        ((0, 40, None, 128, 16, 0), (144, 144, 144, 56)),
        ((64, 512, None, 128, 16, 100), (144, 256, 368, 256)),  # 100 tokens are 7 pages
    ],
)
def test_each_formula_charges_chunk_window_page_and_host_hit(
    sizes: tuple[int | None, ...], charges: tuple[int, ...]
) -> None:
    by_name: Any = dict(zip(SIZES, sizes, strict=True))
    assert tuple(swa_budget_for_req(form, **by_name) for form in FORMS) == charges


# -- what is reserved for admitted requests ------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "chunk", "end", "reserved", "reserved_swa"),
    [
        (req(), 64, 64, 36 + PAGE, PAGE),  # the rest of the prompt; the chunk has its windows
        (req(answer=8), 4096, 100, 8 + PAGE, PAGE),  # the answer
        (req(answer=500), 4096, 100, 20 + PAGE, PAGE),  # up to the clip
        (req(computed=60), 48, 92, 8 + PAGE, 48 + PAGE - 32),  # of three pages it takes two
        (req(), 16, 96, 4 + PAGE, 0),  # it takes more than it was charged
    ],
)
def test_admitted_request_reserves_what_its_first_chunk_does_not_take(
    asked: Any, chunk: int, end: int, reserved: int, reserved_swa: int
) -> None:
    spent = budget(chunk=chunk, reserved=7, reserved_swa=5)
    admission(windowed(PLENTY), clip_new_tokens=20).reserve(asked, end, spent)
    assert spent.reserved_tokens == 7 + reserved
    assert spent.reserved_windows == {SWA: 5 + reserved_swa}


def test_a_share_of_running_answers_and_the_rest_of_a_partial_prompt_are_reserved() -> None:
    judging = admission(cache_of({FULL: PLENTY}), clip_new_tokens=60, new_token_ratio=0.5)
    assert judging.reserved_tokens([req(answer=40), req(answer=100)], None) == 0.5 * (40 + 60)
    half = req(100, answer=100, computed=64)
    assert judging.reserved_tokens([], half) == 36 + PAGE + 0.5 * 60


# -- the share of the answers --------------------------------------------------------------------


def ratio(first: float = 0.7, floor: float = 0.1, decay_steps: int = 600) -> NewTokenRatio:
    return NewTokenRatio(
        SchedulerConfig(new_token_ratio=first),
        Rules(new_token_ratio_floor=floor, new_token_ratio_decay_steps=decay_steps),
    )


@pytest.mark.parametrize(
    ("settings", "steps", "share"),
    [
        ((), 0, 0.7),
        ((), 150, 0.55),
        ((), 600, 0.1),
        ((), 900, 0.1),
        ((0.7, 0.1, 0), 0, 0.7),
        ((0.7, 0.1, 0), 1, 0.1),
        ((0.05, 0.3), 0, 0.05),  # a floor above the first share is ignored
        ((0.05, 0.3), 10_000, 0.05),
    ],
)
def test_reserved_share_of_answers_falls_linearly_with_decode_steps_to_its_floor(
    settings: tuple[Any, ...], steps: int, share: float
) -> None:
    falling = ratio(*settings)
    assert falling.after(steps) == pytest.approx(share)
    falling.decoded(steps // 3)
    falling.decoded(steps - steps // 3)
    assert falling.after() == pytest.approx(share)


@pytest.mark.parametrize(
    ("decoded", "max_new", "left", "share"),
    [
        (50, 199, 2, 0.45),  # (50 + 20 · 2) / (199 + 1)
        (0, 999, 1, 0.02),  # lower than the floor until the next step
        (500, 99, 4, 1.0),  # no higher than all of it
    ],
)
def test_retraction_sets_the_reserved_share_from_the_answers_of_the_remaining_requests(
    decoded: int, max_new: int, left: int, share: float
) -> None:
    falling = ratio()
    falling.decoded(400)
    falling.retracted(
        [
            SimpleNamespace(decoded=done, request=SimpleNamespace(output_len=length))
            for done, length in [(decoded, max_new)] + [(0, 0)] * (left - 1)
        ]
    )
    assert falling.after() == pytest.approx(share)
    assert falling.after(100) == pytest.approx(max(share - 0.1, 0.1))  # it falls as fast as before


# -- for how many decode steps there is memory ---------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "steps", "pages"),
    [
        ((31,), 1, 0),
        ((32,), 1, 1),
        ((33,), 15, 0),
        ((33,), 16, 1),
        ((33,), 31, 1),
        ((33,), 32, 2),
        ((32, 40), 16, 2),
    ],
)
def test_decode_steps_need_pages_only_beyond_those_that_each_request_has(
    lengths: tuple[int, ...], steps: int, pages: int
) -> None:
    ahead = running(33, num_pages=50)  # its spare pages are no credit to others
    assert pages_for([*map(running, lengths), ahead], PAGE, steps) == pages


@pytest.mark.parametrize(
    ("lengths", "wanted", "steps"),
    [((40, 45, 33), 64, 3), ((40, 45, 33), 2, 2), ((40, 45, 33), 0, 1), ((40, 48), 64, 1)],
)
def test_steps_in_a_page_end_with_the_first_page_that_is_full(
    lengths: tuple[int, ...], wanted: int, steps: int
) -> None:
    assert steps_in_page([*map(running, lengths)], PAGE, wanted) == steps


def pools(free: dict[int, int], evictable: dict[int, int] | None = None, **more: bool) -> Any:
    """A cache with these free and evictable pages."""
    rooms = {kind: (count + (evictable or {}).get(kind, 0)) * PAGE for kind, count in free.items()}
    return cache_of(rooms, free=free, **more)


@pytest.mark.parametrize(
    ("cache", "kv_len", "wanted", "steps"),
    [
        (pools({FULL: 2}), 32, 32, 32),
        (pools({FULL: 0}, {FULL: 2}), 32, 32, 32),
        # too few pages halve the steps
        (pools({FULL: 1}), 32, 64, 16),
        (pools({FULL: 0}), 33, 60, 15),
        (pools({FULL: 0}), 32, 64, 0),
        # write_back copies a victim before the next step: the steps end within a page
        (pools({FULL: 1}, {FULL: 9}, demotes=True), 33, 64, 15),
        (pools({FULL: 1}, {FULL: 9}, demotes=True), 33, 31, 31),  # one page, and it is free
        # window pages are taken within a page unless they are free
        (pools({FULL: 9, SWA: 1}, {SWA: 9}), 33, 64, 15),
        (pools({FULL: 9, SWA: 1}, {SWA: 9}), 33, 31, 31),
        (pools({FULL: 9, SWA: 0}), 32, 64, 0),
    ],
)
def test_decode_steps_are_limited_by_the_free_or_evictable_pages_of_each_kind(
    cache: Any, kv_len: int, wanted: int, steps: int
) -> None:
    assert steps_with_pages(cache, [running(kv_len)], wanted) == steps


@pytest.mark.parametrize(("spare", "steps"), [(0, 31), (1, 15)])
def test_steps_in_free_pages_leave_spare_pages_free(spare: int, steps: int) -> None:
    cache = cache_of({FULL: 9 * PAGE, SWA: PAGE})
    assert steps_in_free_pages(cache, [running(33)], 31, spare=spare) == steps


# -- how long a deferral stands ------------------------------------------------------------------


ALL = {"new_token_ratio": 1.0, "new_token_ratio_floor": 1.0}  # whole answers are reserved


@pytest.mark.parametrize(
    ("rooms", "free", "reqs", "knobs", "steps"),
    [
        # a shortage of tokens stands until less is reserved for answers, or pages are evicted
        ({FULL: 120}, 4, [running(100, 5000)], {}, FAR),
        ({FULL: 120}, 1, [running(100, 5000)], {}, 28),
        ({FULL: 120}, 0, [running(100, 5000)], {}, 12),
        ({FULL: 100 + 8 + PAGE + 70 - 3}, 0, [running(97, 70)], ALL, 4),  # three leave no token
        # a shortage of window pages stands until a page is full, or prompt pages leave the window
        ({FULL: PLENTY, SWA: 0}, 0, [running(97), running(97)], {}, 15),
        ({FULL: PLENTY, SWA: 0}, 0, [running(111), running(97)], {}, 1),
        ({FULL: PLENTY, SWA: 0}, 0, [running(112), running(97)], {}, 1),
        ({FULL: PLENTY, SWA: 0}, 0, [running(97, left_page=-1)], {}, 1),
        # a shortage of slots stands until a running request ends
        ({FULL: PLENTY, MAMBA: 0}, 0, [running(97)], {}, 15),
    ],
)
def test_deferral_stands_until_the_step_that_may_end_the_shortage(
    rooms: dict[int, int], free: int, reqs: list[Any], knobs: dict[str, Any], steps: int
) -> None:
    cache = cache_of(rooms, free=dict.fromkeys(rooms, free))
    judging = admission(cache, new_token_ratio_decay_steps=40, **knobs)
    spent = budget(chunk=8192, reserved=judging.reserved_tokens(reqs, None))
    decision = judging.decide(req(), match(), spent)
    assert isinstance(decision, Defer)
    assert judging.steps_deferred(decision, reqs, FAR) == steps
    assert judging.steps_deferred(Defer(Reason.slots), reqs, FAR) == 1  # it may end at any time
