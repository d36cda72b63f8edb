"""The peers of the bench move the right bytes, and as widely as the engines say of theirs."""

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

from hicache.kernels import copy, copy_table
from hicache.workbench import contract
from hicache.workbench.bench import peers
from hicache.workbench.bench.gemm import persistent_gemm
from hicache.workbench.check import check

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


class Launched:
    """Stands for a kernel, and remembers how it was launched."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append((grid, arguments, constants))


@pytest.mark.parametrize(
    ("name", "word", "block", "num_warps", "grid"),
    [
        ("vllm_blocks", tl.int64, 1024, 4, (12, 1)),
        ("vllm_states", tl.int8, 1024, 4, (40, 1)),
        ("vllm_states_tiled", tl.int64, 1024, 4, (40, 16)),
        ("sgl_warps", tl.int64, 1024, 32, (2, 1)),
        ("sglang_slots", tl.int16, 8192, 8, (40, 1)),
    ],
)
def test_a_peer_is_launched_as_its_engine_launches_it(
    name, word, block, num_warps, grid, monkeypatch
):
    kernel = Launched()
    monkeypatch.setattr(peers, "_pointer_copy_kernel", kernel)
    src, dst = torch.zeros(2, 20, 32), torch.zeros(2, 30, 32)
    ids = torch.arange(20, dtype=torch.int32)
    launch = peers.PEERS[name](list(src), list(dst))
    launch(ids, ids + 10)
    launch(ids, ids + 10, num_programs=3)
    launch(ids[:0], ids[:0])
    assert [each[0] for each in kernel.launches] == [grid, (3, grid[1])]
    sources, targets, words, num_items = kernel.launches[0][1]
    assert sources.tolist() == [src.data_ptr() + 128 * item for item in range(40)]
    assert targets.tolist() == [
        dst.data_ptr() + 128 * (i % 20 + 10 + i // 20 * 30) for i in range(40)
    ]
    assert words.tolist() == [128 * 8 // word.primitive_bitwidth] * 40
    assert (num_items, len(kernel.launches[0][1])) == (40, 4)
    assert kernel.launches[0][2] == {"WORD": word, "BLOCK": block, "num_warps": num_warps}


def test_many_states_take_four_programs_an_sm_of_an_h200(monkeypatch):
    kernel = Launched()
    monkeypatch.setattr(peers, "_pointer_copy_kernel", kernel)
    pool, ids = torch.zeros(600, 4), torch.arange(600, dtype=torch.int32)
    peers.sglang_slots([pool], [pool.clone()])(ids, ids)
    assert kernel.launches[0][0] == (4 * 132, 1)


def test_the_unified_peer_takes_two_programs_a_buffer(monkeypatch):
    kernel = Launched()
    monkeypatch.setattr(peers, "_unified_copy_kernel", kernel)
    src, dst = torch.zeros(2, 5, 4, 2, 16), torch.zeros(2, 7, 4, 2, 16)
    ids = torch.arange(3, dtype=torch.int32)
    peers.sglang_unified(list(src), list(dst))(ids, ids)
    peers.sglang_unified(list(src), list(dst))(ids, ids, num_programs=9)
    assert [each[0] for each in kernel.launches] == [(2,)] * 2 + [(9,)] * 2
    assert kernel.launches[0][1][4:] == (3, 4, 16, 64, 64, 16, 16)
    assert kernel.launches[0][2] == {"BLOCK": 1024, "num_warps": 32}
    with pytest.raises(NotImplementedError, match="rows of heads in one piece wanted"):
        peers.sglang_unified(list(src[:, :, :, :, ::1].transpose(2, 3)), list(dst))


@pytest.mark.parametrize(
    ("name", "programs", "uses_tma"), [("sglang_registers", 2, False), ("sglang_tma", 4, True)]
)
def test_sglangs_own_kernels_are_called_as_sglang_calls_them(name, programs, uses_tma, monkeypatch):
    asked, calls = [], []
    module = SimpleNamespace(
        use_hicache_tma_kernel=lambda **sizes: asked.append(sizes) or True,
        transfer_hicache_all_layer=lambda **arguments: calls.append(arguments),
    )
    monkeypatch.setitem(sys.modules, peers.SGLANG_MODULE, module)
    src, dst = torch.zeros(4, 6, 16, 2, 32), torch.zeros(4, 9, 16, 2, 32)  # K, V, K, V
    kernel = peers.PEERS[name]
    launch = kernel(list(src), list(dst))
    ids = torch.tensor([5, 0], dtype=torch.int32)
    launch(ids, ids + 3)
    launch(ids, ids, num_programs=7)
    first = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in calls[0].items()}
    rows = [*range(80, 96), *range(16)]
    assert first == {
        "k_ptr_src": [src[0].data_ptr(), src[2].data_ptr()],
        "v_ptr_src": [src[1].data_ptr(), src[3].data_ptr()],
        "k_ptr_dst": [dst[0].data_ptr(), dst[2].data_ptr()],
        "v_ptr_dst": [dst[1].data_ptr(), dst[3].data_ptr()],
        "indices_src": rows,
        "indices_dst": [row + 48 for row in rows],
        "kv_cache_src_stride_bytes": 256,
        "kv_cache_dst_stride_bytes": 256,
        "element_size": 256,
        "block_quota": programs,
        "page_size": 16 if uses_tma else 1,
    }
    assert calls[1]["block_quota"] == 7
    assert asked == [{"element_size": 256, "block_quota": 4, "page_size": 16}] * uses_tma
    with pytest.raises(NotImplementedError, match="layer-first pools of equal pages"):
        kernel(list(src), list(dst[:, :, :, :1]))
    module.use_hicache_tma_kernel = lambda **sizes: False
    if uses_tma:
        with pytest.raises(NotImplementedError, match="declines these pages"):
            kernel(list(src), list(dst))


@pytest.mark.parametrize("num_programs", [1, 5])
def test_the_persistent_product_is_that_of_torch(num_programs, device, monkeypatch):
    monkeypatch.setattr("hicache.workbench.bench.gemm.num_sms", lambda device: num_programs)
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


def test_staging_lies_as_the_pages_of_the_host_do():
    host = torch.zeros(5, 4, 64)[:, 1:].unbind(
        1
    )  # pages of four buffers, the last three of which move
    staging = peers._staging(host, 2, torch.device("cpu"))
    assert len({each.untyped_storage().data_ptr() for each in staging}) == 1
    for each, buffer in zip(staging, host, strict=True):
        assert (each.shape, each.stride()) == ((2, 64), buffer.stride())
        assert each.data_ptr() - staging[0].data_ptr() == buffer.data_ptr() - host[0].data_ptr()
    (alone,) = peers._staging(host[:1], 2, torch.device("cpu"))
    assert alone.stride() == host[0].stride()


def test_buffers_that_lie_apart_are_staged_apart():
    host = torch.zeros(2, 5, 64).unbind(0)
    staging = peers._staging(host, 3, torch.device("cpu"))
    assert len({each.untyped_storage().data_ptr() for each in staging}) == 2
    assert all(each.shape == (3, 64) and each.is_contiguous() for each in staging)
    with pytest.raises(NotImplementedError, match="items in one piece wanted"):
        peers._staging([host[0].view(5, 8, 8)[:, :, :4]], 3, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="an order only the interpreter has")
def test_the_unified_peers_programs_share_the_work():
    pool = torch.arange(2 * 64).view(2, 64)
    swap = torch.tensor([0, 1], dtype=torch.int32)
    peers.sglang_unified([pool], [pool])(swap, swap.flip(0))
    # one program loads all and then stores it; a second that did so too would swap it back
    assert pool[:, 0].tolist() == [64, 0]


class OnGpu(torch.Tensor):
    """Host memory that says it lies on a GPU."""

    is_cuda = True


def moved_by_hand(runs, device):
    for src, dst, size in zip(*(column.tolist() for column in runs[:3]), strict=True):
        ctypes.memmove(dst, src, size)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("lies_apart", [True, False])
def test_the_staged_peer_moves_through_a_buffer_that_lies_like_the_host(
    to_host, lies_apart, monkeypatch
):
    monkeypatch.setattr(peers.copy_engine, "copy_runs", moved_by_hand)
    launches = []

    def gathered(table, src_ids, dst_ids, *, num_programs):
        launches.append((src_ids.tolist(), dst_ids.tolist(), num_programs))
        copy.naive_copy_items(table, src_ids, dst_ids)

    monkeypatch.setattr(peers, "copy_items", gathered)
    device = [torch.arange(8 * 64).view(8, 64) + 1000 * k for k in range(2)]
    if lies_apart:
        host = list(torch.arange(2 * 9 * 64).view(2, 9, 64) + 5000)
    else:
        host = list((torch.arange(9 * 2 * 64).view(9, 2, 64) + 5000).unbind(1))
    on_gpu = [each.as_subclass(OnGpu) for each in device]
    src, dst = (on_gpu, host) if to_host else (host, on_gpu)
    sources, targets = (device, host) if to_host else (host, device)
    before = [each.clone() for each in targets]
    src_ids = torch.tensor([5, -1, 0, 3], dtype=torch.int32)
    dst_ids = torch.tensor([2, 6, -1, 7], dtype=torch.int32)
    launch = peers.staged(src, dst)
    launch(src_ids, dst_ids, num_programs=3)
    for each, source, old in zip(targets, sources, before, strict=True):
        old[[2, 7]] = source[[5, 3]]
        assert torch.equal(each, old)
    # the kernel works on the device's side alone, with items of the buffer in a row
    assert launches == [([5, 3], [0, 1], 3) if to_host else ([0, 1], [2, 7], 3)]
    launch(src_ids[1:3], dst_ids[1:3])  # holes alone
    assert len(launches) == 1


def test_the_staged_peer_wants_a_gpu_on_one_side():
    pool = torch.zeros(2, 64).as_subclass(OnGpu)
    for src, dst in (([pool], [pool]), ([torch.zeros(2, 64)], [torch.zeros(2, 64)])):
        with pytest.raises(NotImplementedError, match="a GPU on one side and the host on the"):
            peers.staged(src, dst)


def test_a_batch_is_the_runs_of_the_table(monkeypatch):
    src, dst = torch.arange(5 * 64).view(5, 64), torch.zeros(5, 64, dtype=torch.int64)
    table = copy_table([src], [dst])
    there = SimpleNamespace(
        device=torch.device("cuda", 0), rows=table.rows, crosses_link=False, src=table.src
    )
    monkeypatch.setattr(peers, "copy_table", lambda src, dst: there)
    devices = []

    def copied(runs, device):
        devices.append(device)
        moved_by_hand(runs, device)

    monkeypatch.setattr(peers.copy_engine, "copy_runs", copied)
    ids = torch.tensor([1, 3], dtype=torch.int32)
    launch = contract.bound(peers.memcpy_batch([src], [dst]), ids, ids - 1)
    assert not dst.any()
    launch()
    assert torch.equal(dst[[0, 2]], src[[1, 3]])
    assert not dst[[1, 3, 4]].any()
    assert devices == [there.device]


def test_vllm_copies_to_the_host_by_batches_alone():
    pool = torch.zeros(2, 64)
    with pytest.raises(NotImplementedError, match="vLLM copies to the host by batched memcpy"):
        peers.vllm_blocks([pool.as_subclass(OnGpu)], [pool])
    for src, dst in ((pool, pool), (pool, pool.as_subclass(OnGpu))):
        assert peers.vllm_blocks([src], [dst]) is not None


def test_staging_keeps_dtypes_and_places_of_a_page():
    page = torch.zeros(5, 256, dtype=torch.uint8)
    host = [page[:, :64], page[:, 64:192].view(torch.int64), page[:, 192:].view(torch.bfloat16)]
    for buffers in (host, host[1:], host[::-1]):
        staging = peers._staging(buffers, 2, torch.device("cpu"))
        (storage,) = {each.untyped_storage().data_ptr() for each in staging}
        assert staging[0].untyped_storage().nbytes() == 2 * 256
        least = min(buffer.data_ptr() for buffer in buffers)
        for each, buffer in zip(staging, buffers, strict=True):
            assert (each.dtype, each.stride()) == (buffer.dtype, buffer.stride())
            assert each.shape == (2, *buffer.shape[1:])
            assert each.data_ptr() - storage == buffer.data_ptr() - least
