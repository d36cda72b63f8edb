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

from hicache.workbench.bench import copy_engine, peers
from hicache.workbench.bench.gemm import persistent_gemm
from hicache.workbench.bench.measure import KIB, MIB, SPIN_CYCLES, graphed
from hicache.workbench.bench.session import Session

WEIGHT_SIZE = 8192
# matrix products: tokens, columns in weight sizes, number of products; each set takes 55 ms at
# 790 TFLOP/s and 4 TB/s
STEPS = {
    "GEMM": (8192, 1, 40),  # prefill, compute-bound
    "decode": (32, 8, 200),  # memory-bound: 1 GiB of weights for 32 tokens
    "persistent GEMM": (8192, 1, 40),  # prefill that holds its SMs until it is done
}
NUM_ROUNDS = 3


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
            session.notes["memcpy_is_batched"] = copy_engine.is_batched(session.bench.device)
            rate = session.verified(
                direction, "copy engine, pages of 128 KiB", pieces, pieces.by(peers.memcpy_batch)
            )
            if not ceiling >= 0.93 * engine:
                session.at_least(
                    goal, f"{direction} by copy engine, pages of 128 KiB", rate / engine, 0.93
                )
            whole = session.bench.transfer(direction, 64, 2 * KIB)
            rate = session.verified(direction, "staged, page 64", whole, whole.by(peers.staged))
            session.notes[f"staged_over_engine_{direction}"] = rate / engine
    rows = session.bench.transfer("to_device", 1, 2 * KIB)
    rate = session.verified("to_device", "page 1, 8 programs", rows, partial(rows.launch, 8))
    ceiling = session.ceilings.get("sm_to_device", math.nan)
    session.at_least("G6", "page 1, rows of 2 KiB, 8 programs, over all SMs", rate / ceiling, 0.90)


