"""Tests that need a GPU: large pools, launches without waits, CUDA graphs, ids in host memory."""

import warnings

import pytest
import torch

from hicache import kernels
from hicache.kernels import copy, copy_table, index

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICE = torch.device("cuda", 0)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_pool(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("place", [{"device": DEVICE}, {"pin_memory": True}])
def test_copies_and_checksums_reach_items_past_2_to_the_31_elements(place):
    item_bytes = 1 << 20
    pool = torch.zeros((1 << 31) // item_bytes + 8, item_bytes, dtype=torch.uint8, **place)
    last = pool.shape[0] - 1
    source = random_pool(2, item_bytes)
    copy.copy_items(copy_table([source], [pool]), i32(1), i32(last))
    table = copy_table([pool], [source])
    sums = copy.copy_items_with_checksum(table, i32(last), i32(0))
    torch.cuda.synchronize()
    assert torch.equal(source[0], source[1])
    assert not pool[last - 1].any()
    assert int(sums[0]) != 0


def test_a_launch_never_waits_for_the_device():
    pool, other = random_pool(8, 4096), random_pool(8, 4096)
    table = copy_table([pool], [other])
    src_ids, dst_ids, spans, bounds = i32(1, 2), i32(3, 4), i32(0, 2).view(1, 2), i32(0, 1)
    host_ids = src_ids.cpu()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.copy_items(table, src_ids, dst_ids)
        kernels.copy_items_with_checksum(table, src_ids, dst_ids)
        kernels.send_ids((table, host_ids, host_ids))
        kernels.page_table(src_ids, spans, bounds, num_columns=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_copy_in_a_cuda_graph_uses_the_ids_at_the_time_of_its_replay():
    pool, other = random_pool(8, 40960), torch.zeros(8, 40960, dtype=torch.uint8, device=DEVICE)
    table, src_ids, dst_ids = copy_table([pool], [other]), i32(1, 2), i32(3, 4)
    copy.copy_items(table, src_ids, dst_ids)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.copy_items(table, src_ids, dst_ids)
    other.zero_()
    src_ids.copy_(i32(5, -1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(other[3], pool[5])
    assert not other[4].any()


def test_unpinned_host_memory_is_refused():
    with pytest.raises(ValueError, match="must be pinned"):
        copy_table([torch.zeros(4, 64)], [torch.zeros(4, 64, device=DEVICE)])


def test_ids_in_host_memory_are_sent_to_the_device_before_a_copy():
    pool, other = random_pool(4, 4096), random_pool(4, 4096)
    table = copy_table([pool], [other])
    ((src_ids, dst_ids),) = kernels.send_ids((table, i32(2).cpu(), i32(1).cpu()))
    kernels.copy_items(table, src_ids, dst_ids)
    assert torch.equal(other[1], pool[2])


def test_the_page_table_of_a_large_batch_is_right():
    num_requests, num_columns = 256, 2048
    page_ids = torch.arange(num_columns, dtype=torch.int32, device=DEVICE)
    spans = torch.tensor([[0, 1000], [1000, 1048]] * num_requests, dtype=torch.int32, device=DEVICE)
    bounds = torch.arange(0, 2 * num_requests + 1, 2, dtype=torch.int32, device=DEVICE)
    table = index.page_table(page_ids, spans, bounds, num_columns=num_columns)
    assert torch.equal(table, page_ids.expand(num_requests, num_columns))
