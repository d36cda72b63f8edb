"""A run of decode steps: which end times are known, what cuts it, and what is committed when."""

from typing import Any

import pytest

from hicache.clock import NEVER
from hicache.engine.decode_run import DecodeRun
from hicache.executor.completions import StepEnds

WRITE: Any = object()
OTHER: Any = object()


def run_of(*blocks: list[int]) -> DecodeRun:
    """A run whose step ends become known block by block."""
    more = (block for block in blocks)
    return DecodeRun(StepEnds(next(more), more), sum(map(len, blocks)), 0)


def ends_left(run: DecodeRun) -> list[int]:
    """The ends of the steps that the engine has not committed."""
    run._ends.look(NEVER)
    return run._ends.known[run.num_taken : run._last + 1]


def test_step_ends_are_computed_up_to_the_next_event() -> None:
    run = run_of([200], [300, 400], [500])
    seen = [(run.look_on(until_ns, NEVER), run.end_ns) for until_ns in (100, 400, NEVER)]
    assert seen == [(True, 400), (True, 500), (False, 500)]


def test_no_step_end_is_computed_beyond_a_deadline() -> None:
    run = run_of([200], [300])
    assert [run.look_on(NEVER, deadline_ns) for deadline_ns in (200, 201)] == [False, True]
    assert run.end_ns == 300


def test_run_is_no_longer_than_its_batch() -> None:
    run = DecodeRun(StepEnds([100, 200, 300]), 2, 0)
    assert (run.end_ns, run.num_priced) == (200, 2)
    assert not run.look_on(NEVER, NEVER)


@pytest.mark.parametrize(
    ("now_ns", "end_ns", "is_shorter"),
    [(0, 100, True), (100, 100, True), (101, 200, True), (201, 300, False), (900, 300, False)],
)
def test_event_ends_a_run_with_the_step_in_progress(
    now_ns: int, end_ns: int, *, is_shorter: bool
) -> None:
    run = run_of([100, 200, 300])
    assert (run.cut(now_ns), run.end_ns) == (is_shorter, end_ns)
    assert not run.look_on(NEVER, NEVER)


def test_ended_steps_are_committed_with_the_storage_writes_that_finished_during_them() -> None:
    run = run_of([100, 200, 300])
    run.note_write(WRITE, 150)
    run.note_write(OTHER, 160)
    assert list(run.take_before(200)) == [(1, 100, None)]
    assert ends_left(run) == [200, 300]
    assert list(run.take_before(201)) == [(1, 200, WRITE), (0, 200, OTHER), (0, 200, None)]
    assert list(run.take(run.num_priced)) == [(1, 300, None)]
    assert run.num_taken == 3
