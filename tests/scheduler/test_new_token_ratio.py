"""Which share of the answers to come is reserved: it falls step by step, and jumps up again."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.config import SchedulerConfig
from hicache.scheduler.admission import NewTokenRatio


def ratio(first: float = 0.7, floor: float = 0.1, decay_steps: int = 600) -> NewTokenRatio:
    return NewTokenRatio(
        SchedulerConfig(
            new_token_ratio=first,
            new_token_ratio_floor=floor,
            new_token_ratio_decay_steps=decay_steps,
        )
    )


def left(decoded: int, max_new: int, running: int) -> list[Any]:
    """So many requests, with these sums of answer tokens."""
    counts = [(decoded, max_new)] + [(0, 0)] * (running - 1)
    return [
        SimpleNamespace(decoded=done, request=SimpleNamespace(output_len=length))
        for done, length in counts
    ]


@pytest.mark.parametrize(("steps", "share"), [(0, 0.7), (150, 0.55), (600, 0.1), (900, 0.1)])
def test_it_falls_in_a_line_to_its_floor_and_stays_there(steps: int, share: float) -> None:
    falling = ratio()
    assert falling.after(steps) == pytest.approx(share)
    falling.decoded(steps)
    assert falling.after() == pytest.approx(share)


def test_steps_add_up() -> None:
    falling = ratio()
    falling.decoded(100)
    falling.decoded(50)
    assert falling.after(150) == pytest.approx(0.4)


def test_without_steps_to_fall_in_it_is_at_its_floor_after_one() -> None:
    assert ratio(decay_steps=0).after() == 0.7
    assert ratio(decay_steps=0).after(1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("decoded", "max_new", "running", "share"),
    [
        (50, 199, 2, 0.45),  # (50 + 20 · 2) / (199 + 1)
        (0, 999, 1, 0.02),  # lower than the floor until the next step
        (500, 99, 4, 1.0),  # no higher than all of it
    ],
)
def test_a_retraction_starts_it_from_what_the_running_turned_out_to_need(
    decoded: int, max_new: int, running: int, share: float
) -> None:
    falling = ratio()
    falling.decoded(400)
    falling.retracted(left(decoded, max_new, running))
    assert falling.after() == pytest.approx(share)


def test_after_a_retraction_it_falls_as_fast_as_before() -> None:
    falling = ratio()
    falling.decoded(400)
    falling.retracted(left(50, 199, 2))
    assert falling.after(100) == pytest.approx(0.35)
