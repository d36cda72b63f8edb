"""Cases of the bench for the link between device and host: G3 to G7 and G10.

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
from hicache.workbench.bench.measure import DIRECTIONS, KIB, MIB, SPIN_CYCLES, graphed
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
GOAL_PROGRAMS = {"to_device": "4 programs", "to_host": "2 programs"}  # what a launch has


def links(session: Session) -> None:
    """Measure copies of KV pages between device and host with few Triton programs.

    The bandwidth of a copy that uses all SMs is the reference.
    """
    for goal, direction in (("G3", "to_device"), ("G4", "to_host")):
        ceiling = session.ceilings.get(f"sm_{direction}", math.nan)
        engine = session.ceilings.get(f"engine_{direction}", math.nan)
        for page_size in (16, 64):
            transfer = session.bench.transfer(direction, page_size, 2 * KIB)
            session.bench.verify(transfer, transfer.launch)
            for num_programs, wanted in ((1, None), (2, 0.90), (4, 0.97), (8, None)):
                case = f"page {page_size}, {num_programs} programs"
                launch = partial(transfer.launch, num_programs)
                rate = session.time(direction, case, launch, transfer.num_bytes)
                if wanted is None:
                    continue
                what = f"{direction}, {case}, over "
                session.at_least(goal, what + "all SMs", rate / ceiling, wanted)
                if num_programs == 4 and ceiling >= 0.93 * engine:
                    session.at_least(goal, what + "the copy engine", rate / engine, 0.90)
        pieces = session.bench.transfer(direction, 64, 2 * KIB, other="layer_first")
        if session.bench.on_gpu:
            rate = session.verified(
                direction, "copy engine, pages of 128 KiB", pieces, pieces.by(peers.memcpy_batch)
            )
            if not ceiling >= 0.93 * engine:
                session.at_least(
                    goal, f"{direction} by copy engine, pages of 128 KiB", rate / engine, 0.93
                )
    rows = session.bench.transfer("to_device", 1, 2 * KIB)
    rate = session.verified("to_device", "page 1, 8 programs", rows, partial(rows.launch, 8))
    ceiling = session.ceilings.get("sm_to_device", math.nan)
    session.at_least("G6", "page 1, rows of 2 KiB, 8 programs, over all SMs", rate / ceiling, 0.90)


def interference(session: Session) -> None:
    """Measure how much copies between device and host slow down matrix products on the GPU.

    The matrix products are like those of prefill and of decode. The bandwidth of the copies beside
    them is measured too.
    """
    if not session.bench.on_gpu:
        session.unmeasured("G7", "GEMM beside a load-back", "<= 1.05", "it needs a GPU")
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
    alone_s = statistics.median(_beside(products, _nothing, side, 0)[0] for _ in range(NUM_ROUNDS))
    for direction in ("to_device", "to_host"):
        transfer = session.bench.transfer(direction, 16, 2 * KIB)
        pieces = session.bench.transfer(direction, 64, 2 * KIB, other="layer_first")
        ways: dict[str, tuple[Callable[[], object], int]] = {
            f"{n} programs": (partial(transfer.launch, n), transfer.num_bytes) for n in BESIDE
        }
        ways["copy engine, pages of 128 KiB,"] = pieces.by(peers.memcpy_batch), pieces.num_bytes
        from_, to = (
            session.bench.arenas[arena][: session.bench.host_bytes]
            for arena in DIRECTIONS[direction]
        )
        whole = partial(to.copy_, from_, non_blocking=True)
        ways["copy engine, one piece,"] = whole, session.bench.host_bytes
        for how, (launch, num_bytes) in ways.items():
            case = f"{how} {direction}, alone, before {name}"
            solo = session.time("interference", case, launch, num_bytes, repeats=3)
            num_copies = math.ceil(1.3 * alone_s * solo * 1e9 / num_bytes)
            rounds = [_beside(products, launch, side, num_copies) for _ in range(NUM_ROUNDS)]
            beside_s, copy_s = map(statistics.median, zip(*rounds, strict=True))
            slowed, kept = beside_s / alone_s, num_bytes / copy_s / 1e9 / solo
            what = f"{name} slowed by {how} {direction}", f"{how} {direction} beside {name}, kept"
            if how == GOAL_PROGRAMS[direction]:
                session.at_most("G7", what[0], slowed, 1.05)
                session.at_least("G7", what[1], kept, 0.90)
            else:
                session.notes |= dict(zip(what, (slowed, kept), strict=True))


def _nothing() -> None:
    pass


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
        session.unmeasured("G10", "host time of a launch, µs", "<= 30", "it needs a GPU")
        return
    transfer = session.bench.transfer("to_device", 16, 2 * KIB, num_bytes=8 * MIB)
    transfer.launch()
    session.bench.synchronize()
    got_us = statistics.median(_host_s(transfer.launch) for _ in range(200)) * 1e6
    session.at_most("G10", "host time of a launch of 8 MiB, all layers, µs", got_us, 30.0)
    one = torch.zeros(1, device=session.bench.device)
    added_us = statistics.median(_host_s(partial(one.add_, 1.0)) for _ in range(200)) * 1e6
    session.notes["host time of torch's add_, µs"] = added_us  # a host may be slow
    replay = graphed(transfer.launch, times=1)
    session.bench.verify(transfer, replay)
    session.at_least("G10", "a replayed graph moves equal bytes", 1.0, 1.0)
