import hashlib
from collections import Counter
from itertools import pairwise

import numpy as np

from experiments.diff.compare import token_ids
from experiments.diff.edges import COUNT, NAME, PAGE, POOLS, edges
from experiments.diff.pages import page_names
from experiments.diff.protocol import COMPONENTS
from experiments.diff.rooms import chosen, pools_for

REQUESTS = edges()


def test_requests_of_edge_cases_are_the_same_in_every_run() -> None:
    again = edges(30)
    assert len(again) == 30
    assert len(REQUESTS) == COUNT
    for one, other in zip(REQUESTS, again, strict=False):
        assert np.array_equal(token_ids(one), token_ids(other))
        assert one.prompt_len == other.prompt_len
    assert POOLS.is_eventful
    # the counts in docs/diff.md are of these requests
    text = b"".join(token_ids(each).tobytes() + bytes([each.output_len]) for each in REQUESTS)
    assert hashlib.sha256(text).hexdigest().startswith("530c1af02cd7")
    assert all(before.arrival_ns < after.arrival_ns for before, after in pairwise(REQUESTS))


def test_lengths_are_at_the_boundaries_of_pages_and_thresholds() -> None:
    assert max(each.prompt_len + each.output_len for each in REQUESTS) <= POOLS.max_len
    rests = Counter(each.prompt_len % PAGE for each in REQUESTS)
    assert min(rests[0], rests[1]) > COUNT / 20
    lengths = Counter(each.prompt_len for each in REQUESTS)
    assert min(lengths[280], lengths[300]) > COUNT / 50
    assert len(lengths) > COUNT / 4


def test_prompts_begin_continue_branch_and_repeat() -> None:
    seen: set[int] = set()
    hows: Counter[str] = Counter()
    for each in REQUESTS:
        names = page_names(token_ids(each), PAGE)
        known = sum(name in seen for name in names[: each.prompt_len // PAGE])
        if not known:
            hows["begins"] += 1
        elif known == each.prompt_len // PAGE:
            hows["repeats"] += 1
        else:
            hows["goes on"] += 1
        seen.update(names)
    assert min(hows.values()) > COUNT / 10
    assert len(hows) == 3


def test_every_kind_has_pools_that_the_requests_overflow() -> None:
    tokens = len({name for each in REQUESTS for name in page_names(token_ids(each), PAGE)}) * PAGE
    for kind in COMPONENTS:
        pools = pools_for(NAME, kind, "", "instant")
        assert pools.components == tuple(dict.fromkeys(("full", kind)))
        assert 4 * pools.max_len < pools.device_tokens < pools.host_tokens < tokens / 4
    assert chosen(NAME, 7, POOLS)[-1].id == 6
