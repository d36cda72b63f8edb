"""Copy tables: what a transfer moves, described once for a pair of pools.

A pool is given as its buffers: a list of tensors whose first axis is the item (a page, a token
row, a Mamba slot) and whose other axes are contiguous. Any layout of a slab is such a list of
views, so one table serves layer-first to page-first, all layers, K and V at once, and Mamba
states of different sizes and dtypes. The table keeps its pools alive, and promises the kernels
that every address and size is a multiple of 16 bytes.

Sizes: NB buffers, P items in a pool, NP pieces, G items of one transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BYTES = 8
ALIGN_BYTES = 16  # one 128-bit access
BURST_WORDS = 32  # 256 bytes: no packet of the link and no sector of memory is read in part
TILE_WORDS = 4096  # 32 KiB: 8 warps × 128 bytes a thread, two of them in flight


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyTable:
    """Buffers of a source and of a target pool, and the pieces that one item is moved in.

    `pieces` is [NP, 6] int64 on the device that copies: source and target address in bytes,
    source and target stride from item to item in words, words in the piece, and its first word
    in the item (all buffers taken one after another).
    """

    src: tuple[Tensor, ...]  # NB × [P, words] int64
    dst: tuple[Tensor, ...]  # NB × [P, words] int64
    pieces: Tensor
    piece_words: int  # the widest piece, a power of two
    in_place: bool  # source and target are one pool

    @property
    def device(self) -> torch.device:
        """Where the copy runs: the CUDA device if either pool is on one."""
        return self.pieces.device

    @property
    def crosses_link(self) -> bool:
        """Whether bytes move between host and device."""
        return self.src[0].device != self.dst[0].device

    @property
    def num_src_items(self) -> int:
        """P of the source."""
        return min(buffer.shape[0] for buffer in self.src)

    @property
    def num_dst_items(self) -> int:
        """P of the target."""
        return min(buffer.shape[0] for buffer in self.dst)

    @property
    def item_bytes(self) -> int:
        """Bytes of one item over all buffers."""
        return WORD_BYTES * sum(buffer.shape[1] for buffer in self.src)

    @property
    def tile_items(self) -> int:
        """Items that one tile of the kernel covers."""
        return TILE_WORDS // self.piece_words

    def reversed(self) -> "CopyTable":
        """The table of the way back."""
        return copy_table(self.dst, self.src)

    def part(self, start: int, stop: int) -> "CopyTable":
        """The table of buffers [start, stop), for copies that go a group of layers at a time."""
        if not 0 <= start < stop <= len(self.src):
            raise ValueError(f"buffers [{start}, {stop}) wanted, the table has {len(self.src)}")
        return copy_table(self.src[start:stop], self.dst[start:stop])


def copy_table(src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyTable:
    """Describe the copy from the buffers `src` to the buffers `dst`. Build it once per pool pair.

    Args:
        src: NB tensors [P, ...]; all but the first axis contiguous, of any dtype.
        dst: NB tensors [P', ...]; item b has as many bytes as item b of `src`.

    Raises:
        ValueError: a promise that the kernels rely on does not hold.
    """
    if len(src) != len(dst) or not src:
        raise ValueError(f"as many source as target buffers wanted, got {len(src)} and {len(dst)}")
    src_words = tuple(_as_words(b, name=f"source buffer {i}") for i, b in enumerate(src))
    dst_words = tuple(_as_words(b, name=f"target buffer {i}") for i, b in enumerate(dst))
    devices = {buffer.device for buffer in (*src_words, *dst_words)}
    if len(devices - {torch.device("cpu")}) > 1:
        raise ValueError(f"one device and the host wanted, got buffers on {_listed(devices)}")
    device = max(devices, key=lambda d: d.type != "cpu")
    for i, (s, d) in enumerate(zip(src_words, dst_words, strict=True)):
        if s.shape[1] != d.shape[1]:
            wanted, got = s.shape[1] * WORD_BYTES, d.shape[1] * WORD_BYTES
            raise ValueError(f"buffer {i}: a source item has {wanted} bytes, a target item {got}")
        _refuse_shifted_overlap(s, d, index=i)
        if device.type != "cpu":
            _refuse_unpinned(s, name=f"source buffer {i}")
            _refuse_unpinned(d, name=f"target buffer {i}")
    piece_words = _piece_words([buffer.shape[1] for buffer in src_words])
    return CopyTable(
        src=src_words,
        dst=dst_words,
        pieces=_pieces(src_words, dst_words, piece_words).to(device),
        piece_words=piece_words,
        in_place=any(
            s.data_ptr() == d.data_ptr() for s, d in zip(src_words, dst_words, strict=True)
        ),
    )


def _as_words(buffer: Tensor, *, name: str) -> Tensor:
    """View [P, ...] of any dtype as [P, words] int64."""
    shape, strides, size = buffer.shape, buffer.stride(), buffer.element_size()
    if buffer.dim() == 0 or buffer[:0].numel() != 0:
        raise ValueError(f"{name}: at least one axis wanted, got shape {tuple(shape)}")
    item_numel = 1
    for length, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if length != 1 and stride != item_numel:
            raise ValueError(f"{name}: contiguous items wanted, got strides {strides}")
        item_numel *= length
    item_bytes, stride_bytes = item_numel * size, strides[0] * size
    for what, value in (
        ("address", buffer.data_ptr()),
        ("stride between items", stride_bytes),
        ("item size", item_bytes),
    ):
        if value % ALIGN_BYTES:
            raise ValueError(f"{name}: {what} must be a multiple of {ALIGN_BYTES} bytes: {value}")
    if item_bytes == 0 or (shape[0] > 1 and stride_bytes < item_bytes):
        raise ValueError(f"{name}: items of {item_bytes} bytes lie {stride_bytes} bytes apart")
    offset = buffer.storage_offset() * size // WORD_BYTES
    words = item_bytes // WORD_BYTES
    view = torch.empty(0, dtype=torch.int64, device=buffer.device)
    return view.set_(
        buffer.untyped_storage(), offset, (shape[0], words), (stride_bytes // WORD_BYTES, 1)
    )


def _refuse_shifted_overlap(src: Tensor, dst: Tensor, *, index: int) -> None:
    """Refuse a pair of buffers in which item i of one overlaps another item of the other."""
    shift = dst.data_ptr() - src.data_ptr()
    # to the end of the last item: a view into a slab may begin anywhere in its first item
    reach = {
        buffer: ((buffer.shape[0] - 1) * buffer.stride(0) + buffer.shape[1]) * WORD_BYTES
        for buffer in (src, dst)
    }
    if shift == 0 and src.stride(0) == dst.stride(0):
        return
    if shift >= reach[src] or -shift >= reach[dst]:
        return
    stride_bytes = src.stride(0) * WORD_BYTES
    item_bytes = src.shape[1] * WORD_BYTES
    apart = item_bytes <= shift % stride_bytes <= stride_bytes - item_bytes
    if src.stride(0) != dst.stride(0) or not apart:
        raise ValueError(f"buffer {index}: source and target items overlap, {shift} bytes apart")


def _refuse_unpinned(buffer: Tensor, *, name: str) -> None:
    if buffer.device.type == "cpu" and not buffer.is_pinned():
        raise ValueError(f"{name}: host memory that a device copies must be pinned")


def _piece_words(buffer_words: Sequence[int]) -> int:
    """The widest power of two that wastes at most an eighth of its lanes, else the least wasteful.

    A piece narrower than a tile lets the tile cover several items. None is narrower than a full
    burst of the link, unless the items are.
    """

    def efficiency(width: int) -> float:
        return sum(buffer_words) / sum(-(-words // width) * width for words in buffer_words)

    narrowest = min(BURST_WORDS, 1 << (max(buffer_words) - 1).bit_length())
    widths = [width for k in range(13) if (width := TILE_WORDS >> k) >= narrowest]
    return next((w for w in widths if efficiency(w) >= 7 / 8), max(widths, key=efficiency))


def _pieces(src: Sequence[Tensor], dst: Sequence[Tensor], piece_words: int) -> Tensor:
    rows = []
    item_start = 0
    for s, d in zip(src, dst, strict=True):
        for start in range(0, s.shape[1], piece_words):
            words = min(piece_words, s.shape[1] - start)
            addresses = (s.data_ptr() + start * WORD_BYTES, d.data_ptr() + start * WORD_BYTES)
            rows.append((*addresses, s.stride(0), d.stride(0), words, item_start + start))
        item_start += s.shape[1]
    return torch.tensor(rows, dtype=torch.int64)


def _listed(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))
