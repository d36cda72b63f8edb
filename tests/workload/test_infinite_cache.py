"""The measure of hit rates itself, on requests whose hits are known."""

import pytest

from tests.workload.infinite_cache import token_hit_rates
from tests.workload.traces import Row, load_rows

TWICE: list[Row] = [(0, 1024, 1, [0, 1]), (1, 1024, 1, [0, 1])]
ANSWERED: list[Row] = [(0, 1030, 300, [0, 1, 2]), (1, 1400, 1, [0, 1, 3])]
BRANCHED: list[Row] = [(0, 600, 1, [0, 1]), (1, 1100, 1, [0, 2, 3])]


@pytest.mark.parametrize(
    ("rows", "hit", "at_ends"),
    [
        (TWICE, 960 / 2048, 0),  # all but the last page of the second
        (ANSWERED, 1280 / 2430, 1280 / 2430),  # with the answer
        (BRANCHED, 512 / 1700, 0),
    ],
)
def test_hit_rates_count_whole_pages(tmp_path, rows, hit, at_ends):
    found = token_hit_rates(load_rows(tmp_path, rows))
    assert found == pytest.approx((hit, at_ends))
