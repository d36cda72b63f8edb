"""A copy kernel of one's own, outside the package: one program an item and buffer, plain words.

    cd docs/examples
    python -m hicache.workbench.check my_copy:my_copy
    python -m hicache.workbench.bench --kernel my_copy:my_copy --op contest --dry-run

It is short, right, and slow across a link: the compiler cannot know how addresses out of a table
are aligned, so it moves 8 bytes at a time where 16 would go.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _my_copy_kernel(
    buffers_ptr,  # [NB, 5]: addresses of both sides, bytes from item to item, words of an item
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    num_items,  # G
    num_pairs,  # NB · G
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    while pair < num_pairs:
        buffer = buffers_ptr + (pair // num_items) * 5
        src_id = tl.load(src_ids_ptr + pair % num_items).to(tl.int64)
        dst_id = tl.load(dst_ids_ptr + pair % num_items).to(tl.int64)
        src = (tl.load(buffer) + src_id * tl.load(buffer + 2)).to(tl.pointer_type(tl.int64))
        dst = (tl.load(buffer + 1) + dst_id * tl.load(buffer + 3)).to(tl.pointer_type(tl.int64))
        words = tl.where((src_id >= 0) & (dst_id >= 0), tl.load(buffer + 4), 0)
        start = 0
        while start < words:
            word = start + tl.arange(0, BLOCK)
            tl.store(dst + word, tl.load(src + word, mask=word < words), mask=word < words)
            start += BLOCK
        pair += tl.num_programs(0)


def my_copy(src, dst):
    """Make the table of a pair of pools once; what it returns is launched for each transfer."""
    rows = []
    for s, d in zip(src, dst, strict=True):
        if not (s[:1].is_contiguous() and d[:1].is_contiguous()):
            raise NotImplementedError("items in one piece wanted, got strided rows")
        strides = [b.stride(0) * b.element_size() for b in (s, d)]
        rows.append([s.data_ptr(), d.data_ptr(), *strides, s[:1].nbytes // 8])
    device = next((b.device for b in (*src, *dst) if b.is_cuda), src[0].device)
    buffers = torch.tensor(rows, dtype=torch.int64).to(device)

    def launch(src_ids, dst_ids, *, num_programs=None):
        num_pairs = len(rows) * len(src_ids)
        if num_pairs:
            grid = (min(num_programs or 64, num_pairs),)
            _my_copy_kernel[grid](buffers, src_ids, dst_ids, len(src_ids), num_pairs, BLOCK=BLOCK)

    return launch