def against_peers(session: Session) -> None:
    """Compare our copy kernel between device and host with those of other engines.

    Each kernel moves the same bytes. Most of the others are slow, so transfers are small.
    """
    bench = session.bench
    num_bytes = max(bench.host_bytes // 4, 1)
    for direction in ("to_device", "to_host"):
        pools = partial(bench.transfer, direction, row_bytes=2 * KIB, other="layer_first")
        transfer = pools(16, num_bytes=num_bytes)
        rates = {}
        for n in (2, 4):
            case, ours_by = f"{direction}, ours, {n} programs", partial(transfer.launch, n)
            rates[n] = session.verified("peers", case, transfer, ours_by)
        if not bench.on_gpu:
            session.unmeasured("G5", f"{direction}, peers", ">= 1", "peers need a GPU")
            continue
        for name, n, wanted in (
            ("vllm_blocks", 4, 1.0),
            ("sgl_warps", 2, 2.0),
            ("sglang_unified", 2, 1.0),
            ("sglang_tma", 4, 1.0),
            ("sglang_registers", 2, 1.0),
        ):
            what = f"{direction}, {n} programs over {name}"
            if (name, direction) == ("vllm_blocks", "to_host"):
                continue  # vLLM copies to the host by batched memcpy
            try:
                launch = transfer.by(peers.PEERS[name])
                rate = session.verified("peers", f"{direction}, {name}", transfer, launch)
            except Exception as error:  # an absent or broken peer is reported, not fatal
                why = f"{type(error).__name__}: {error}"[:200]
                session.unmeasured("G5", what, f">= {wanted:g}", why)
            else:
                session.at_least("G5", what, rates[n] / rate, wanted)
        for page_size in (2, 8):
            small = pools(page_size, num_bytes=num_bytes)
            item, ours_by = f"{page_size * 2} KiB items", partial(small.launch, 4)
            ours = session.verified("peers", f"{direction}, ours, {item}", small, ours_by)
            case, by_batch = f"{direction}, batched memcpy, {item}", small.by(peers.memcpy_batch)
            batch = session.verified("peers", case, small, by_batch)
            session.at_least("G5", f"{direction}, {item}, over batched memcpy", ours / batch, 5.0)
        few = pools(16, num_bytes=min(num_bytes, 32 * MIB))
        each = session.verified(
            "peers", f"{direction}, memcpy per page", few, few.by(peers.memcpy_each), repeats=3
        )
        session.notes[f"over_memcpy_per_page_{direction}"] = rates[4] / each


def interference(session: Session) -> None:
    """Measure how much copies between device and host slow down matrix products on the GPU.

    The matrix products are like those of prefill and of decode. The bandwidth of the copies beside
    them is measured too.
    """
    if not session.bench.on_gpu:
        session.unmeasured("G7", "GEMM beside a load-back", "<= 1.05", "it needs a GPU")
        return
    side = torch.cuda.Stream(session.bench.device, priority=-1)
    for name, (tokens, columns, times) in STEPS.items():
        a, b = (
            torch.randn(*size, device=session.bench.device, dtype=torch.float16)
            for size in ((tokens, WEIGHT_SIZE), (WEIGHT_SIZE, columns * WEIGHT_SIZE))
        )
        out = torch.empty(tokens, columns * WEIGHT_SIZE, device=a.device, dtype=a.dtype)
        product = persistent_gemm if name == "persistent GEMM" else _library_gemm
        _beside_copies(session, name, partial(_products, partial(product, a, b, out), times), side)


def _library_gemm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _products(product: Callable[[], None], times: int) -> None:
    for _ in range(times):
        product()


def _beside_copies(
    session: Session, name: str, products: Callable[[], None], side: torch.cuda.Stream
) -> None:
    alone_s = session.bench.timed(products, repeats=5).p50_s
    for direction in ("to_device", "to_host"):
        transfer = session.bench.transfer(direction, 16, 2 * KIB)
        launch, num_bytes = partial(transfer.launch, 4), transfer.num_bytes
        case = f"{direction} alone, before {name}"
        solo = session.time("interference", case, launch, num_bytes, repeats=5)
        num_copies = math.ceil(1.3 * alone_s * solo * 1e9 / transfer.num_bytes)
        beside_s, copy_s = _beside(products, launch, side, num_copies)
        rate = num_bytes / copy_s / 1e9
        session.at_most("G7", f"{name} slowed by 4 programs {direction}", beside_s / alone_s, 1.05)
        session.at_least("G7", f"copy {direction} beside {name} over alone", rate / solo, 0.90)
        beside_s, copy_s = _beside(products, transfer.by(peers.staged), side, num_copies)
        session.notes[f"slowed_by_staged_{direction}_{name}"] = beside_s / alone_s
        session.notes[f"staged_gb_per_s_{direction}_beside_{name}"] = num_bytes / copy_s / 1e9
        session.notes[f"queueing_delay_us_{direction}_{name}"] = _queueing_delay_us(
            session, products, side, direction
        )


def _beside(
    products: Callable[[], None],
    launch: Callable[[], object],
    side: torch.cuda.Stream,
    num_copies: int,
) -> tuple[float, float]:
    rounds = [_one_round(products, launch, side, num_copies) for _ in range(NUM_ROUNDS)]
    products_s, copies_s = zip(*rounds, strict=True)
    return statistics.median(products_s), statistics.median(copies_s)


def _one_round(
    products: Callable[[], None],
    launch: Callable[[], object],
    side: torch.cuda.Stream,
    num_copies: int,
) -> tuple[float, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_copies + 1)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)  # until everything is queued
    start.record()
    side.wait_event(start)
    with torch.cuda.stream(side):
        marks[0].record()
        for mark in marks[1:]:
            launch()
            mark.record()
    products()
    end.record()
    torch.cuda.synchronize()
    beside_s = start.elapsed_time(end) / 1e3
    times = [x.elapsed_time(y) / 1e3 for x, y in itertools.pairwise(marks)]
    during = [
        seconds
        for seconds, mark in zip(times, marks[1:], strict=True)
        if start.elapsed_time(mark) / 1e3 < beside_s
    ] or times[:1]
    return beside_s, sum(during) / len(during)


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
    times = []
    for _ in range(200):
        start = time.perf_counter()
        transfer.launch()
        times.append(time.perf_counter() - start)
        session.bench.synchronize()
    got_us = sorted(times)[len(times) // 2] * 1e6
    session.at_most("G10", "host time of a launch of 8 MiB, all layers, µs", got_us, 30.0)
    replay = graphed(transfer.launch, times=1)
    session.bench.verify(transfer, replay)
    session.at_least("G10", "a replayed graph moves equal bytes", 1.0, 1.0)


def _queueing_delay_us(
    session: Session, products: Callable[[], None], side: torch.cuda.Stream, direction: str
) -> float:
    small = session.bench.transfer(direction, 16, 2 * KIB, num_bytes=MIB)

    def seconds() -> float:
        start = time.perf_counter()
        with torch.cuda.stream(side):
            small.launch(4)
        side.synchronize()
        return time.perf_counter() - start

    seconds()
    torch.cuda.synchronize()
    alone = min(seconds() for _ in range(5))
    products()
    beside = sorted(seconds() for _ in range(9))[4]
    torch.cuda.synchronize()
    return (beside - alone) * 1e6
