"""The peers of the bench move the right bytes, and as widely as the engines say of theirs."""

import pytest
import torch

from hicache.kernels import contract
from hicache.kernels.bench import peers
from hicache.kernels.bench.gemm import persistent_gemm
from hicache.kernels.check import check

RUN_HERE = [
    "vllm_blocks", "vllm_states", "vllm_states_tiled", "sgl_warps", "sglang_slots",
    "sglang_unified", "memcpy_each",
]  # fmt: skip


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_peer_is_right_in_every_case_it_takes(name):
    verdict = check(peers.PEERS[name], num_cases=10)
    assert verdict.passes, str(verdict)


def test_the_unified_peer_takes_head_groups():
    pages = torch.arange(3 * 2 * 4 * 2).view(3, 2, 4, 2)  # page token head dim, int64
    group = torch.zeros(5, 2, 2, 2, dtype=torch.int64)
    ids = torch.tensor([2, 0], dtype=torch.int32)
    peers.sglang_unified([pages[:, :, 2:]], [group])(ids, ids + 1)
    assert torch.equal(group[[3, 1]], pages[[2, 0], :, 2:])
    assert not group[[0, 2, 4]].any()


@pytest.mark.parametrize("name", sorted(peers.PEERS.keys() - set(RUN_HERE)))
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may be there")
def test_what_needs_a_gpu_or_a_package_declines(name):
    pool = torch.zeros(2, 64)
    with pytest.raises(NotImplementedError, match=r"needs a GPU|SGLang cannot be imported"):
        peers.PEERS[name]([pool, pool], [pool.clone(), pool.clone()])


@pytest.mark.parametrize("num_programs", [1, 5])
def test_the_persistent_product_is_that_of_torch(num_programs, device, monkeypatch):
    monkeypatch.setattr("hicache.kernels.bench.gemm.num_sms", lambda device: num_programs)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*size, generator=generator) for size in ((40, 48), (48, 72)))
    a, b = (each.to(torch.float16).to(device) for each in (a, b))
    out = torch.full((41, 72), 7.0, dtype=torch.float16, device=device)
    persistent_gemm(a, b, out[:40], blocks=(16, 32, 32))
    torch.testing.assert_close(out[:40].float(), a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    assert bool((out[40] == 7).all())


def test_what_is_listed_beforehand_is_not_timed():
    src, dst = torch.arange(8).view(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    ids = torch.tensor([1, 3], dtype=torch.int32)
    launch = contract.bound(peers.memcpy_each([src], [dst]), ids, ids)
    ids.fill_(0)  # read when it was bound, not when it is launched
    launch()
    assert torch.equal(dst, torch.tensor([[0, 0], [2, 3], [0, 0], [6, 7]]))


def test_a_kernel_without_a_list_is_launched_as_it_is():
    calls = []

    def launch(src_ids, dst_ids, *, num_programs=None):
        calls.append((src_ids, dst_ids, num_programs))

    contract.bound(launch, 1, 2, num_programs=3)()
    assert calls == [(1, 2, 3)]
