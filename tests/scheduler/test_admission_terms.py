"""What a request is charged before it is let in: every term, by the least room that admits it."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import PageAllocator
from hicache.config import SWA_BUDGETS, SchedulerConfig
from hicache.policies.policy import presets
from hicache.scheduler.admission import Admission, StepBudget, ceil_page
from hicache.scheduler.decision import Admit, Defer, Reason
from tests.cache.small import named_kinds, world_of

PAGE = 16
WINDOW = 32
PLENTY = 1 << 20


def admission(
    *,
    room: int = PLENTY,
    swa_room: int | None = None,
    swa_pages: int | None = 1000,
    slots: int | None = None,
    window_charge: Any = None,
    **knobs: Any,
) -> Admission:
    """Over pools with so much room; those without a number are not there."""
    config = SchedulerConfig(**knobs)
    cache: Any = SimpleNamespace(
        page_size=PAGE,
        tree=SimpleNamespace(
            kinds=named_kinds(
                PAGE, window_len=WINDOW * (swa_room is not None), has_states=slots is not None
            ),
        ),
        room=lambda kind=FULL: {FULL: room, SWA: swa_room, MAMBA: slots}[kind],
        pools=[[None, PageAllocator(swa_pages), None]],
        quirks=SimpleNamespace(states_per_request=2),
        taken=lambda kind, claims: claims.get(kind, 0),
        device=SimpleNamespace(is_shared=False),
    )
    policy = presets(world_of(scheduler=config)).requests
    return Admission(cache, config, window_charge or policy.window_charge)


def req(prompt: int = 100, answer: int = 8, *, computed: int = 0) -> Any:
    return SimpleNamespace(
        kv_len=computed, target_len=prompt, extend_len=prompt - computed, remaining_output=answer
    )


def match(*, usable: int = 0, host: int = 0, swa_host: int = 0, state_host: int = 0) -> Any:
    return SimpleNamespace(
        usable_len=usable,
        host_hit_length=host,
        host_hits=(host, swa_host, state_host),
    )


def budget(*, chunk: int = 4096, reserved: float = 0, reserved_swa: int = 0) -> StepBudget:
    return StepBudget(
        chunk_tokens=chunk, reserved_tokens=reserved, reserved_windows={SWA: reserved_swa}
    )


def least_room(asked: Any, found: Any = None, spent: StepBudget | None = None, **knobs: Any) -> int:
    """The least room in the full pool that lets a request in."""
    return next(
        room
        for room in range(10_000)
        if admission(room=room, **knobs).decide(asked, found or match(), spent or budget())
        == Admit(4096)
    )


BASE = least_room(req(100, 8))


def test_a_request_fits_when_prompt_answer_and_a_page_leave_something_over() -> None:
    assert BASE == 100 + 8 + PAGE + 1


@pytest.mark.parametrize(
    ("asked", "found", "more"),
    [
        (req(101, 8), match(), 1),
        (req(100, 9), match(), 1),
        (req(100, 8), match(usable=48), -48),
        (req(100, 8), match(usable=48, host=32), -16),  # what is loaded back takes pages too
    ],
    ids=["prompt", "answer", "device_hit", "host_hit"],
)
def test_each_token_that_takes_room_is_charged_once(asked: Any, found: Any, more: int) -> None:
    assert least_room(asked, found) == BASE + more


def test_what_is_promised_to_others_is_not_there() -> None:
    assert least_room(req(100, 8), spent=budget(reserved=50)) == BASE + 50


def test_of_a_long_answer_no_more_than_the_clip_is_charged() -> None:
    assert least_room(req(100, 500), clip_new_tokens=20) == BASE + 12


def test_a_deferral_for_tokens_tells_what_was_wanted_and_what_there_was() -> None:
    decision = admission(room=90).decide(req(100, 8), match(), budget())
    assert decision == Defer(Reason.tokens, stands=True, needed=100 + 8 + PAGE, room=90)


# a prompt of 100 is seven pages, more than its window of two, and one page more is charged
SWA_NEEDED = 7 * PAGE + PAGE


@pytest.mark.parametrize(
    ("found", "spent", "more"),
    [
        (match(), budget(), 0),
        (match(), budget(reserved_swa=30), 30),
        (match(usable=64, swa_host=20), budget(), -64 + 2 * PAGE),  # 20 are loaded as two pages
    ],
    ids=["alone", "beside_others", "host_hit"],
)
def test_a_window_pool_with_room_to_spare_admits(found: Any, spent: StepBudget, more: int) -> None:
    least = SWA_NEEDED + more + 1
    assert admission(swa_room=least).decide(req(), found, spent) == Admit(4096)
    decision = admission(swa_room=least - 1).decide(req(), found, spent)
    assert decision == Defer(Reason.swa_tokens, stands=True)


@pytest.mark.parametrize("pages", [10, None])
def test_a_passing_shortage_of_window_pages_is_waited_for(pages: int | None) -> None:
    decision = admission(swa_room=100, swa_pages=pages).decide(req(), match(), budget())
    assert decision == Defer(Reason.swa_tokens, stands=True)


@pytest.mark.parametrize(
    ("prompt", "reserved", "chunk"),
    [
        (144, 0, 112),  # its window, a page and this fill the pool of 160
        (4000, 0, 112),
        (4000, 15, 96),  # whole pages of what is left
        (4000, 111, None),
        (4000, 112, None),
    ],
)
def test_a_prompt_that_a_window_pool_can_never_hold_starts_with_a_chunk_that_it_can(
    prompt: int, reserved: int, chunk: int | None
) -> None:
    judging = admission(swa_room=10 * PAGE, swa_pages=10)
    decision = judging.decide(req(prompt), match(), budget(reserved_swa=reserved))
    assert decision == (Defer(Reason.swa_tokens, stands=True) if chunk is None else Admit(chunk))


def test_a_chunk_made_to_fit_is_no_longer_than_the_step_allows() -> None:
    judging = admission(swa_room=10 * PAGE, swa_pages=10)
    assert judging.decide(req(4000), match(), budget(chunk=4096, reserved_swa=0)) == Admit(112)
    judging = admission(swa_room=10 * PAGE, swa_pages=4)
    assert judging.decide(req(4000), match(), budget(chunk=64)) == Admit(64)


class Doubled:
    """A charge that grows by two tokens with each token of the chunk."""

    def window_charge(self, *, extend: int, chunk: int, page: int, **_: int) -> int:
        return 2 * min(extend, chunk) + page


class Squared:
    """A charge that grows faster than the chunk: 1 token for the first page of it, 4 for two ..."""

    def window_charge(self, *, extend: int, chunk: int, page: int, window: int, **_: int) -> int:
        return (max(min(extend, chunk) - window, 0) // page) ** 2


@pytest.mark.parametrize(("charge", "chunk"), [(Doubled, 64), (Squared, 192)])
def test_a_chunk_is_made_to_fit_by_the_charge_itself(charge: type, chunk: int) -> None:
    judging = admission(swa_room=10 * PAGE, swa_pages=10, window_charge=charge().window_charge)
    assert judging.decide(req(4000), match(), budget()) == Admit(chunk)


@pytest.mark.parametrize("form", SWA_BUDGETS)
def test_a_chunk_made_to_fit_is_what_the_window_and_the_host_hit_leave(form: str) -> None:
    for max_new, window_taken in ((8, 8), (500, WINDOW)):
        held = window_taken if form == "sglang_0_5_23" else WINDOW
        for swa_host in (0, 20):
            host = {"no_host_term": 0, "double": 2}.get(form, 1) * ceil_page(swa_host, PAGE)
            for room, chunk in ((1000, 4096), (1003, 500), (1000, 64)):
                judging = admission(swa_room=room, swa_pages=4, swa_budget=form)
                fits = (room - held - PAGE - host) // PAGE * PAGE
                decision = judging.decide(
                    req(4000, max_new), match(swa_host=swa_host), budget(chunk=chunk)
                )
                assert decision == Admit(min(chunk, fits))


def test_a_chunk_of_one_token_will_do_where_a_page_is_no_longer() -> None:
    cache: Any = SimpleNamespace(
        page_size=1,
        tree=SimpleNamespace(kinds=named_kinds(1, window_len=WINDOW)),
        room=lambda kind=FULL: {FULL: PLENTY, SWA: WINDOW + 2}[kind],
        pools=[[None, PageAllocator(WINDOW + 2), None]],
        taken=lambda kind, claims: claims.get(kind, 0),
        device=SimpleNamespace(is_shared=False),
    )
    charge = presets(world_of()).requests.window_charge
    admission = Admission(cache, SchedulerConfig(), charge)
    assert admission.decide(req(4000), match(), budget()) == Admit(1)


def test_a_state_takes_two_slots_and_one_more_where_it_is_loaded_back() -> None:
    assert admission(slots=2).decide(req(), match(), budget()) == Admit(4096)
    assert admission(slots=1).decide(req(), match(), budget()) == Defer(Reason.slots, stands=True)
    assert admission(slots=3).decide(req(), match(state_host=1), budget()) == Admit(4096)
    decision = admission(slots=2).decide(req(), match(state_host=1), budget())
    assert decision == Defer(Reason.slots, stands=True)


def test_a_prompt_cut_short_is_promised_its_rest_and_a_page() -> None:
    spent = budget(reserved=7)
    admission().reserve(req(100, 8), 64, spent)
    assert spent.reserved_tokens == 7 + 36 + PAGE


def test_a_whole_prompt_is_promised_its_answer_up_to_the_clip_and_a_page() -> None:
    for answer, promised in ((8, 8), (500, 20)):
        spent = budget(reserved=7)
        admission(clip_new_tokens=20).reserve(req(100, answer), 100, spent)
        assert spent.reserved_tokens == 7 + promised + PAGE


def test_a_window_is_promised_what_the_first_chunk_does_not_take() -> None:
    spent = budget(chunk=48, reserved_swa=5)
    admission(swa_room=PLENTY).reserve(req(100), 48, spent)
    assert spent.reserved_windows[SWA] == 5 + PAGE  # the chunk of 48 is charged 48 and a page
    spent = budget(chunk=48, reserved_swa=5)
    admission(swa_room=PLENTY).reserve(req(100, computed=60), 92, spent)
    assert spent.reserved_windows[SWA] == 5 + 48 + PAGE - 32  # of three pages it takes two


def test_a_window_that_takes_more_than_it_was_charged_is_promised_nothing() -> None:
    spent = budget(chunk=16, reserved_swa=5)
    admission(swa_room=PLENTY).reserve(req(100), 96, spent)
    assert spent.reserved_windows[SWA] == 5


def test_without_a_window_nothing_is_promised_of_one() -> None:
    spent = budget()
    admission().reserve(req(100), 64, spent)
    assert spent.reserved_windows == {SWA: 0}


def test_those_that_run_are_promised_a_share_of_their_answers() -> None:
    judging = admission(clip_new_tokens=60, new_token_ratio=0.5)
    assert judging.reserved_tokens([req(answer=40), req(answer=100)], None) == 0.5 * (40 + 60)


def test_a_half_computed_prompt_is_promised_its_rest_a_page_and_a_share_of_its_answer() -> None:
    judging = admission(clip_new_tokens=60, new_token_ratio=0.5)
    half = req(100, answer=100, computed=64)
    assert judging.reserved_tokens([], half) == 36 + PAGE + 0.5 * 60


def test_no_more_is_reserved_at_first_than_ever_after() -> None:
    judging = admission(new_token_ratio=0.05, new_token_ratio_floor=0.3)
    assert judging.new_token_ratio.after() == 0.05
    judging.new_token_ratio.decoded(10_000)
    assert judging.new_token_ratio.after() == 0.05
