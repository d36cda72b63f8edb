"""The rows of a step name the pages of its sequences, and of windows those that they look at."""

import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.cache.tree.sequence import Sequence
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.tables import StepTables, Stretch
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny

PAGE, WINDOW = 4, 8
END = 26  # pages [0, 7)


@pytest.fixture
def pools() -> TorchPools:
    return cpu_pools(tiny("F S", PAGE), PAGE, (20, 20, 0), (1, 1, 0))


def sequence(full: list[int], swa: list[int]) -> Sequence:
    made = Sequence(b"")
    made.pages = [list(full), list(swa)]
    made.num_pages = len(full)
    return made


def test_rows_are_the_pages_of_each_sequence(pools):
    # the second shares pages 0 to 2 with the first, whose window has long left them: what it still
    # calls their SWA pages is somebody else's by now
    first = sequence([3, 5, 7, 2, 9, 1, 8], [11, 12, 13, 4, 6, 10, 0])
    second = sequence([3, 5, 7, 15], [14, 2, 3, 5])
    stretches = [Stretch(first, END - 1, END), Stretch(second, 12, 16)]
    rows = StepTables(pools, WINDOW).rows(stretches)
    assert rows[0][FULL].pages(0, 7).tolist() == first.pages[FULL]
    assert rows[1][FULL].pages(0, 4).tolist() == second.pages[FULL]
    assert rows[0][SWA].pages(4, 7).tolist() == [6, 10, 0]
    assert rows[1][SWA].pages(1, 4).tolist() == [2, 3, 5]


def test_a_page_before_the_window_is_refused(pools):
    its = sequence(list(range(7)), list(range(7)))
    (row,) = StepTables(pools, WINDOW).rows([Stretch(its, END - 1, END)])
    with pytest.raises(AssertionError, match="pages from 4 on, got 3"):
        row[SWA].pages(3, 7)


def test_a_step_of_nothing_has_no_rows(pools):
    assert StepTables(pools, WINDOW).rows([]) == []
