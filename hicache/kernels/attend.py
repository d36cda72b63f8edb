"""Paged attention: full or in a sliding window, for prompts or single tokens, with optional sinks.

One program takes a part of a tile's query rows for one KV head, and the tokens of one split. A
second kernel merges the splits of each row. The length of a split follows from the position and the
number of rows of its tile, so that one decode of 8,192 tokens fills a GPU. A row's result depends
on its position alone, not on how the prompt is cut into chunks or on the rest of the batch: its
bits are equal in all batches whose tiles have equally many rows and begin at the same positions.

Supported are fp32, fp16 and bf16, and heads of up to 256 elements, a multiple of 8. These kernels
are a small reference that verifies the cache; libraries have faster ones.

Sizes: B tiles of R query rows, HQ query heads, H KV heads, G query heads per KV head, D elements
of a head, P pages of T tokens, C columns of a page table, S splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

SPLIT = 256  # tokens of a split, at least
MAX_SPLITS = 32  # of a row
MAX_PARTIALS = 64  # splits times rows of a tile, if it has more than one split: bounds the scratch
BLOCK = 64  # tokens that are read in one turn, at most
BLOCK_BYTES = 16 << 10  # of the keys of a block, at most
NUM_STAGES = 5
MAX_LANES = 64  # query rows times query heads of a program
MAX_FP32_LANES = 16  # more spill registers, because fp32 is multiplied without tensor cores
MAX_DIM = 256
ALIGNED = 16  # the reference multiplies so many tokens, or a multiple
DTYPES = torch.float32, torch.float16, torch.bfloat16
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # initial running maximum; finite, because inf - inf is NaN


@triton.jit
def _turn(
    query, most, total, mixed, block, key_base, table_row, position, low, held, first_page,
    window_len, page_stride, kv_stride, scale, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = (token >= low) & (token < held)
    if PAGE % BLOCK == 0:  # a block lies in one page: its id is a scalar, and loads stay wide
        page = tl.load(table_row + block * BLOCK // PAGE - first_page)
    else:
        page = tl.load(table_row + token // PAGE - first_page, mask=exists, other=0)
    place = page.to(tl.int64) * page_stride + token % PAGE * SIZE
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    here = exists[None, :] & inside[:, None]
    keys = tl.load(key_base + place[None, :] + dim[:, None], mask=here, other=0.0)
    here = exists[:, None] & inside[None, :]
    values = tl.load(key_base + kv_stride + place[:, None] + dim[None, :], mask=here, other=0.0)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    seen = exists[None, :] & (token[None, :] <= position[:, None])
    if window_len > 0:
        seen = seen & (token[None, :] > position[:, None] - window_len)
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    shares = tl.exp2(scores - new[:, None])
    fade = tl.exp2(most - new)
    total = total * fade + tl.sum(shares, axis=1)
    added = tl.dot(shares.to(values.dtype), values, input_precision="ieee")
    return new, total, mixed * fade[:, None] + added


@triton.jit(
    do_not_specialize=["num_columns", "num_rows", "window_len"],
    do_not_specialize_on_alignment=["table_ptr", "tiles_ptr"],
)
def _split_kernel(
    query_ptr,  # [B, R, HQ, D]
    pool_ptr,  # [2, P, T, H, D]
    table_ptr,  # [B, C]
    tiles_ptr,  # [B, 4] position of the first row, first and end row held, first page in table
    mixed_ptr,  # [S, B, R, HQ, D] fp32
    total_ptr,  # [S, B, R, HQ, 2] fp32: maximum of the scores, sum of their exponentials
    num_rows,  # R
    num_columns,  # C
    window_len,  # 0: all tokens
    page_stride,
    kv_stride,
    scale,
    HEADS: tl.constexpr,  # H
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    WIDTH: tl.constexpr,  # D, rounded up to a power of two
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile's part
    LANES: tl.constexpr,  # ROWS · G, rounded up, 16 at least
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,  # of a row, at most
    STAGES: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    parts = num_rows // ROWS
    tile, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    info = tiles_ptr + tile * 4
    start = tl.load(info)
    held = start + tl.load(info + 2)  # tokens of the sequence that are in its pages
    first_page = tl.load(info + 3)
    lane = tl.arange(0, LANES)
    row = part * ROWS + lane // GROUP
    exists = lane < ROWS * GROUP
    position = start + row
    query_head = head * GROUP + lane % GROUP
    place = (tile * num_rows + row) * (HEADS * GROUP) + query_head
    dim = tl.arange(0, WIDTH)
    where = place[:, None] * DIM + dim[None, :]
    moves = exists[:, None] & (dim < DIM)[None, :]
    query = tl.load(query_ptr + where, mask=moves, other=0.0)
    low = 0  # tokens before the windows of all rows are masked
    if window_len > 0:
        low = tl.maximum(start + part * ROWS - window_len + 1, 0)
    end, base = start + (part + 1) * ROWS, low // BLOCK * BLOCK
    split_len = tl.cdiv(end - base, SPLITS * SPLIT) * SPLIT
    first = base + split * split_len
    end = tl.minimum(tl.minimum(first + split_len, held), end)
    most = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    mixed = tl.zeros((LANES, WIDTH), tl.float32)
    key_base = pool_ptr + head * DIM
    table_row = table_ptr + tile * num_columns
    for block in tl.range(first // BLOCK, tl.cdiv(end, BLOCK), num_stages=STAGES):
        most, total, mixed = _turn(
            query, most, total, mixed, block, key_base, table_row, position, low, held, first_page,
            window_len, page_stride, kv_stride, scale, HEADS * DIM, PAGE, BLOCK, DIM, WIDTH,
        )  # fmt: skip
    num_tiles = tl.num_programs(0) // parts
    shift = split.to(tl.int64) * num_tiles * num_rows * (HEADS * GROUP)
    tl.store(mixed_ptr + shift * DIM + where, mixed, mask=moves)
    tl.store(total_ptr + (shift + place) * 2, most, mask=exists)
    tl.store(total_ptr + (shift + place) * 2 + 1, total, mask=exists)


@triton.jit(do_not_specialize=["num_splits", "num_places"])
def _merge_kernel(
    mixed_ptr,  # [S, N, D] fp32, N = B · R · HQ
    total_ptr,  # [S, N, 2] fp32
    sinks_ptr,  # [HQ] fp32; None: no sinks
    out_ptr,  # [N, D]
    num_splits,  # S
    num_places,  # N
    HEADS: tl.constexpr,  # HQ
    DIM: tl.constexpr,  # D
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # at least S; the order of sums follows from it
    PLACES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    exists = place < num_places
    split, dim = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = split[None, :].to(tl.int64) * num_places + place[:, None]
    held = exists[:, None] & (split < num_splits)[None, :]
    most = tl.load(total_ptr + at * 2, mask=held, other=LOWEST)
    total = tl.load(total_ptr + at * 2 + 1, mask=held, other=0.0)
    inside = (dim < DIM)[None, None, :]
    mixed = tl.load(
        mixed_ptr + at[:, :, None] * DIM + dim, mask=held[:, :, None] & inside, other=0.0
    )
    highest = tl.max(most, axis=1)
    if sinks_ptr is not None:  # a sink adds to the denominator only
        sink = tl.load(sinks_ptr + place % HEADS, mask=exists, other=0.0) * LOG2_E
        highest = tl.maximum(highest, sink)
    share = tl.exp2(most - highest[:, None])
    sums = tl.sum(total * share, axis=1)
    if sinks_ptr is not None:
        sums += tl.exp2(sink - highest)
    result = tl.sum(mixed * share[:, :, None], axis=1) / tl.maximum(sums, 1e-30)[:, None]
    where = place[:, None] * DIM + dim[None, :]
    moves = exists[:, None] & (dim < DIM)[None, :]
    tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=moves)


def attend(
    pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    queries: Tensor,
    *,
    end: int,
    window_len: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention from query rows to the paged KV cache of their sequences.

    The queries come in tiles. A tile is a run of consecutive tokens of one sequence, one per row:

        attend(pool, table, torch.tensor([[position, 0, 1, 0]]).int(), query, end=position + 1)

    Args:
        pool: [2, pages, page_size, kv_heads, head_dim], the keys and values of one layer. Heads
            have 8·n elements of fp32, fp16 or bf16, up to 256.
        table: [tiles, columns] int32, the page ids of each tile's sequence. The first page ids of a
            sequence may be left out.
        tiles: [tiles, 4] int32. The fields are the position of row 0 in the sequence, the first
            valid row, the end of the valid rows, and the number of page ids left out. The listed
            pages must hold every token that row 0 or a later valid row attends to.
        queries: [tiles, rows, query_heads, head_dim], contiguous. The number of rows is a power of
            two, or rows times query heads per KV head are at most 64 (16 in fp32). There are at
            most 64 query heads per KV head (16 in fp32).
        end: the largest sequence position, over all tiles, at which the valid rows of a tile end.
        window_len: number of tokens that a row attends to, itself included. 0 means no window.
        sinks: [query_heads] fp32, attention sinks: an extra score per head in the softmax's
            denominator. None means no sinks.

    Returns:
        [tiles, rows, query_heads, head_dim]. Rows that are not valid are undefined.

    Raises:
        ValueError: a shape, dtype or stride is not supported; the message names it.
    """
    _refuse(pool, table, tiles, queries)
    num_tiles, num_rows, query_heads, dim = queries.shape
    reach = min(end, window_len + num_rows + BLOCK) if window_len else end
    num_splits = max(min(triton.cdiv(reach, SPLIT), max_splits(num_rows)), 1)
    mixed = torch.empty(num_splits, *queries.shape, dtype=torch.float32, device=pool.device)
    totals = torch.empty(*mixed.shape[:-1], 2, dtype=torch.float32, device=pool.device)
    out = torch.empty_like(queries)
    constants = _constants(pool, num_rows, query_heads)
    sizes = num_rows, table.shape[1], window_len, *pool.stride()[1::-1], dim**-0.5 * LOG2_E.value
    splits = max_splits(num_rows)
    merge = {"HEADS": query_heads, "DIM": dim, "WIDTH": constants["WIDTH"], "SPLITS": splits}
    places, num_places = MAX_SPLITS // splits, num_tiles * num_rows * query_heads
    grid = num_tiles * (num_rows // constants["ROWS"]), pool.shape[3], num_splits
    with torch.cuda.device_of(pool):
        _split_kernel[grid](queries, pool, table, tiles, mixed, totals, *sizes, **constants)
        _merge_kernel[(triton.cdiv(num_places, places),)](
            mixed, totals, sinks, out, num_splits, num_places, **merge, PLACES=places
        )
    return out


def _refuse(pool: Tensor, table: Tensor, tiles: Tensor, queries: Tensor) -> None:
    heads, dim = pool.shape[3:]
    if dim > MAX_DIM or dim % 8 or pool.dtype not in DTYPES:
        got = f"{dim} elements of {pool.dtype}"
        raise ValueError(f"heads of 8·n elements up to {MAX_DIM}, fp32, fp16 or bf16: got {got}")
    if queries.dtype != pool.dtype or queries.shape[3] != dim or queries.shape[2] % heads:
        got = f"{tuple(queries.shape)} {queries.dtype}"
        raise ValueError(f"queries must be [B, R, {heads} · n, {dim}] {pool.dtype}, got {got}")
    if any(stride % 16 for stride in pool.stride()[:2]) or not pool[0, 0].is_contiguous():
        got = f"strides {pool.stride()}"
        raise ValueError(f"contiguous pages, 16·n elements apart, wanted: got {got}")
    for name, each in (("queries", queries), ("table", table), ("tiles", tiles)):
        if not each.is_contiguous():
            raise ValueError(f"contiguous {name} wanted, got strides {each.stride()}")


def max_splits(num_rows: int) -> int:
    """Return into how many splits a row's tokens are cut at most, if its tile has so many rows."""
    return int(min(max(MAX_PARTIALS // triton.next_power_of_2(num_rows), 1), MAX_SPLITS))


def _constants(pool: Tensor, num_rows: int, query_heads: int) -> dict[str, int]:
    page, heads, dim = pool.shape[2:]
    group, rows = query_heads // heads, num_rows
    width = int(max(triton.next_power_of_2(dim), 16))  # the least that tensor cores multiply
    limit = MAX_FP32_LANES if pool.dtype == torch.float32 else MAX_LANES
    head_bytes = width * pool.element_size()
    while rows % 2 == 0 and rows * group > limit:
        rows //= 2
    lanes = max(triton.next_power_of_2(rows * group), 16)
    if lanes > limit:
        got = f"{num_rows} rows of {group} query heads a KV head"
        raise ValueError(f"at most {limit} query heads a KV head, of 2**n rows, wanted: got {got}")
    shape = {"HEADS": heads, "GROUP": group, "DIM": dim, "WIDTH": width, "PAGE": page}
    tile = {"ROWS": rows, "LANES": lanes, "BLOCK": min(BLOCK, BLOCK_BYTES // head_bytes)}
    splits = {"SPLIT": SPLIT, "SPLITS": max_splits(num_rows), "STAGES": NUM_STAGES}
    # more bytes spill registers
    return {**shape, **tile, **splits, "num_warps": 4 if head_bytes <= 256 else 8}


def naive_attend(
    pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    queries: Tensor,
    *,
    end: int,
    window_len: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention in plain PyTorch, as a reference for the kernel `attend`.

    Arguments and result are those of `attend`. The result of a tile is bit-equal whatever other
    tiles the call has.
    """
    size, dim = pool.shape[2], pool.shape[4]
    num_rows, query_heads = queries.shape[1:3]
    results = []
    for ids, (start, _, held, first_page), query in zip(
        table, tiles.tolist(), queries, strict=True
    ):
        first = max(start - window_len + 1, 0) // size if window_len else 0
        pages = ids[first - first_page : -(-(start + num_rows) // size) - first_page]
        both = pool.index_select(1, pages).flatten(1, 2)  # [2, token, H, D]
        # rows not written yet may hold NaN, and 0 · NaN is NaN: zero them
        both[:, start + held - first * size :] = 0
        # some CPU libraries add in an order that depends on where a matrix begins in memory
        both = pad(both, (0, 0, 0, 0, 0, -both.shape[1] % ALIGNED))
        copies = query_heads // both.shape[2]
        keys, values = both.repeat_interleave(copies, dim=2).transpose(1, 2)
        scores = torch.bmm(query.transpose(0, 1), keys.transpose(1, 2).contiguous()) * dim**-0.5
        position = torch.arange(start, start + num_rows, device=pool.device)[:, None]
        token = torch.arange(first * size, first * size + both.shape[1], device=pool.device)
        unseen = token > position
        if window_len:
            unseen |= token <= position - window_len
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            share = sinks.to(scores.dtype)[:, None, None].expand(-1, num_rows, 1)
            scores = torch.cat([scores, share], dim=-1)
        shares = scores.softmax(-1)[..., : len(token)].contiguous()
        results.append(torch.bmm(shares, values.contiguous()).transpose(0, 1))
    return torch.stack(results)
