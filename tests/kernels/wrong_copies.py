"""Copy kernels with one planted fault each, which `check` must find, and `right`, without one."""

import functools

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _wrong_kernel(
    buffers_ptr, src_ids_ptr, dst_ids_ptr, num_items, FAULT: tl.constexpr, BLOCK: tl.constexpr
):
    item, tile = tl.program_id(0), tl.program_id(1)
    buffer = buffers_ptr + tl.program_id(2) * 5
    src_id = tl.load(src_ids_ptr + item).to(tl.int64)
    dst_id = tl.load(dst_ids_ptr + item).to(tl.int64)
    src = (tl.load(buffer) + src_id * tl.load(buffer + 2)).to(tl.pointer_type(tl.int64))
    dst = (tl.load(buffer + 1) + dst_id * tl.load(buffer + 3)).to(tl.pointer_type(tl.int64))
    words = tl.where((src_id >= 0) & (dst_id >= 0), tl.load(buffer + 4), 0)
    word = tile * BLOCK + tl.arange(0, BLOCK)
    src_word = word
    if FAULT == "missing":  # the tile that is not full is forgotten
        words = words // BLOCK * BLOCK
    if FAULT == "hole":  # what is a hole in the source is written all the same
        words = tl.where(dst_id >= 0, tl.load(buffer + 4), 0)
    if FAULT == "overlap":  # the last tile is moved back until it is full, on one side only
        word -= tl.maximum(0, tl.minimum((tile + 1) * BLOCK - words, tile * BLOCK))
    limit = tl.where(tile * BLOCK < words, words, 0)
    value = tl.load(src + src_word, mask=word < limit, other=0)
    if FAULT == "stray":  # whole tiles are stored
        limit = tl.where(tile * BLOCK < words, (tile + 1) * BLOCK, 0)
    tl.store(dst + word, value, mask=word < limit)


def _wrong(src, dst, *, fault):
    rows = []
    for s, d in zip(src, dst, strict=True):
        if not (s[:1].is_contiguous() and d[:1].is_contiguous()):
            raise NotImplementedError("items in one piece wanted")
        strides = [b.stride(0) * b.element_size() for b in (s, d)]
        rows.append([s.data_ptr(), d.data_ptr(), *strides, s[:1].nbytes // 8])
    buffers = torch.tensor(rows, dtype=torch.int64)
    tiles = -(-int(buffers[:, 4].max()) // BLOCK)
    known = {}

    def launch(src_ids, dst_ids, *, num_programs=None):
        if fault == "stale":  # ids at a known address are taken for known ids
            key = (src_ids.data_ptr(), len(src_ids))
            src_ids, dst_ids = known.setdefault(key, (src_ids.clone(), dst_ids.clone()))
        if len(src_ids):
            grid = (len(src_ids), tiles, len(rows))
            _wrong_kernel[grid](buffers, src_ids, dst_ids, len(src_ids), FAULT=fault, BLOCK=BLOCK)

    return launch


right, missing, stray, stale, overlap, hole = (
    functools.partial(_wrong, fault=fault)
    for fault in ("none", "missing", "stray", "stale", "overlap", "hole")
)


def stale_content(src, dst):
    """Copy correctly once; later launches write what the source held at the first launch."""
    held = [buffer.clone() for buffer in src]
    copy = _wrong(held, dst, fault="none")
    filled = []

    def launch(src_ids, dst_ids, *, num_programs=None):
        if not filled:
            filled.extend(mine.copy_(theirs) for mine, theirs in zip(held, src, strict=True))
        copy(src_ids, dst_ids)

    return launch


def source_eater(src, dst):
    """Move items instead of copying them: their source is zeroed."""
    copy = _wrong(src, dst, fault="none")

    def launch(src_ids, dst_ids, *, num_programs=None):
        copy(src_ids, dst_ids)
        for buffer in src:
            buffer[src_ids[src_ids >= 0].long()] = 0

    return launch


def raising(src, dst):
    """Copy correctly, but raise ZeroDivisionError if there are no ids."""

    def launch(src_ids, dst_ids, *, num_programs=None):
        _wrong(src, dst, fault="none")(src_ids, dst_ids)
        return 1 // len(src_ids)

    return launch


@triton.jit
def _assembly_kernel(out_ptr, HAS_TYPO: tl.constexpr):
    if HAS_TYPO:
        tl.no_such_operation(out_ptr)
    tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [0], tl.int32, is_pure=True, pack=1)


def assembly(src, dst, *, has_typo=False):
    """Launch a kernel with inline assembly, which a GPU can run and the interpreter cannot."""

    def launch(src_ids, dst_ids, *, num_programs=None):
        _assembly_kernel[(1,)](dst_ids, HAS_TYPO=has_typo)

    return launch


typo = functools.partial(assembly, has_typo=True)


def picky(src, dst):
    """Decline every pair of pools."""
    raise NotImplementedError("pools on the moon wanted")


def deadly(src, dst):
    """Store to an address without memory, which ends the process by signal 11."""
    buffers = torch.tensor([[s.data_ptr(), 4096, 0, 0, 8] for s in src], dtype=torch.int64)

    def launch(src_ids, dst_ids, *, num_programs=None):
        _wrong_kernel[(1, 1, 1)](
            buffers, src_ids.abs(), dst_ids.abs(), 1, FAULT="none", BLOCK=BLOCK
        )

    return launch
