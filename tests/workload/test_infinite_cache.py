"""The yardstick itself, on requests whose hits are known."""

from pathlib import Path

import pytest

from tests.workload.infinite_cache import token_hit_rate
from tests.workload.traces import Row, load_rows


def test_the_first_of_equal_prompts_hits_nothing_and_the_second_all_but_its_last_page(
    tmp_path: Path,
) -> None:
    rows: list[Row] = [(0, 1024, 1, [0, 1]), (1, 1024, 1, [0, 1])]
    assert token_hit_rate(load_rows(tmp_path, rows)) == pytest.approx(960 / 2048)


def test_answers_count_as_inserted(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 300, [0, 1, 2]), (1, 1400, 1, [0, 1, 3])]
    assert token_hit_rate(load_rows(tmp_path, rows)) == pytest.approx(1280 / 2430)


def test_a_hit_at_ends_stops_where_an_earlier_request_ended(tmp_path: Path) -> None:
    # 1,536 tokens in common, but the first ends at 2,000 and 2,001
    rows: list[Row] = [(0, 2000, 1, [0, 1, 2, 3]), (1, 2000, 1, [0, 1, 2, 4])]
    requests = load_rows(tmp_path, [*rows, (2, 2600, 1, [0, 1, 2, 4, 5, 6])])
    assert token_hit_rate(requests[:2]) == pytest.approx(1984 / 4000)
    assert token_hit_rate(requests[1:], only_ends=True) == pytest.approx(1984 / 4600)
