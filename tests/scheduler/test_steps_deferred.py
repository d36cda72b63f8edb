"""For how long a deferral stands: the answer by arithmetic against one look after every step."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache.cache.kinds import FULL, SWA
from hicache.cache.pages import PageAllocator
from hicache.config import CacheConfig, SchedulerConfig
from hicache.policies.policy import presets
from hicache.scheduler.admission import Admission, StepBudget
from hicache.scheduler.decision import Admit, Defer, Reason
from tests.cache.small import named_kinds, world_of

PAGE = 16
FAR = 64


def req(
    *, kv_len: int, remaining_output: int, target_len: int = 0, left_page: int | None = None
) -> Any:
    return SimpleNamespace(
        kv_len=kv_len,
        remaining_output=remaining_output,
        target_len=target_len,
        extend_len=0,
        sequence=SimpleNamespace(
            num_pages=-(-kv_len // PAGE),
            left_page=(kv_len - 1) // PAGE if left_page is None else left_page,
        ),
    )


def admission_of(
    room: int, swa_room: int | None = None, *, free: int = 0, **knobs: float
) -> Admission:
    rooms = {FULL: room, SWA: swa_room}
    cache: Any = SimpleNamespace(
        page_size=PAGE,
        knobs=CacheConfig(),
        tree=SimpleNamespace(
            kinds=named_kinds(PAGE, window_len=PAGE * (swa_room is not None)),
        ),
        rooms=rooms,
        room=lambda kind=FULL: rooms[kind],
        available_size=lambda kind: free * PAGE,
        taken=lambda kind, claims: claims.get(kind, 0),
        growth_pages=lambda kind, tokens: tokens // PAGE,
        device=SimpleNamespace(is_shared=False),
        pools=[[None, PageAllocator(1000), None]],
    )
    config = SchedulerConfig(new_token_ratio_decay_steps=40, **knobs)  # type: ignore[arg-type]
    return Admission(cache, config, presets(world_of()).requests.window_charge)


def decide(admission: Admission, running: list[Any]) -> Admit | Defer:
    match: Any = SimpleNamespace(usable_len=0, host_hit_length=0, host_hits=(0, 0, 0))
    budget = StepBudget(
        chunk_tokens=8192, reserved_tokens=admission.reserved_tokens(running, partial=None)
    )
    return admission.decide(req(kv_len=0, remaining_output=8, target_len=100), match, budget)


def looks_deferred(admission: Admission, running: list[Any], free: int, steps: int) -> int:
    """After how many steps the request is let in, or no page is free that one of the next takes."""
    for done in range(1, steps):
        taken = sum(each.kv_len % PAGE == 0 for each in running)
        free -= taken
        if free < 0:
            return max(done - 1, 1)
        admission._cache.rooms[FULL] -= taken * PAGE  # type: ignore[attr-defined]
        admission.new_token_ratio.decoded(1)
        for each in running:
            each.kv_len += 1
            each.remaining_output -= 1
        if not isinstance(decide(admission, running), Defer):
            return done
    return steps


answers = st.lists(st.tuples(st.integers(100, 131), st.integers(FAR, 6000)), min_size=1, max_size=4)


@given(running=answers, room=st.integers(120, 3000), free=st.integers(0, 20))
def test_a_shortage_of_tokens_stands_until_the_promised_answers_have_come_or_pages_are_evicted(
    running: list[tuple[int, int]], room: int, free: int
) -> None:
    admission = admission_of(room, free=free)
    reqs = [req(kv_len=length, remaining_output=left) for length, left in running]
    defer = decide(admission, reqs)
    assume(isinstance(defer, Defer))
    assert isinstance(defer, Defer)
    foreseen = admission.steps_deferred(defer, reqs, FAR)
    assert 1 <= foreseen <= looks_deferred(admission, reqs, free, FAR)


@given(running=answers, room=st.integers(120, 3000))
def test_within_a_page_the_end_of_a_shortage_of_tokens_is_foreseen_to_the_step(
    running: list[tuple[int, int]], room: int
) -> None:
    admission = admission_of(room, free=1000)
    reqs = [req(kv_len=length, remaining_output=left) for length, left in running]
    in_page = min([-length % PAGE for length, _ in running])
    defer = decide(admission, reqs)
    assume(in_page > 0 and isinstance(defer, Defer))
    assert isinstance(defer, Defer)
    foreseen = admission.steps_deferred(defer, reqs, in_page)
    assert foreseen == looks_deferred(admission, reqs, 1000, in_page)


def test_a_shortage_of_tokens_stands_beyond_a_page_while_pages_are_free() -> None:
    steps = []
    for free in (4, 1, 0):
        admission = admission_of(120, free=free)
        reqs = [req(kv_len=100, remaining_output=5000)]
        defer = decide(admission, reqs)
        assert isinstance(defer, Defer)
        steps.append(admission.steps_deferred(defer, reqs, FAR))
    assert steps == [FAR, 28, 12]


def test_a_shortage_of_tokens_can_end_within_a_page() -> None:
    admission = admission_of(170)
    reqs = [req(kv_len=97, remaining_output=70)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert 1 < admission.steps_deferred(defer, reqs, FAR) < PAGE - 1


def test_room_for_exactly_what_is_needed_is_no_room() -> None:
    whole = {"new_token_ratio": 1.0, "new_token_ratio_floor": 1.0}  # all that is promised counts
    admission = admission_of(100 + 8 + PAGE + 70 - 3, **whole)
    reqs = [req(kv_len=97, remaining_output=70)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert admission.steps_deferred(defer, reqs, FAR) == 4  # with the third, nothing would be left


@pytest.mark.parametrize(("kv_len", "steps"), [(97, 15), (111, 1), (112, 1)])
def test_a_shortage_of_window_pages_stands_until_a_page_is_full(kv_len: int, steps: int) -> None:
    admission = admission_of(100_000, swa_room=0)
    reqs = [req(kv_len=kv_len, remaining_output=500), req(kv_len=96 + 1, remaining_output=500)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert defer.reason is Reason.swa_tokens
    assert admission.steps_deferred(defer, reqs, FAR) == steps


def test_the_first_decode_step_may_free_window_pages_of_the_prompt() -> None:
    admission = admission_of(100_000, swa_room=0)
    reqs = [req(kv_len=97, remaining_output=500, left_page=-1)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert admission.steps_deferred(defer, reqs, FAR) == 1


def test_what_was_deferred_after_it_had_taken_pages_is_looked_at_after_every_step() -> None:
    admission = admission_of(0)
    assert (
        admission.steps_deferred(Defer(Reason.slots), [req(kv_len=97, remaining_output=9)], FAR)
        == 1
    )
