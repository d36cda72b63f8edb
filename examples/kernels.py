"""Copies three pages from a device pool to a host pool in one launch. python examples/kernels.py

Without a GPU, Triton's interpreter runs the kernel on the CPU.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is imported

from hicache.kernels import (
    copy_items,
    copy_table,
    layer_first_buffers,
    page_first_buffers,
    send_ids,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
layers, pages, host_pages, tokens, heads, dim = 2, 16, 32, 16, 2, 64
device_pool = torch.randn(layers, 2, pages, tokens, heads, dim, device=device).bfloat16()
host_pool = torch.zeros(
    host_pages, layers, 2, tokens, heads, dim, dtype=torch.bfloat16, pin_memory=device == "cuda"
)
back_up = copy_table(layer_first_buffers(device_pool), page_first_buffers(host_pool))
((ids, slots),) = send_ids((back_up, torch.tensor([7, 3, 12]).int(), torch.tensor([0, 1, 2]).int()))
copy_items(back_up, ids, slots)
if device == "cuda":
    torch.cuda.synchronize()
for page, slot in ((7, 0), (3, 1), (12, 2)):
    assert torch.equal(host_pool[slot], device_pool[:, :, page].cpu())
print("3 pages were backed up")
