"""Cases of the bench for the link between device and host.

Every case verifies its bytes before timing, unless its docstring names the case that does.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hicache.workbench.bench import peers
from hicache.workbench.bench.measure import KIB, MIB, SPIN_CYCLES, graphed
from hicache.workbench.bench.session import Session

# matrix products: tokens, rows and columns of the weight, number of products; each set takes some
# 60 ms at 700 TFLOP/s and 3 TB/s
STEPS = {
    "GEMM": (8192, 8192, 8192, 40),  # compute-bound
    "chunk of 8,192": (8192, 4096, 4096, 150),  # of the prefill of a small model
    "chunk of 2,048": (2048, 4096, 4096, 600),  # likewise; two waves of thread blocks
    "decode": (32, 8192, 65536, 200),  # memory-bound: 1 GiB of weights for 32 tokens
}
NUM_ROUNDS = 3
BESIDE = (1, 2, 4)  # programs of a copy beside matrix products


def links(session: Session) -> None:
    """Measure copies of KV pages between device and host with few Triton programs."""
    for direction in ("to_device", "to_host"):
        for page_size in (16, 64):
            transfer = session.bench.transfer(direction, page_size, 2 * KIB)
            for num_programs in (1, 2, 4, 8):
                case = f"page {page_size}, {num_programs} programs"
                session.verified(direction, case, transfer, partial(transfer.launch, num_programs))
        pieces = session.bench.transfer(direction, 64, 2 * KIB, other="layer_first")
        if session.bench.on_gpu:
            by_engine = pieces.by(peers.memcpy_batch)
            session.verified(direction, "copy engine, pages of 128 KiB", pieces, by_engine)
    rows = session.bench.transfer("to_device", 1, 2 * KIB)
    session.verified("to_device", "page 1, 8 programs", rows, partial(rows.launch, 8))


def interference(session: Session) -> None:
    """Measure how much copies between device and host slow down matrix products on the GPU.

    The matrix products are like those of prefill and of decode. The bandwidth of the copies beside
    them is measured too.
    """
    if not session.bench.on_gpu:
        return
    side = torch.cuda.Stream(session.bench.device, priority=-1)
    for name, (tokens, rows, columns, times) in STEPS.items():
        a, b = (
            torch.randn(*size, device=session.bench.device, dtype=torch.bfloat16)
            for size in ((tokens, rows), (rows, columns))
        )
        out = torch.empty(tokens, columns, device=a.device, dtype=a.dtype)
        _beside_copies(session, name, partial(_products, a, b, out, times), side)


def _products(a: Tensor, b: Tensor, out: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(a, b, out=out)


def _beside_copies(
    session: Session, name: str, products: Callable[[], None], side: torch.cuda.Stream
) -> None:
    # measured as beside copies: a GPU that has rested computes faster
    alone = [_beside(products, lambda: None, side, 0)[0] for _ in range(NUM_ROUNDS)]
    alone_s = statistics.median(alone)
    for direction in ("to_device", "to_host"):
        transfer = session.bench.transfer(direction, 16, 2 * KIB)
        pieces = session.bench.transfer(direction, 64, 2 * KIB, other="layer_first")
        ways: dict[str, tuple[Callable[[], object], int]] = {
            f"{n} programs": (partial(transfer.launch, n), transfer.num_bytes) for n in BESIDE
        }
        ways["copy engine, pages of 128 KiB,"] = pieces.by(peers.memcpy_batch), pieces.num_bytes
        whole = session.bench.by_engine(direction), session.bench.host_bytes
        ways["copy engine, one piece,"] = whole
        for how, (launch, num_bytes) in ways.items():
            case = f"{how} {direction}, alone, before {name}"
            solo = session.time("interference", case, launch, num_bytes, repeats=3)
            num_copies = math.ceil(1.3 * alone_s * solo * 1e9 / num_bytes)
            rounds = [_beside(products, launch, side, num_copies) for _ in range(NUM_ROUNDS)]
            beside_s, copy_s = map(statistics.median, zip(*rounds, strict=True))
            kept = num_bytes / copy_s / 1e9 / solo
            session.notes[f"{name} slowed by {how} {direction}"] = beside_s / alone_s
            session.notes[f"{how} {direction} beside {name}, kept"] = kept


def _host_s(launch: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def _beside(
    products: Callable[[], None],
    launch: Callable[[], object],
    side: torch.cuda.Stream,
    num_copies: int,
) -> tuple[float, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_copies + 1)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # Products are queued first. The host has to queue every piece of a batched memcpy, and waits
    # where the queue is full
    torch.cuda._sleep(20 * SPIN_CYCLES)
    start.record()
    products()
    end.record()
    side.wait_event(start)
    with torch.cuda.stream(side):
        marks[0].record()
        for mark in marks[1:]:
            launch()
            mark.record()
    torch.cuda.synchronize()
    beside_s = start.elapsed_time(end) / 1e3
    times = [x.elapsed_time(y) / 1e3 for x, y in itertools.pairwise(marks)]
    during = [
        seconds
        for seconds, mark in zip(times, marks[1:], strict=True)
        if start.elapsed_time(mark) / 1e3 < beside_s
    ] or times[:1]
    return beside_s, statistics.fmean(during) if during else math.nan


def launches(session: Session) -> None:
    """Measure the host time of launching one copy of 8 MiB from host to device.

    The function also checks that a CUDA graph can replay the launch.
    """
    if not session.bench.on_gpu:
        return
    transfer = session.bench.transfer("to_device", 16, 2 * KIB, num_bytes=8 * MIB)
    transfer.launch()
    session.bench.synchronize()
    one = torch.zeros(1, device=session.bench.device)
    for what, launch in (  # a host may be slow: torch's launch says so
        ("a launch of 8 MiB, all layers", transfer.launch),
        ("torch's add_", partial(one.add_, 1.0)),
    ):
        seconds = statistics.median(_host_s(launch) for _ in range(200))
        session.notes[f"host time of {what}, µs"] = seconds * 1e6
    session.bench.verify(transfer, graphed(transfer.launch, times=1))
