"""Numbers that name the pages of a simulated workload."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.tree.keys import KIND_STEP, NUMBER_BYTES, Numbers
from hicache.request import TokenSpans, byte_places
from hicache.workload.runs import to_spans


def test_the_byte_places_of_numbers_are_right_beyond_two_gigabytes():
    span = TokenSpans(np.zeros(1, np.int32), np.full(1, 1 << 20, np.int32))
    places = byte_places(dict.fromkeys(range(3000), span), NUMBER_BYTES)  # some 2**31.5 pages
    assert places == {each: (each << 22, (each + 1) << 22) for each in range(3000)}


def test_numbers_of_several_runs_are_those_of_the_pages():
    runs = {0: [(0, 3), (7, 2)], 1: [(5, 1)], 2: [], 3: [(1, 2), (0, 1), (9, 1)]}
    names = Numbers({each: to_spans(pairs) for each, pairs in runs.items()})
    for each, pairs in runs.items():
        wanted = [first + step for first, count in pairs for step in range(count)]
        numbers = names.tokens(SimpleNamespace(id=each))  # type: ignore[arg-type]
        assert memoryview(numbers).cast("i").tolist() == wanted


def test_a_workload_of_too_many_pages_is_rejected():
    few = TokenSpans(np.full(1, KIND_STEP - 1, np.int32), np.ones(1, np.int32))
    Numbers({0: few})
    with pytest.raises(ValueError, match="pages at most"):
        Numbers({0: TokenSpans(few.starts + 1, few.counts)})
