from dataclasses import replace

import numpy as np

from experiments.diff.pages import NodeView, PageSpan, page_names, page_span, state_of
from tests.diff.sides import POOLS

TOKENS = np.arange(20, dtype=np.int32)


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    names = page_names(TOKENS, 4)
    assert len(set(names)) == 5
    assert page_names(TOKENS[:11], 4) == names[:2]  # whole pages alone
    assert page_names(TOKENS[:3], 4) == []
    other = TOKENS.copy()
    other[0] = 99
    assert not set(page_names(other, 4)) & set(names)
    assert all(0 < name < 1 << 64 for name in names)


def test_names_of_pages_can_continue_from_the_name_of_a_page() -> None:
    names = page_names(TOKENS, 4)
    assert page_names(TOKENS[8:], 4, names[1]) == names[2:]
    assert page_names(TOKENS[8:], 4) != names[2:]
    assert page_span(TOKENS[8:], 4, names[1]) == (3, sum(names[2:]), names[-1])


def test_locked_pages_count_by_their_tokens_and_a_state_counts_once() -> None:
    pools = replace(POOLS, num_states=3)
    nodes = [
        NodeView(
            PageSpan(2, 12, 7),
            ["full/device", "mamba/device"],
            {"full/device": 2, "mamba/device": 3},
        ),
        NodeView(
            PageSpan(1, 11, 11), ["full/device", "full/host"], {"full/device": 1, "full/host": 1}
        ),
        NodeView(PageSpan(1, (1 << 64) - 1, (1 << 64) - 1), ["full/host"], {}),
    ]
    assert state_of(nodes, pools) == {
        "locked/full/device": 2 * 8 + 4,
        "locked/full/host": 4,
        "locked/mamba/device": 3,
        "locked/mamba/host": 0,
        "pages/full/device": 5 + 7 + 11,
        "pages/full/host": 11 - 1,
        "pages/mamba/device": 7,
        "pages/mamba/host": 0,
    }
    assert set(state_of([], POOLS).values()) == {0}
