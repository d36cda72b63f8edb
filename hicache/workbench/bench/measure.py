"""Measurement: pools in fixed arenas, verified copies, and times as quantiles.

A transfer is verified before it is timed: the target is poisoned and the copy runs once. Then every
item named must equal its source, and all others must still be poison. Times are taken with device
events behind a short spin, which fills the queue and hides launch cost. Before each launch another
buffer is read, so that the cache holds nothing of the previous launch.

On a CPU nothing is timed: the same code runs at small sizes with the PyTorch references, so that a
dry run finds errors.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hicache.kernels import copy
from hicache.kernels.layout import layer_first_buffers, page_first_buffers
from hicache.kernels.table import WORD_BYTES, copy_table
from hicache.workbench.contract import CopyKernel, bound

POISON_WORD = int.from_bytes(b"\xa5" * 8, "little", signed=True)
SPIN_CYCLES = 1_000_000  # about half a millisecond
CACHE_BYTES = 256 << 20  # several times the L2 cache of any GPU
WARM_UP_S = 0.5
LAYOUTS = {"layer_first": layer_first_buffers, "page_first": page_first_buffers}
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DIRECTIONS = {  # arenas
    "device": ("device", "device_target"),
    "to_device": ("host", "device_target"),
    "to_host": ("device", "host_target"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Quantiles (20%, 50%, 80%) of the duration of one launch, in seconds; NaN if not timed."""

    p20_s: float
    p50_s: float
    p80_s: float


UNTIMED = Timing(p20_s=math.nan, p50_s=math.nan, p80_s=math.nan)


class Transfer:
    def __init__(
        self, src: Sequence[Tensor], dst: Sequence[Tensor], src_ids: Tensor, dst_ids: Tensor
    ):
        self.src, self.dst = src, dst
        self.table = copy_table(src, dst)
        self.src_ids, self.dst_ids = src_ids, dst_ids

    @property
    def num_bytes(self) -> int:
        return self.table.item_bytes * len(self.src_ids)

    def launch(self, num_programs: int | None = None) -> None:
        on_cpu = self.table.device.type == "cpu"
        launch = copy.naive_copy_items if on_cpu else copy.copy_items
        launch(self.table, self.src_ids, self.dst_ids, num_programs=num_programs)

    def by(self, kernel: CopyKernel, num_programs: int | None = None) -> Callable[[], object]:
        launch = kernel(self.src, self.dst)
        return bound(launch, self.src_ids, self.dst_ids, num_programs=num_programs)


