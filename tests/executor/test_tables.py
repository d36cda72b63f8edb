"""The tables of a step name what each tile reads: its pages, or those of its window."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.tables import HoleError, StepTables, Stretch
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny

PAGE = 4  # and a window of 10 tokens
TOKENS = np.arange(100, 200, dtype=np.int32).tobytes()
FIRST = Stretch(TOKENS, 25, 26, [[3, 5, 7, 2, 9, 1, 8], [-1, -1, -1, 4, 6, 10, 0]], slot=2)
SECOND = Stretch(TOKENS, 10, 16, [[3, 5, 7, 15], [14, 2, 3, 5]], slot=1, captures=[(12, 3)])


@pytest.fixture
def pools() -> TorchPools:
    return cpu_pools(tiny("F S M", PAGE), PAGE, (20, 20, 4), (1, 1, 0))


def test_tiles_list_the_pages_they_attend_to_and_the_rows_of_their_tokens(pools):
    step = StepTables(pools, [FIRST, SECOND], 1)
    # [position of row 0, first row, end of the rows, pages left out]
    assert step.tiles[FULL].tolist() == [[24, 1, 2, 0], [8, 2, 4, 0], [12, 0, 4, 0]]
    pages = [[3, 5, 7, 2, 9, 1, 8], [3, 5, 7, 0, 0, 0, 0], [3, 5, 7, 15, 0, 0, 0]]
    assert step.tables[FULL].tolist() == pages
    # a window names no page before it
    assert step.tiles[SWA].tolist() == [[24, 1, 2, 3], [8, 2, 4, 0], [12, 0, 4, 0]]
    assert step.tables[SWA].tolist() == [[4, 6, 10, 0], [14, 2, 3, 0], [14, 2, 3, 5]]
    rows = step.tokens.flatten()
    assert [rows[its].tolist() for its in step.rows] == [[125], [*range(110, 116)]]
    assert step.ends.tolist() == [[1, 2], [2, 3], [6, 1]]
    assert step.sequences[:, 2:].tolist() == [[0, 1, 25], [1, 3, 10]]


def test_the_last_group_of_tiles_is_padded_with_tiles_without_rows(pools):
    step = StepTables(pools, [FIRST, SECOND], 2)
    assert [group.tiles for group in step.groups] == [slice(0, 2), slice(2, 4)]
    assert [group.end for group in step.groups] == [26, 16]
    assert [group.pages for group in step.groups] == [[(6, 2), (2, 4)], [(3, 4)]]
    assert step.tiles[FULL][3].tolist() == step.tiles[SWA][3].tolist() == [0, 0, 0, 0]
    assert step.tokens.shape == (4, PAGE)


@pytest.mark.parametrize("kind", [FULL, SWA])
def test_a_missing_page_that_a_tile_attends_to_is_an_error(pools, kind):
    pages = [list(each) for each in FIRST.pages]
    pages[kind][5] = -1
    with pytest.raises(HoleError, match="at least one is missing"):
        StepTables(pools, [FIRST._replace(pages=pages)], 1)
