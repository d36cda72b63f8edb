"""What a session of the bench writes down, in seconds and 10**9 bytes a second."""

import math
from types import SimpleNamespace

import pytest

from hicache.workbench.bench.measure import Timing
from hicache.workbench.bench.session import Cell, Goal, Record, Session


class Watch:
    """A bench that says what it is asked, and that every launch takes 2 s."""

    def __init__(self):
        self.asked = []

    def timed(self, launch, *, repeats):
        self.asked.append(("timed", launch, repeats))
        return Timing(p20_s=1.0, p50_s=2.0, p80_s=3.0)

    def verify(self, transfer, launch):
        self.asked.append(("verify", transfer, launch))


def test_a_rate_is_of_the_bytes_that_arrive_at_the_median():
    session = Session(Watch())
    assert session.time("pages", "all", "launch", 6 * 10**9, repeats=4, size=7) == 3
    (record,) = session.records
    timing = Timing(p20_s=1.0, p50_s=2.0, p80_s=3.0)
    assert record == Record(
        op="pages", case="all", num_bytes=6 * 10**9, timing=timing, parameters={"size": 7}
    )
    assert record.gb_per_s == 3
    assert session.bench.asked == [("timed", "launch", 4)]
    cell = Cell(direction="device", num_bytes=3 * 10**9, kernel="ours", p50_s=0.5)
    assert (cell.gb_per_s, cell.remark) == (6, "")
    without = Cell(direction="device", num_bytes=1, kernel="ours", p50_s=math.nan)
    assert math.isnan(without.gb_per_s)


@pytest.mark.parametrize("given", [None, "theirs"])
def test_a_launch_is_verified_before_it_is_timed(given):
    session = Session(Watch())
    transfer = SimpleNamespace(launch="own", num_bytes=2 * 10**9)
    assert session.verified("pages", "all", transfer, given, repeats=5, n=1) == 1
    launch = given or "own"
    assert session.bench.asked == [("verify", transfer, launch), ("timed", launch, 5)]
    assert session.records[0].parameters == {"n": 1}


def test_goals_are_kept_in_order_with_what_was_wanted():
    session = Session(Watch(), {"mine": "kernel"})
    session.at_least("G1", "a", 0.5, 0.5)
    session.at_most("G2", "b", 3.0, 2.5)
    session.at_most("G3", "c", math.nan, 1.0)
    session.unmeasured("G4", "d", ">= 1", "no link")
    assert session.goals[:2] == [
        Goal(goal="G1", what="a", wanted=">= 0.5", got=0.5, holds=True),
        Goal(goal="G2", what="b", wanted="<= 2.5", got=3.0, holds=False),
    ]
    third, fourth = session.goals[2:]
    assert (third.wanted, third.holds, third.why) == (
        "<= 1", None, "not timed"
    )  # fmt: skip
    assert (fourth.goal, fourth.what, fourth.wanted, fourth.why) == ("G4", "d", ">= 1", "no link")
    assert math.isnan(third.got)
    assert math.isnan(fourth.got)
    assert session.kernels == {"mine": "kernel"}