class Bench:
    """Holds the memory that copies are measured in, and times their launches.

    The source memory on device and host holds random bytes, which never change.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        device_bytes: int,
        host_bytes: int,
        num_layers: int,
        repeats: int,
    ):
        if host_bytes > device_bytes:
            raise ValueError(f"at most {device_bytes} bytes a host pool, got {host_bytes}")
        self.device = device
        self.num_layers = num_layers
        self.repeats = repeats
        self.device_bytes = device_bytes
        self.host_bytes = host_bytes
        pinned = device.type == "cuda"
        self.arenas = {
            "device": torch.empty(2 * device_bytes, dtype=torch.uint8, device=device),
            "device_target": torch.empty(2 * device_bytes, dtype=torch.uint8, device=device),
            "host": torch.empty(2 * host_bytes, dtype=torch.uint8, pin_memory=pinned),
            "host_target": torch.empty(2 * host_bytes, dtype=torch.uint8, pin_memory=pinned),
        }
        self.arenas["device"].random_(0, 256)
        self.arenas["host"].copy_(self.arenas["device"][: 2 * host_bytes])
        self._other = torch.ones(
            CACHE_BYTES // 4 if pinned else 0, dtype=torch.int32, device=device
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def room(self, direction: str) -> int:
        return self.device_bytes if direction == "device" else self.host_bytes

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which launches go to a new CUDA stream.

        The default stream does not support batched memcpy. Without a GPU the context does nothing.
        """
        if not self.on_gpu:
            return nullcontext()
        self.synchronize()
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def warm_up(self) -> None:
        end = time.perf_counter() + (WARM_UP_S if self.on_gpu else 0.0)
        while time.perf_counter() < end:
            self.arenas["device_target"].copy_(self.arenas["device"])
            self.synchronize()

    def transfer(
        self,
        direction: str,
        page_size: int,
        row_bytes: int,
        *,
        num_bytes: int | None = None,
        num_layers: int | None = None,
        other: str = "page_first",
        contiguous: bool = False,
    ) -> Transfer:
        """Make a transfer of KV pages within the device, or between device and host.

        Args:
            direction: `device` (within the device), `to_device` or `to_host`.
            page_size: tokens per page.
            row_bytes: bytes of a token's keys, or values, in one layer.
            num_bytes: bytes to move, in whole pages. None means as many as fit. The pools hold
                twice as many pages.
            num_layers: number of layers. None means the default of this `Bench`.
            other: layout of the host pool; within the device, layout of the target pool. It is
                `page_first` or `layer_first`. The other pool is layer-first.
            contiguous: True for consecutive page ids, False for random ones.
        """
        num_layers = num_layers or self.num_layers
        page_bytes = page_size * row_bytes * 2 * num_layers
        num_pages = 2 * max((num_bytes or self.room(direction)) // page_bytes, 1)
        page = (page_size, 1, row_bytes)
        sizes = {
            "layer_first": (num_layers, 2, num_pages, *page),
            "page_first": (num_pages, num_layers, 2, *page),
        }
        layouts = (other, "layer_first") if direction == "to_device" else ("layer_first", other)
        src, dst = (
            LAYOUTS[layout](self.arenas[name][: num_pages * page_bytes].view(sizes[layout]))
            for name, layout in zip(DIRECTIONS[direction], layouts, strict=True)
        )
        return Transfer(src, dst, *self.half_of(num_pages, contiguous=contiguous))

    def by_engine(self, direction: str) -> Callable[[], object]:
        from_, to = (self.arenas[name][: self.host_bytes] for name in DIRECTIONS[direction])
        return partial(to.copy_, from_, non_blocking=True)

    def half_of(self, num_items: int, *, contiguous: bool = False) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(num_items, generator=generator) for _ in range(2)]
        if contiguous:
            orders = [torch.arange(num_items)] * 2
        return [order[: num_items // 2].int().to(self.device) for order in orders]

    def states(self, arena: str, num_slots: int) -> list[Tensor]:
        num_layers, *sizes = (36, 48 * KIB, 2 * MIB) if self.on_gpu else (2, 768, 8 * KIB)
        widths = [size for size in sizes for _ in range(num_layers)]
        parts = self.arenas[arena][: num_slots * sum(widths)].split([num_slots * w for w in widths])
        return [part.view(num_slots, -1) for part in parts]

    def verify(self, transfer: Transfer, launch: Callable[[], object]) -> None:
        """Run a copy once, and compare all bytes of the target with the source.

        Raises:
            RuntimeError: a byte is wrong, is missing, or has changed outside of the target pages.
        """
        table = transfer.table
        for whole in _wholes(table.dst):
            whole.copy_(torch.full_like(whole, POISON_WORD, device=self.device))
        launch()
        self.synchronize()
        src_ids, dst_ids = transfer.src_ids.long(), transfer.dst_ids.long()
        others = torch.ones(table.num_dst_items, dtype=torch.bool, device=self.device)
        others[dst_ids] = False
        sides = zip(self._seen(table.src), self._seen(table.dst), strict=True)
        for number, (src, dst) in enumerate(sides):
            if not torch.equal(dst[dst_ids], src[src_ids]):
                raise RuntimeError(f"buffer {number}: an item differs from its source")
            if not bool((dst[others] == POISON_WORD).all()):
                raise RuntimeError(f"buffer {number}: a byte was written outside of the ids")

    def _seen(self, buffers: tuple[Tensor, ...]) -> list[Tensor]:
        sent = {whole.data_ptr(): whole.to(self.device) for whole in _wholes(buffers)}
        return [
            sent[buffer.untyped_storage().data_ptr()].as_strided(
                buffer.shape, buffer.stride(), buffer.storage_offset()
            )
            for buffer in buffers
        ]

    def timed(self, launch: Callable[[], object], *, repeats: int | None = None) -> Timing:
        """Time `launch` on the current stream; return quantiles of its duration.

        `launch` is repeated `repeats` times; None means the default of this `Bench`. On a CPU,
        `launch` runs once and is not timed.
        """
        if not self.on_gpu:
            launch()
            return UNTIMED
        for _ in range(2):
            launch()
        times = []
        for _ in range(repeats or self.repeats):
            self._other.sum()  # a read: dirty lines would be written back during the launch
            torch.cuda._sleep(SPIN_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return quantiles(times)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _wholes(buffers: tuple[Tensor, ...]) -> list[Tensor]:
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage() for b in buffers}
    empty = torch.empty(0, dtype=torch.int64, device=buffers[0].device)
    return [
        empty.new_empty(0).set_(storage, 0, (storage.nbytes() // WORD_BYTES,), (1,))
        for storage in storages.values()
    ]


def graphed(launch: Callable[[], object], *, times: int) -> Callable[[], None]:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            launch()
    return graph.replay


def quantiles(times: list[float]) -> Timing:
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(shares).tolist()
    return Timing(p20_s=low, p50_s=middle, p80_s=high)
