from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from experiments.diff.compare import token_ids
from experiments.diff.odd import NAME, POOLS, WINDOW, odd
from experiments.diff.rooms import chosen


def test_odd_requests_depend_on_seed_and_page_size_only() -> None:
    seen = {}
    for seed, page in ((1, 16), (1, 64), (2, 64)):
        first, again = (
            [token_ids(each).tobytes() for each in odd(30, seed, page)] for _ in range(2)
        )
        assert first == again
        seen[seed, page] = first
    assert len({tuple(each) for each in seen.values()}) == 3
    drawn = chosen(NAME, 30, replace(POOLS, page_size=16), seed=1)
    assert [token_ids(each).tobytes() for each in drawn] == seen[1, 16]


@pytest.mark.parametrize("page", [16, 64, 128])
def test_prompts_repeat_grow_and_shrink_by_a_token_and_branch_within_a_window(page: int) -> None:
    requests = odd(300, 5, page)
    prompts = [token_ids(each)[: each.prompt_len] for each in requests]
    hows: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        for other in prompts[max(number - 12, 0) : number]:
            length = min(len(prompt), len(other))
            same = int(np.argmin(np.append(prompt[:length] == other[:length], False)))
            if same == len(prompt) == len(other):
                hows["repeats"] += 1
            elif same == length and abs(len(prompt) - len(other)) == 1:
                hows["a token more" if len(prompt) > len(other) else "a token less"] += 1
            elif 0 < len(other) - same <= WINDOW and same:
                hows["branches"] += 1
    assert len(hows) == 4
    assert min(hows.values()) > 10
    rests = {len(prompt) % page for prompt in prompts}
    assert {0, 1, page - 1} < rests
    assert max(each.prompt_len + each.output_len for each in requests) <= POOLS.max_len
