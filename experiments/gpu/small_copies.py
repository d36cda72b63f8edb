"""Small copies of every kind for compute-sanitizer, which watches each access: see gpu.sh.

Pools lie in allocations of their own, so that a byte beyond a pool is an error that it sees.
"""

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch starts

import torch

from hicache import kernels


def main() -> None:
    """Copy pages, slots, heads and a window across and within tiers; compare the bytes."""
    device = torch.device("cuda", 0)

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for page_size, head_dim in ((1, 8), (16, 64), (64, 128)):
        pages = torch.randn(2, 2, 5, page_size, 2, head_dim, device=device).bfloat16()
        host = torch.zeros(5, 2, 2, page_size, 2, head_dim, dtype=torch.bfloat16).pin_memory()
        table = kernels.copy_table(
            kernels.layer_first_buffers(pages), kernels.page_first_buffers(host)
        )
        kernels.copy_pages(table, ids(4, -1, 0), ids(0, 2, 4))
        there = kernels.copy_pages_with_checksum(table, ids(4, 0), ids(0, 4))
        back = kernels.copy_pages_with_checksum(table.reversed(), ids(0, 4), ids(1, 2))
        assert torch.equal(there, back)
        assert torch.equal(pages[:, :, 1], pages[:, :, 4])
        assert torch.equal(pages[:, :, 2], pages[:, :, 0])

    conv = torch.randn(6, 3, 96, device=device).bfloat16()
    ssm = torch.randn(6, 4, 64, 40, device=device)
    slots = kernels.copy_table([conv, ssm], [conv, ssm])
    kernels.copy_pages(slots, ids(5, -1), ids(0, 1))
    assert torch.equal(conv[0], conv[5])
    assert torch.equal(ssm[0], ssm[5])

    heads = torch.randn(3, 16, 8, 64, device=device).half()
    rank = torch.zeros(3, 16, 2, 64).half().pin_memory()
    shard = kernels.copy_table([heads[:, :, 2:4]], [rank])
    kernels.copy_pages(shard, ids(2, 0), ids(1, 2))
    kernels.copy_pages(shard.reversed(), ids(1), ids(1))
    assert torch.equal(heads[1, :, 2:4], heads[2, :, 2:4])
    assert torch.equal(rank[2].to(device), heads[0, :, 2:4])

    swa = torch.randn(7, 1024, device=device)
    window = kernels.copy_table([swa], [swa])
    kernels.copy_pages(window, ids(1, 0), ids(2, 3), src_map=ids(-1, 6))
    assert torch.equal(swa[2], swa[6])

    page_table = kernels.page_table(
        ids(3, 4, -1), ids(0, 2, 1, 2).view(2, 2), ids(0, 1, 2), num_columns=3
    )
    assert page_table.tolist() == [[3, 4, 0], [4, 0, 0]]
    window_table = kernels.window_table(
        page_table, ids(128, 64), ids(0, 1, 2, 9, 8), page_size=64, window_len=64
    )
    assert window_table.tolist() == [[8, 0], [8, 0]]
    torch.cuda.synchronize()
    print("every copy is right")


if __name__ == "__main__":
    main()
