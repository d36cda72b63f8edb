"""Real pools launch copies across the link as the machine's profile says."""

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.tiers.transfer import Move
from hicache.executor.real.plane import REFERENCE, Plane
from hicache.executor.real.pools import Arrival
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny


def test_pages_from_storage_are_hashed_on_the_host_as_the_kernel_hashes_them():
    pools = cpu_pools(tiny("F M", 4), 4, (4, 0, 4), (4, 0, 4))
    rank = pools.ranks[0]
    for pool in (*rank.kv.values(), *rank.taps, *rank.states):
        pool.normal_(generator=torch.Generator().manual_seed(0))
    ids = np.array([1, 3], np.int32)
    pools.save([Move(FULL, ids, ids), Move(MAMBA, ids, ids)])
    items = [(FULL, 3), (MAMBA, 1), (FULL, 1), (MAMBA, 3)]
    saved = rank.sums(items)
    assert len(set(saved)) == 4
    for sums in rank._sums.values():
        sums.zero_()
    assert rank.new_sums(items) == rank.sums(items) == saved
    rank.host[FULL][3, 5] ^= 1
    assert rank.new_sums(items[:2]) == [rank.sums(items)[0], saved[1]]
    assert rank.sums(items)[0] != saved[0]


@pytest.mark.parametrize("link_programs", [None, 3])
def test_a_load_back_takes_the_programs_of_the_profile_and_other_copies_the_kernels_choice(
    link_programs,
):
    launched = []

    def seen(copy):
        def launch(*arguments, num_programs=None):
            launched.append(num_programs)
            return copy(*arguments, num_programs=num_programs)

        return launch

    pools = cpu_pools(
        tiny("F M", 4),
        4,
        (4, 0, 4),
        (4, 0, 4),
        link_programs=link_programs,
        plane=Plane(*map(seen, REFERENCE)),
    )
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    pools.save([Move(FULL, one, two)])
    pools.load(
        [
            Arrival(is_within=False, moves=[Move(FULL, two, one)]),
            Arrival(is_within=True, moves=[Move(MAMBA, one, two)]),
        ]
    )
    pools.copy_states(two, one)
    assert launched == [None, link_programs, None, None]
