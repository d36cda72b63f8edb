"""Copies into the device go together as far as their order allows."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import CopyState, LoadBack, Move
from hicache.executor.real.model_runner import merged


def ids(*values):
    return np.array(values, np.int32)


def load_back(*moves):
    return LoadBack(
        moves=[Move(kind, ids(*s), ids(*t)) for kind, s, t in moves],
        num_bytes=0,
        node=None,
    )


def copy_state(source, target):
    return CopyState(source=ids(source), target=ids(target))


@pytest.mark.parametrize(
    ("pending", "wanted"),
    [
        ([], []),
        (
            [load_back((FULL, [1], [2]), (SWA, [3], [4])), load_back((FULL, [5, 6], [7, 8]))],
            [(False, FULL, [1, 5, 6], [2, 7, 8]), (False, SWA, [3], [4])],
        ),
        # one slot for two requests
        ([copy_state(1, 2), copy_state(1, 3)], [(True, MAMBA, [1, 1], [2, 3])]),
        # what was just written is read: not together
        ([copy_state(1, 2), copy_state(2, 3)], [(True, MAMBA, [1], [2]), (True, MAMBA, [2], [3])]),
        ([copy_state(1, 2), copy_state(3, 1)], [(True, MAMBA, [1], [2]), (True, MAMBA, [3], [1])]),
        # one page for two, one after another
        (
            [load_back((FULL, [1], [2])), load_back((FULL, [3], [2]))],
            [(False, FULL, [1], [2]), (False, FULL, [3], [2])],
        ),
        # a state is loaded, given to a request, and its slot is loaded anew
        (
            [load_back((MAMBA, [1], [2])), copy_state(2, 3), load_back((MAMBA, [4], [2]))],
            [(False, MAMBA, [1], [2]), (True, MAMBA, [2], [3]), (False, MAMBA, [4], [2])],
        ),
    ],
)
def test_copies_are_merged_by_component_and_never_out_of_order(pending, wanted):
    got = [
        (is_within, move.kind, move.sources, move.targets)
        for is_within, moves in merged(pending)
        for move in moves
    ]
    assert got == wanted
