"""A run of decode steps: what is priced, what cuts it, and what is taken in when."""

from typing import Any

import pytest

from hicache.clock import NEVER
from hicache.engine.decode_run import DecodeRun
from hicache.executor.completions import StepEnds

WRITE: Any = object()
OTHER: Any = object()


def run_of(*blocks: list[int], now_ns: int = 0) -> DecodeRun:
    """A run whose steps are priced block by block."""
    more = (block for block in blocks)
    return DecodeRun(StepEnds(next(more), more), sum(map(len, blocks)), now_ns)


def ends_left(run: DecodeRun) -> list[int]:
    """When the steps end that the engine has not committed."""
    run._ends.look(NEVER)
    return run._ends.known[run.num_taken : run._last + 1]


def test_steps_are_priced_as_far_as_no_event_comes() -> None:
    run = run_of([200], [300, 400], [500])
    seen = [(run.look_on(until_ns, NEVER), run.end_ns) for until_ns in (100, 400, NEVER)]
    assert seen == [(True, 400), (True, 500), (False, 500)]


def test_no_step_is_priced_beyond_a_deadline() -> None:
    run = run_of([200], [300])
    assert not run.look_on(NEVER, 200)
    assert run.look_on(NEVER, 201)
    assert run.end_ns == 300


def test_a_run_is_never_longer_than_its_batch() -> None:
    run = DecodeRun(StepEnds([100, 200, 300]), 2, 0)
    assert (run.end_ns, run.num_priced) == (200, 2)
    assert not run.look_on(NEVER, NEVER)


@pytest.mark.parametrize(
    ("now_ns", "end_ns", "is_shorter"),
    [(0, 100, True), (100, 100, True), (101, 200, True), (201, 300, False), (900, 300, False)],
)
def test_an_event_ends_a_run_with_the_step_at_hand(
    now_ns: int, end_ns: int, *, is_shorter: bool
) -> None:
    run = run_of([100, 200, 300])
    assert run.cut(now_ns) is is_shorter
    assert run.end_ns == end_ns
    assert not run.look_on(NEVER, NEVER)


def test_who_looks_takes_the_steps_that_ended_before() -> None:
    run = run_of([100, 200, 300])
    assert list(run.take_before(200)) == [(1, 100, None)]
    assert ends_left(run) == [200, 300]
    assert list(run.take_before(201)) == [(1, 200, None)]
    assert list(run.take(run.num_priced)) == [(1, 300, None)]
    assert run.num_taken == 3


def test_a_write_is_taken_in_at_the_end_of_the_step_in_which_it_was_done() -> None:
    run = run_of([100, 200, 300])
    run.note_write(WRITE, 150)
    run.note_write(OTHER, 160)
    taken = list(run.take(3))
    assert taken == [(2, 200, WRITE), (0, 200, OTHER), (1, 300, None)]


def test_a_write_that_is_not_due_stays() -> None:
    run = run_of([100, 200])
    run.note_write(WRITE, 150)
    assert list(run.take_before(200)) == [(1, 100, None)]
    assert list(run.take(2)) == [(1, 200, WRITE), (0, 200, None)]
