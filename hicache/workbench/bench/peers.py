"""Peers of the bench: other ways to make the same transfer, each a `contract.CopyKernel`.

The Triton kernels here follow public descriptions of other engines' kernels, so that these can be
checked and timed where the engines are not installed. They are equivalents, not copies: widths,
loops and grids are as described; blocks and warps are ours where the description gives none.

    vllm_blocks         vLLM's `_swap_blocks_kernel` (#42212): 12 programs, 64-bit accesses
    vllm_states         vLLM's copy of Mamba states before #48110: a program a state, 1 byte a lane
    vllm_states_tiled   after #48110 and #49436: 8 bytes a lane, 16 programs per state
    sgl_warps           sgl_kernel's `transfer_kv_*`: 2 × 32 warps, 8 bytes in flight per thread
    sglang_slots        SGLang's `_fused_slot_copy_kernel`: 16 bits a lane, as in its machine code
    memcpy_each         one asynchronous copy for each item and buffer
    memcpy_batch        the copy engine; runs listed beforehand, host memory read in any order
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.table import copy_table, device_of
from hicache.workbench.bench import copy_engine
from hicache.workbench.contract import CopyKernel, CopyLaunch

Launch = Callable[[], object]
Buffers = Sequence[Tensor]
EVERY = 1 << 30  # programs: one per item


@triton.jit
def _pointer_copy_kernel(
    src_addresses_ptr,  # [N] int64; 0 is a hole
    dst_addresses_ptr,  # [N] int64
    item_words_ptr,  # [N] int64
    num_items,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0)
    while item < num_items:
        src_address = tl.load(src_addresses_ptr + item)
        src = src_address.to(tl.pointer_type(WORD))
        dst = tl.load(dst_addresses_ptr + item).to(tl.pointer_type(WORD))
        words = tl.where(src_address != 0, tl.load(item_words_ptr + item), 0)
        start = tl.program_id(1) * BLOCK
        while start < words:
            word = start + tl.arange(0, BLOCK)
            value = tl.load(src + word, mask=word < words)
            tl.store(dst + word, value, mask=word < words)
            start += BLOCK * tl.num_programs(1)
        item += tl.num_programs(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    bind: Callable[[Tensor, Tensor, int | None], Launch]

    def __call__(
        self, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
    ) -> object:
        return self.bind(src_ids, dst_ids, num_programs)()


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerCopy:
    """A copy kernel that reads and writes at listed addresses, like some kernels of other engines.

    The launch has `programs` · `tiles` Triton programs, unless the caller gives another number in
    place of `programs`. Each item is divided into `tiles` equal parts, and `programs` programs
    share the items.
    """

    word: tl.dtype
    block: int
    num_warps: int
    programs: int
    tiles: int = 1

    def __call__(self, src: Buffers, dst: Buffers) -> CopyLaunch:
        for buffer in (*src, *dst):
            if not buffer[:1].is_contiguous():
                raise NotImplementedError("items in one piece wanted, got strided rows")
        item_words = torch.tensor([buffer[:1].nbytes for buffer in src])
        item_words = item_words.to(device_of({"source": src, "target": dst})) * 8
        item_words //= self.word.primitive_bitwidth

        def bind(src_ids: Tensor, dst_ids: Tensor, num_programs: int | None) -> Launch:
            is_moved = (src_ids >= 0) & (dst_ids >= 0)
            addresses = [_addresses(src, src_ids, is_moved), _addresses(dst, dst_ids, is_moved)]
            words = item_words.repeat_interleave(len(src_ids))
            grid = (min(num_programs or self.programs, len(words)), self.tiles)
            if not len(words):
                return lambda: None
            return lambda: _pointer_copy_kernel[grid](
                *addresses, words, len(words),
                WORD=self.word, BLOCK=self.block, num_warps=self.num_warps,
            )  # fmt: skip

        return Bound(bind=bind)


_blocks = PointerCopy(word=tl.int64, block=1024, num_warps=4, programs=12)
vllm_states = PointerCopy(word=tl.int8, block=1024, num_warps=4, programs=EVERY)
vllm_states_tiled = PointerCopy(word=tl.int64, block=1024, num_warps=4, programs=EVERY, tiles=16)
sgl_warps = PointerCopy(word=tl.int64, block=1024, num_warps=32, programs=2)
sglang_slots = PointerCopy(word=tl.int16, block=8192, num_warps=8, programs=528)  # 4 an SM of H200


def vllm_blocks(src: Buffers, dst: Buffers) -> CopyLaunch:
    """Return a function that copies blocks as vLLM's kernel does, within the device or into it.

    Raises:
        NotImplementedError: the copy goes from device to host; vLLM uses batched memcpy for that.
    """
    if src[0].is_cuda and not dst[0].is_cuda:
        raise NotImplementedError("vLLM copies to the host by batched memcpy alone")
    return _blocks(src, dst)


def memcpy_each(src: Buffers, dst: Buffers) -> CopyLaunch:
    def bind(src_ids: Tensor, dst_ids: Tensor, num_programs: int | None) -> Launch:
        ids = zip(src_ids.tolist(), dst_ids.tolist(), strict=True)
        pairs = [(s, d) for s, d in ids if s >= 0 and d >= 0]

        def launch() -> None:
            for s, d in zip(src, dst, strict=True):
                for src_id, dst_id in pairs:
                    d[dst_id].copy_(s[src_id], non_blocking=True)

        return launch

    return Bound(bind=bind)


def memcpy_batch(src: Buffers, dst: Buffers) -> CopyLaunch:
    table = copy_table(src, dst)
    if table.device.type == "cpu":
        raise NotImplementedError("the copy engine needs a GPU")

    def bind(src_ids: Tensor, dst_ids: Tensor, num_programs: int | None) -> Launch:
        runs = copy_engine.runs_of(table, src_ids.cpu(), dst_ids.cpu())
        return partial(copy_engine.copy_runs, runs, table.device)

    return Bound(bind=bind)


PEERS: dict[str, CopyKernel] = {
    "vllm_blocks": vllm_blocks,
    "vllm_states": vllm_states,
    "vllm_states_tiled": vllm_states_tiled,
    "sgl_warps": sgl_warps,
    "sglang_slots": sglang_slots,
    "memcpy_each": memcpy_each,
    "memcpy_batch": memcpy_batch,
}


def _addresses(buffers: Buffers, ids: Tensor, is_moved: Tensor) -> Tensor:
    strides = [buffer.stride(0) * buffer.element_size() for buffer in buffers]
    each = [b.data_ptr() + ids.long() * s for b, s in zip(buffers, strides, strict=True)]
    return torch.cat([torch.where(is_moved, addresses, 0) for addresses in each])
