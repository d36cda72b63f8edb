"""Decode attention of one's own: one query a request and head over pages of keys and values.

cd docs/examples
python -m hicache.workbench.check my_attention:Decode
python -m hicache.workbench.codegen --kernel my_attention:Decode
python -m hicache.workbench.bench --kernel my_attention:Decode --dry-run
"""

from typing import ClassVar

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns"])
def _decode_kernel(
    q_ptr,  # [B, H, D]
    kv_ptr,  # [P, 2, H, PAGE, D]
    table_ptr,  # [B, C]
    lens_ptr,  # [B]
    out_ptr,  # [B, H, D]
    num_columns,  # C
    scale,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    dim, token = tl.arange(0, D), tl.arange(0, PAGE)
    q = tl.load(q_ptr + (request * HEADS + head) * D + dim).to(tl.float32) * scale
    seq_len = tl.load(lens_ptr + request)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((D,), tl.float32)
    page = 0
    while page * PAGE < seq_len:
        page_id = tl.load(table_ptr + request * num_columns + page).to(tl.int64)
        place = (page_id * 2 * HEADS + head) * PAGE * D + token[:, None] * D + dim[None, :]
        exists = page * PAGE + token < seq_len
        k = tl.load(kv_ptr + place, mask=exists[:, None], other=0.0).to(tl.float32)
        v = tl.load(kv_ptr + place + HEADS * PAGE * D, mask=exists[:, None], other=0.0)
        scores = tl.where(exists, tl.sum(k * q[None, :], axis=1), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=0))
        weights = tl.exp(scores - higher)
        fade = tl.exp(highest - higher)
        total = total * fade + tl.sum(weights, axis=0)
        mixed = mixed * fade + tl.sum(weights[:, None] * v.to(tl.float32), axis=0)
        highest = higher
        page += 1
    tl.store(out_ptr + (request * HEADS + head) * D + dim, mixed / total)


class Decode:
    """Attention of the last token of each request, in fp32 over keys and values of fp16."""

    outputs = ("out",)
    rtol, atol = 1e-4, 1e-5  # sums of fp32 in another order
    sizes: ClassVar = {
        "8 heads, 4,096 tokens": {"requests": 2, "heads": 8, "tokens": 4096, "dim": 128}
    }

    def draw(self, random):
        """Sizes of a small case."""
        names = ("requests", "heads", "tokens")
        return {name: random.randint(1, most) for name, most in zip(names, (3, 2, 70), strict=True)}

    def make(self, sizes, generator):
        """All arguments: requests of up to `tokens` tokens over pages of 16 in random order."""
        heads, dim, page = sizes["heads"], sizes.get("dim", 32), 16
        columns = -(-sizes["tokens"] // page)
        num_pages = columns * sizes["requests"]
        shape = (num_pages, 2, heads, page, dim)
        low = max(sizes["tokens"] // 2, 1)
        return {
            "q": torch.randn(sizes["requests"], heads, dim, generator=generator).half(),
            "kv": torch.randn(shape, generator=generator).half(),
            "table": torch.randperm(num_pages, generator=generator).view(-1, columns).int(),
            "lens": torch.randint(
                low, sizes["tokens"] + 1, (sizes["requests"],), generator=generator
            ).int(),
            "out": torch.empty(sizes["requests"], heads, dim),
        }

    def launch(self, q, kv, table, lens, out):
        """One program a request and head."""
        _, heads, dim = q.shape
        _decode_kernel[q.shape[:2]](
            q, kv, table, lens, out, table.shape[1], dim**-0.5, HEADS=heads, PAGE=16, D=dim
        )

    def oracle(self, q, kv, table, lens, out):
        """Softmax over all keys at once."""
        for row, pages, length, result in zip(q, table.long(), lens.tolist(), out, strict=True):
            keys, values = (kv[pages, side].transpose(0, 1).flatten(1, 2) for side in (0, 1))
            scores = torch.einsum("hd,htd->ht", row.float(), keys[:, :length].float())
            weights = torch.softmax(scores * row.shape[-1] ** -0.5, dim=-1)
            result[:] = torch.einsum("ht,htd->hd", weights, values[:, :length].float())
        return {"out": out}
