"""Cases of the bench: ceilings, the kernels within the device, and sweeps; `link_cases` has others.

Every case verifies its bytes before timing.
"""

import itertools
from functools import partial

import torch

from hicache.kernels import copy, index
from hicache.workbench.bench import peers
from hicache.workbench.bench.link_cases import interference, launches, links
from hicache.workbench.bench.measure import DIRECTIONS, KIB, Transfer, graphed
from hicache.workbench.bench.session import Session
from hicache.workbench.bench.step_cases import appends, attention, encodes, loads, scans

NUM_SLOTS = 17  # 8 sources, 8 targets and one spare


def ceilings(session: Session) -> None:
    bench = session.bench
    size = bench.device_bytes
    src, dst = (bench.arenas[name][:size] for name in DIRECTIONS["device"])
    session.time("ceiling", "device copy_", lambda: dst.copy_(src), size)
    for direction in ("to_device", "to_host"):
        by_engine = bench.by_engine(direction), bench.host_bytes
        session.time("ceiling", f"copy engine {direction}", *by_engine)
        transfer = session.bench.transfer(direction, 64, 2 * KIB, contiguous=True)
        by_all = partial(transfer.launch, copy.num_sms(bench.device))
        session.verified("ceiling", f"all SMs {direction}", transfer, by_all)


def pages(session: Session) -> None:
    """Measure copies of pages within the device, with and without a change of layout."""
    for page_size, row_bytes in ((16, 2 * KIB), (64, 2 * KIB), (1, 2 * KIB), (16, 256)):
        transfer = session.bench.transfer("device", page_size, row_bytes, other="layer_first")
        session.verified("pages", f"device, page {page_size}, rows of {row_bytes} B", transfer)
        if page_size > 1 and row_bytes == 2 * KIB:
            transposed = session.bench.transfer("device", page_size, row_bytes)
            case = f"layer-first to page-first, page {page_size}"
            session.verified("layout", case, transposed)


def slots(session: Session) -> None:
    """Measure copies of Mamba states within the device, all layers in one launch.

    A state consists of a convolution state and an SSM state.
    """
    bench = session.bench
    states = bench.states("device", NUM_SLOTS)
    every = torch.arange(NUM_SLOTS, dtype=torch.int32, device=bench.device)
    for num_moved, src_ids, dst_ids in ((8, every[:8], every[8:16]), (1, every[:1], every[16:17])):
        for name, buffers in (("conv and SSM", states), ("conv", states[: len(states) // 2])):
            transfer = Transfer(buffers, buffers, src_ids, dst_ids)
            transfer.launch()
            bench.synchronize()
            for buffer in buffers:
                if not torch.equal(buffer[dst_ids.long()], buffer[src_ids.long()]):
                    raise RuntimeError(f"{num_moved} slots, {name}: a copy differs")
            case, num_bytes = f"{num_moved} slots, {name}", transfer.num_bytes
            session.time("slots", case, transfer.launch, num_bytes)
            if num_moved == 8 and name != "conv":
                flat = bench.arenas["device"][: min(num_bytes, bench.device_bytes)]
                copy_flat = partial(bench.arenas["device_target"][: flat.numel()].copy_, flat)
                session.time("slots", "copy_ of as many bytes", copy_flat, flat.numel())
            if num_moved == 8 and name == "conv" and bench.on_gpu:
                peer = transfer.by(peers.sglang_slots, 4 * copy.num_sms(bench.device))
                session.time("slots", f"{case}, 16-bit peer", peer, num_bytes)
            if num_moved == 1 and name != "conv":
                each = transfer.by(peers.memcpy_each)
                session.time("slots", f"{case}, a launch for each tensor", each, num_bytes)


def indices(session: Session) -> None:
    """Measure the kernel that builds page tables.

    On a GPU there are 256 requests of 128 Ki tokens each, in pages of 64 tokens.
    """
    bench = session.bench
    num_requests, num_columns, per_request = (256, 2048, 8) if bench.on_gpu else (4, 64, 8)
    length = num_columns // per_request
    spans = torch.tensor([(length * node, length) for node in range(per_request)] * num_requests)
    spans = spans.int().to(bench.device)
    bounds = torch.arange(num_requests + 1, dtype=torch.int32, device=bench.device) * per_request
    page_ids = torch.arange(num_columns, dtype=torch.int32, device=bench.device)
    make = index.page_table if bench.on_gpu else index.naive_page_table
    launch = partial(make, page_ids, spans, bounds, num_columns=num_columns)
    if not torch.equal(launch(), page_ids.expand(num_requests, num_columns)):
        raise RuntimeError("the page table differs from the pages of its spans")
    repeated = graphed(launch, times=20) if bench.on_gpu else launch
    session.time("index", "page table", repeated, 20 * 4 * launch().numel(), launches=20)
    got_us = session.records[-1].timing.p50_s / 20 * 1e6
    session.notes[f"page table, {num_requests} requests, µs"] = got_us


def checksums(session: Session) -> None:
    for name in ("device", "to_host"):
        transfer = session.bench.transfer(name, 64, 2 * KIB)
        session.verified("checksum", f"{name}, plain", transfer)
        ids = transfer.src_ids, transfer.dst_ids
        naive = copy.naive_copy_items_with_checksum
        by = copy.copy_items_with_checksum if session.bench.on_gpu else naive
        launch = partial(by, transfer.table, *ids)
        session.verified("checksum", f"{name}, with checksum", transfer, launch)


def sweep(session: Session) -> None:
    """Measure the bandwidth of page copies and add each measurement to `session`.

    The cases differ in tokens per page, in bytes per token and layer (a row), and in the number of
    Triton programs. Copies run within the device, from host to device, and from device to host.
    """
    pages = [(row, page, False) for row in (256, 2 * KIB) for page in (1, 4, 16, 64, 128)]
    pages.append((2 * KIB, 16, True))
    for direction, (row_bytes, page_size, contiguous) in itertools.product(DIRECTIONS, pages):
        is_link = direction != "device"
        transfer = session.bench.transfer(
            direction, page_size, row_bytes, contiguous=contiguous,
            num_bytes=session.bench.host_bytes // 4 if is_link else None,
        )  # fmt: skip
        session.bench.verify(transfer, transfer.launch)
        its = {"page_size": page_size, "row_bytes": row_bytes, "contiguous": int(contiguous)}
        for n in (2, 4, 16) if is_link else (None,):
            launch, num_bytes = partial(transfer.launch, n), transfer.num_bytes
            session.time(
                "sweep", direction, launch, num_bytes, repeats=5, **its, num_programs=n or 0
            )
    if not session.bench.on_gpu:
        return
    for direction, kib in itertools.product(("to_device", "to_host"), (4, 16, 32, 64, 128, 1024)):
        pieces = session.bench.transfer(
            direction, kib // 2, 2 * KIB, num_bytes=session.bench.host_bytes // 4,
            num_layers=1, other="layer_first",
        )  # fmt: skip
        by_engine = pieces.by(peers.memcpy_batch)
        case = f"copy engine {direction}"
        session.time("sweep", case, by_engine, pieces.num_bytes, repeats=5, piece_bytes=kib * KIB)


EVERY = (
    ceilings, pages, links, loads, interference, slots, checksums, encodes, appends,
    attention, scans, indices, launches, sweep,
)  # fmt: skip
CASES = {each.__name__: each for each in EVERY}
