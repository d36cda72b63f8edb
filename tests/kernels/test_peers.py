"""Peers of the bench (copy kernels of other engines): right bytes, and their engines' launches.

`tests/test_imitated_gpu.py` verifies those that need a GPU.
"""

import pytest
import torch
import triton.language as tl

from hicache.workbench import contract
from hicache.workbench.bench import peers
from hicache.workbench.check import check

RUN_HERE = [
    "vllm_blocks", "vllm_states", "vllm_states_tiled", "sgl_warps", "sglang_slots", "memcpy_each",
]  # fmt: skip


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_peer_copies_right_in_every_case_that_it_does_not_decline(name):
    # of so many small programs the interpreter runs fewer
    verdict = check(peers.PEERS[name], num_cases=3 if name == "vllm_states_tiled" else 10)
    assert verdict.num_right
    assert verdict.passes, str(verdict)


@pytest.mark.parametrize("name", sorted(peers.PEERS.keys() - set(RUN_HERE)))
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may be there")
def test_a_peer_that_needs_a_gpu_declines_without_one(name):
    pool = torch.zeros(2, 64)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        peers.PEERS[name]([pool, pool], [pool.clone(), pool.clone()])


@pytest.fixture
def launches(monkeypatch):
    """Launches of peers, which run nothing: the grid, the arguments and the constants."""
    listed = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: listed.append((grid, arguments, constants))

    monkeypatch.setattr(peers, "_pointer_copy_kernel", Kernel())
    return listed


@pytest.mark.parametrize(
    ("name", "word", "block", "num_warps", "grid"),
    [
        ("vllm_blocks", tl.int64, 1024, 4, (12, 1)),
        ("vllm_states", tl.int8, 1024, 4, (600, 1)),
        ("vllm_states_tiled", tl.int64, 1024, 4, (600, 16)),
        ("sgl_warps", tl.int64, 1024, 32, (2, 1)),
        ("sglang_slots", tl.int16, 8192, 8, (4 * 132, 1)),  # 4 an SM of an H200
    ],
)
def test_a_peer_is_launched_as_its_engine_launches_it(name, word, block, num_warps, grid, launches):
    src, dst = torch.zeros(2, 300, 4), torch.zeros(2, 310, 4)
    ids = torch.arange(300, dtype=torch.int32)
    launch = peers.PEERS[name](list(src), list(dst))
    launch(ids, ids + 10)
    launch(ids, ids + 10, num_programs=3)
    launch(ids[:0], ids[:0])
    assert [each[0] for each in launches] == [grid, (3, grid[1])]
    _, (sources, targets, words, num_items), constants = launches[0]
    assert sources.tolist() == [src.data_ptr() + 16 * item for item in range(600)]
    place = [i % 300 + 10 + i // 300 * 310 for i in range(600)]
    assert targets.tolist() == [dst.data_ptr() + 16 * item for item in place]
    assert words.tolist() == [16 * 8 // word.primitive_bitwidth] * 600
    assert num_items == 600
    assert constants == {"WORD": word, "BLOCK": block, "num_warps": num_warps}


def test_a_peer_lists_addresses_before_its_launch_and_not_in_it():
    src, dst = torch.arange(8).view(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    ids = torch.tensor([1, 3], dtype=torch.int32)
    launch = contract.bound(peers.memcpy_each([src], [dst]), ids, ids)
    ids.fill_(0)
    launch()
    assert torch.equal(dst, torch.tensor([[0, 0], [2, 3], [0, 0], [6, 7]]))
    plain = contract.bound(
        lambda *ids, num_programs=None: (ids, num_programs), 1, 2, num_programs=3
    )
    assert plain() == ((1, 2), 3)
