"""For how long a deferral stands: the answer by arithmetic against one look after every step."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache.cache.pages import PageAllocator
from hicache.cache.tree.node import FULL, SWA
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import Admission
from hicache.scheduler.budget import StepBudget
from hicache.scheduler.decision import Admit, Defer, Reason

PAGE = 16
FAR = 64


def req(*, kv_len: int, remaining_output: int, target_len: int = 0) -> Any:
    return SimpleNamespace(
        kv_len=kv_len, remaining_output=remaining_output, target_len=target_len, extend_len=0
    )


def admission_of(room: int, swa_room: int | None = None, **knobs: float) -> Admission:
    cache: Any = SimpleNamespace(
        page_size=PAGE,
        tree=SimpleNamespace(has_swa=swa_room is not None, has_states=False, window_len=PAGE),
        room={FULL: room, SWA: swa_room}.__getitem__,
        pools=[[None, PageAllocator(1000), None]],
    )
    return Admission(cache, SchedulerConfig(new_token_ratio_decay_steps=40, **knobs))  # type: ignore[arg-type]


def decide(admission: Admission, running: list[Any]) -> Admit | Defer:
    match: Any = SimpleNamespace(usable_len=0, host_hit_length=0, swa_host_hit_length=0)
    budget = StepBudget(
        chunk_tokens=8192, reserved_tokens=admission.reserved_tokens(running, partial=None)
    )
    return admission.decide(req(kv_len=0, remaining_output=8, target_len=100), match, budget)


def looks_deferred(admission: Admission, running: list[Any], steps: int) -> int:
    """After how many steps the request is let in, or a page has been filled or taken."""
    for done in range(1, steps):
        takes_page = any(each.kv_len % PAGE == 0 for each in running)
        admission.decoded(1)
        for each in running:
            each.kv_len += 1
            each.remaining_output -= 1
        fills_page = any(each.kv_len % PAGE == 0 for each in running)
        if takes_page or fills_page or not isinstance(decide(admission, running), Defer):
            return done
    return steps


answers = st.lists(st.tuples(st.integers(100, 131), st.integers(FAR, 6000)), min_size=1, max_size=4)


@pytest.mark.plain
@given(running=answers, room=st.integers(120, 3000))
def test_a_shortage_of_tokens_ends_when_the_promised_answers_have_come(
    running: list[tuple[int, int]], room: int
) -> None:
    admission = admission_of(room)
    reqs = [req(kv_len=length, remaining_output=left) for length, left in running]
    defer = decide(admission, reqs)
    assume(isinstance(defer, Defer))
    assert isinstance(defer, Defer)
    foreseen = admission.steps_deferred(defer, reqs, FAR)
    assert foreseen == looks_deferred(admission, reqs, FAR)


@pytest.mark.plain
def test_a_shortage_of_tokens_can_end_within_a_page() -> None:
    admission = admission_of(170)
    reqs = [req(kv_len=97, remaining_output=70)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert 1 < admission.steps_deferred(defer, reqs, FAR) < PAGE - 1


@pytest.mark.plain
def test_room_for_exactly_what_is_needed_is_no_room() -> None:
    whole = {"new_token_ratio": 1.0, "new_token_ratio_floor": 1.0}  # all that is promised counts
    admission = admission_of(100 + 8 + PAGE + 70 - 3, **whole)
    reqs = [req(kv_len=97, remaining_output=70)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert admission.steps_deferred(defer, reqs, FAR) == 4  # with the third, nothing would be left


@pytest.mark.plain
@pytest.mark.parametrize(("kv_len", "steps"), [(97, 15), (111, 1), (112, 1)])
def test_a_shortage_of_window_pages_stands_until_a_page_is_full(kv_len: int, steps: int) -> None:
    admission = admission_of(100_000, swa_room=0)
    reqs = [req(kv_len=kv_len, remaining_output=500), req(kv_len=96 + 1, remaining_output=500)]
    defer = decide(admission, reqs)
    assert isinstance(defer, Defer)
    assert defer.reason is Reason.swa_tokens
    assert admission.steps_deferred(defer, reqs, FAR) == steps


@pytest.mark.plain
def test_what_was_deferred_after_it_had_taken_pages_is_looked_at_after_every_step() -> None:
    admission = admission_of(0)
    assert (
        admission.steps_deferred(Defer(Reason.slots), [req(kv_len=97, remaining_output=9)], FAR)
        == 1
    )
