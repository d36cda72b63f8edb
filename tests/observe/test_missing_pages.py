"""After which pages a request can resume, as the explanation of missing pages computes it."""

from random import Random

import numpy as np
import pytest

from hicache.cache.kinds import Window
from hicache.observe.missing_pages import _has_last


@pytest.mark.parametrize("is_chunk", [False, True])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("num_pages", [1, 2, 3, 7])
def test_a_request_resumes_where_its_whole_window_is_cached(num_pages, start, *, is_chunk):
    window, random = Window(num_pages, is_chunk), Random(num_pages + start)
    for _ in range(20):
        flags = np.array([random.random() < 0.8 for _ in range(12)])
        wanted = [
            all(flags[max(window.first(start + end) - start, 0) : end])
            for end in range(1, len(flags) + 1)
        ]
        assert _has_last(flags, window, start).tolist() == wanted
