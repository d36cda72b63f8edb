"""Real pools launch copies across the link as the machine's profile says."""

import numpy as np
import pytest

from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.node import FULL, MAMBA
from hicache.executor.real import pools as torch_pools
from hicache.executor.real import rank_pools
from hicache.executor.real.pools import Arrival
from hicache.kernels import copy_pages, copy_pages_with_checksum
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny


@pytest.mark.parametrize("link_programs", [None, 3])
def test_copies_across_the_link_take_the_programs_of_the_profile(link_programs, monkeypatch):
    launched = []

    def seen(copy):
        def launch(table, *ids, num_programs=None, **others):
            launched.append(num_programs)
            return copy(table, *ids, num_programs=num_programs, **others)

        return launch

    for module, copy in ((torch_pools, copy_pages), (rank_pools, copy_pages_with_checksum)):
        monkeypatch.setattr(module, copy.__name__, seen(copy))
    pools = cpu_pools(
        tiny("F M", 4),
        4,
        (4, 0, 4),
        (4, 0, 4),
        layer_groups=[range(2)],
        link_programs=link_programs,
    )
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    pools.save([Move(FULL, one, two)])
    sent = pools.send(
        [
            Arrival(is_within=False, move=Move(FULL, two, one)),
            Arrival(is_within=True, move=Move(MAMBA, one, two)),
        ]
    )
    pools.load(sent, 0)
    pools.copy_states(two, one)
    assert launched == [link_programs, link_programs, None, None]
