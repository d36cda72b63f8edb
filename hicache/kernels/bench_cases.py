"""The questions of the bench: each a function that measures, and judges the goals it can.

Goals are ratios to ceilings measured in the same run (`README.md` lists them, G1 to G10). Every
case verifies its bytes before it times them, unless it says that another case has.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hicache.kernels import checksum, copy, copy_engine, index, peers, reference
from hicache.kernels.measure import SPIN_CYCLES, Bench, Shape, Timing, Transfer
from hicache.kernels.table import copy_table

KIB, MIB = 1 << 10, 1 << 20
GEMM_SIZE = 8192
NUM_GEMMS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured launch. `num_bytes` arrive; within a device they are also read from there."""

    op: str
    case: str
    num_bytes: int
    timing: Timing
    parameters: dict[str, int | str] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes arriving a second, at the median."""
        return self.num_bytes / self.timing.p50_s / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A claim to hold the kernels to, with what was measured. `got` is NaN if nothing was."""

    goal: str
    what: str
    wanted: str
    got: float
    holds: bool | None  # None: not measured, `why` says why
    why: str = ""


class Session:
    """What a run of the bench has measured so far."""

    def __init__(self, bench: Bench):
        self.bench = bench
        self.records: list[Record] = []
        self.goals: list[Goal] = []
        self.ceilings: dict[str, float] = {}  # GB/s arriving
        self.notes: dict[str, object] = {}

    def time(
        self,
        op: str,
        case: str,
        launch: Callable[[], object],
        num_bytes: int,
        *,
        repeats: int | None = None,
        **parameters: int | str,
    ) -> float:
        """Time a launch, record it, return GB/s."""
        timing = self.bench.timed(launch, repeats=repeats)
        record = Record(op=op, case=case, num_bytes=num_bytes, timing=timing, parameters=parameters)
        self.records.append(record)
        return record.gb_per_s

    def verified(
        self,
        op: str,
        case: str,
        transfer: Transfer,
        launch: Callable[[], object],
        *,
        repeats: int | None = None,
        **parameters: int | str,
    ) -> float:
        """Verify a launch that makes `transfer`, then time it."""
        self.bench.verify(transfer, launch)
        return self.time(op, case, launch, transfer.num_bytes, repeats=repeats, **parameters)

    def at_least(self, goal: str, what: str, got: float, wanted: float, why: str = "") -> None:
        """Judge a ratio that should be high."""
        holds = None if math.isnan(got) else got >= wanted
        self._judge(goal, what, f">= {wanted:g}", got, holds=holds, why=why)

    def at_most(self, goal: str, what: str, got: float, wanted: float, why: str = "") -> None:
        """Judge a number that should be low."""
        holds = None if math.isnan(got) else got <= wanted
        self._judge(goal, what, f"<= {wanted:g}", got, holds=holds, why=why)

    def unmeasured(self, goal: str, what: str, wanted: str, why: str) -> None:
        """Name a goal that cannot be judged here, and why."""
        self._judge(goal, what, wanted, math.nan, holds=None, why=why)

    def _judge(
        self, goal: str, what: str, wanted: str, got: float, *, holds: bool | None, why: str
    ) -> None:
        if holds is None and not why:
            why = "nothing is timed without a GPU"
        self.goals.append(Goal(goal=goal, what=what, wanted=wanted, got=got, holds=holds, why=why))

    def within_device(self, page_size: int, row_bytes: int, src: str, dst: str) -> Transfer:
        """A transfer between two pools of the device."""
        return self.bench.transfer(
            Shape(
                page_size=page_size,
                row_bytes=row_bytes,
                num_bytes=self.bench.device_bytes,
                num_layers=self.bench.num_layers,
            ),
            src="device",
            dst="device_target",
            src_layout=src,
            dst_layout=dst,
        )

    def across(
        self,
        direction: str,
        page_size: int,
        row_bytes: int,
        *,
        num_bytes: int | None = None,
        contiguous: bool = False,
        host_layout: str = "page_first",
    ) -> Transfer:
        """A load-back (`to_device`) or a back-up (`to_host`) between the usual layouts."""
        shape = Shape(
            page_size=page_size,
            row_bytes=row_bytes,
            num_bytes=num_bytes or self.bench.host_bytes,
            num_layers=self.bench.num_layers,
        )
        sides = {
            "to_device": ("host", "device_target", host_layout, "layer_first"),
            "to_host": ("device", "host_target", "layer_first", host_layout),
        }
        src, dst, src_layout, dst_layout = sides[direction]
        return self.bench.transfer(
            shape,
            src=src,
            dst=dst,
            src_layout=src_layout,
            dst_layout=dst_layout,
            contiguous=contiguous,
        )


def ceilings(session: Session) -> None:
    """What this machine can do: device copy, copy engine, and SMs across the link."""
    bench = session.bench
    arenas = bench.arenas
    size = bench.device_bytes
    src, dst = arenas["device"][:size], arenas["device_target"][:size]
    session.ceilings["device"] = session.time(
        "ceiling", "device copy_", lambda: dst.copy_(src), size
    )
    size = bench.host_bytes
    pairs = {"to_device": ("host", "device_target"), "to_host": ("device", "host_target")}
    for direction, (from_name, to_name) in pairs.items():
        from_, to = arenas[from_name][:size], arenas[to_name][:size]
        engine = session.time(
            "ceiling",
            f"copy engine {direction}",
            partial(to.copy_, from_, non_blocking=True),
            size,
        )
        transfer = session.across(direction, 64, 2 * KIB, contiguous=True)
        num_programs = copy.num_sms(bench.device)
        sms = session.verified(
            "ceiling",
            f"all SMs {direction}",
            transfer,
            partial(transfer.launch, num_programs),
            num_programs=num_programs,
        )
        session.ceilings[f"engine_{direction}"] = engine
        session.ceilings[f"sm_{direction}"] = sms
        session.notes[f"sm_over_engine_{direction}"] = sms / engine


def pages(session: Session) -> None:
    """G1, G2: gather, scatter and change of layout within the device, against `copy_`."""
    ceiling = session.ceilings.get("device", math.nan)
    wanted = {(16, 2 * KIB): 0.92, (64, 2 * KIB): 0.92, (1, 2 * KIB): 0.80, (16, 256): 0.85}
    for (page_size, row_bytes), ratio in wanted.items():
        transfer = session.within_device(page_size, row_bytes, "layer_first", "layer_first")
        rate = session.verified(
            "pages",
            f"device, page {page_size}, rows of {row_bytes} B",
            transfer,
            transfer.launch,
            page_size=page_size,
            row_bytes=row_bytes,
        )
        what = f"page {page_size}, rows of {row_bytes} B, gather + scatter, over device copy_"
        session.at_least("G1", what, rate / ceiling, ratio)
        if page_size == 1 or row_bytes != 2 * KIB:
            continue
        transposed = session.within_device(page_size, row_bytes, "layer_first", "page_first")
        changed = session.verified(
            "layout",
            f"layer-first to page-first, page {page_size}",
            transposed,
            transposed.launch,
            page_size=page_size,
        )
        session.at_least(
            "G2", f"change of layout over plain, page {page_size}", changed / rate, 0.95
        )
        two_pass = session.verified(
            "layout", f"two passes, page {page_size}", transposed, _two_pass(transposed)
        )
        session.at_least(
            "G2", f"change of layout over two passes, page {page_size}", changed / two_pass, 1.8
        )


def links(session: Session) -> None:
    """G3, G4, G6: load-back and back-up with few programs, against all SMs of the same run."""
    for goal, direction in (("G3", "to_device"), ("G4", "to_host")):
        ceiling = session.ceilings.get(f"sm_{direction}", math.nan)
        engine = session.ceilings.get(f"engine_{direction}", math.nan)
        for page_size in (16, 64):
            transfer = session.across(direction, page_size, 2 * KIB)
            session.bench.verify(transfer, transfer.launch)
            for num_programs, wanted in ((1, None), (2, 0.90), (4, 0.97), (8, None)):
                rate = session.time(
                    direction,
                    f"page {page_size}, {num_programs} programs",
                    partial(transfer.launch, num_programs),
                    transfer.num_bytes,
                    page_size=page_size,
                    num_programs=num_programs,
                )
                if wanted is None:
                    continue
                what = f"{direction}, page {page_size}, {num_programs} programs, over "
                session.at_least(goal, what + "all SMs", rate / ceiling, wanted)
                if num_programs == 4 and ceiling >= 0.93 * engine:
                    session.at_least(goal, what + "the copy engine", rate / engine, 0.90)
        staged = session.across(direction, 64, 2 * KIB, host_layout="layer_first")
        if session.bench.on_gpu:
            rate = session.verified(
                direction, "copy engine, pages of 128 KiB", staged, peers.memcpy_batch(staged)
            )
            if not ceiling >= 0.93 * engine:
                session.at_least(
                    goal, f"{direction} by copy engine, pages of 128 KiB", rate / engine, 0.93
                )
    rows = session.across("to_device", 1, 2 * KIB)
    rate = session.verified("to_device", "page 1, 8 programs", rows, partial(rows.launch, 8))
    ceiling = session.ceilings.get("sm_to_device", math.nan)
    session.at_least("G6", "page 1, rows of 2 KiB, 8 programs, over all SMs", rate / ceiling, 0.90)


def against_peers(session: Session) -> None:
    """G5: the same bytes moved by other means, most of them slow, so fewer bytes are taken."""
    bench = session.bench
    within = session.within_device(16, 2 * KIB, "layer_first", "layer_first")
    ours = session.verified("peers", "device, ours", within, within.launch)
    other = session.verified("peers", "device, torch index", within, peers.torch_index(within))
    session.notes["over_torch_index"] = ours / other
    num_bytes = max(bench.host_bytes // 4, 1)
    for direction in ("to_device", "to_host"):
        transfer = session.across(
            direction, 16, 2 * KIB, num_bytes=num_bytes, host_layout="layer_first"
        )
        rates = {
            n: session.verified(
                "peers", f"{direction}, ours, {n} programs", transfer,
                partial(transfer.launch, n), num_programs=n,
            )
            for n in (2, 4)
        }  # fmt: skip
        if not bench.on_gpu:
            session.unmeasured("G5", f"{direction}, peers", ">= 1", "peers need a GPU")
            continue
        others = {
            "vLLM's block copy, 12 programs": (peers.block_copy_of_vllm(transfer), 4, 1.0),
            "8-byte warps, 2 programs": (peers.warp_copy_of_sgl_kernel(transfer), 2, 2.0),
        }
        for name, (launch, n, wanted) in others.items():
            rate = session.verified("peers", f"{direction}, {name}", transfer, launch)
            session.at_least(
                "G5", f"{direction}, {n} programs over {name}", rates[n] / rate, wanted
            )
        for name, n, uses_tma in (("SGLang TMA", 4, True), ("SGLang JIT registers", 2, False)):
            what = f"{direction}, {n} programs over {name}"
            try:
                launch = peers.transfer_of_sglang(
                    transfer, page_size=16, num_programs=n, uses_tma=uses_tma
                )
                rate = session.verified("peers", f"{direction}, {name}", transfer, launch)
            except Exception as error:  # an absent or broken peer is reported, not fatal
                session.unmeasured("G5", what, ">= 1", f"{type(error).__name__}: {error}"[:200])
            else:
                session.at_least("G5", what, rates[n] / rate, 1.0)
        for page_size in (2, 8):
            small = session.across(
                direction, page_size, 2 * KIB, num_bytes=num_bytes, host_layout="layer_first"
            )
            item = f"{page_size * 2} KiB items"
            ours = session.verified(
                "peers", f"{direction}, ours, {item}", small, partial(small.launch, 4)
            )
            batch = session.verified(
                "peers", f"{direction}, batched memcpy, {item}", small, peers.memcpy_batch(small)
            )
            session.at_least("G5", f"{direction}, {item}, over batched memcpy", ours / batch, 5.0)
        few = session.across(
            direction, 16, 2 * KIB, num_bytes=min(num_bytes, 32 * MIB), host_layout="layer_first"
        )
        each = session.verified(
            "peers", f"{direction}, memcpy per page", few, peers.memcpy_per_page(few), repeats=3
        )
        session.notes[f"over_memcpy_per_page_{direction}"] = rates[4] / each


def interference(session: Session) -> None:
    """G7: a matrix product in a loop, with and without copies beside it."""
    bench = session.bench
    if not bench.on_gpu:
        session.unmeasured("G7", "GEMM beside a load-back", "<= 1.05", "it needs a GPU")
        return
    a, b = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, device=bench.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(a)

    def gemms() -> None:
        for _ in range(NUM_GEMMS):
            torch.mm(a, b, out=out)

    side = torch.cuda.Stream(bench.device, priority=-1)
    alone_s = bench.timed(gemms, repeats=5).p50_s
    for direction in ("to_device", "to_host"):
        transfer = session.across(direction, 16, 2 * KIB)
        solo = session.time(
            "interference", f"{direction} alone", partial(transfer.launch, 4),
            transfer.num_bytes, repeats=5,
        )  # fmt: skip
        num_copies = math.ceil(1.3 * alone_s * solo * 1e9 / transfer.num_bytes)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_copies + 1)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)  # until everything is queued
        start.record()
        side.wait_event(start)
        with torch.cuda.stream(side):
            marks[0].record()
            for mark in marks[1:]:
                transfer.launch(4)
                mark.record()
        gemms()
        end.record()
        torch.cuda.synchronize()
        beside_s = start.elapsed_time(end) / 1e3
        times = [x.elapsed_time(y) / 1e3 for x, y in itertools.pairwise(marks)]
        during = [
            seconds
            for seconds, mark in zip(times, marks[1:], strict=True)
            if start.elapsed_time(mark) / 1e3 < beside_s
        ] or times[:1]
        rate = transfer.num_bytes / (sum(during) / len(during)) / 1e9
        session.at_most("G7", f"GEMM slowed by 4 programs {direction}", beside_s / alone_s, 1.05)
        session.at_least("G7", f"copy {direction} beside GEMM over alone", rate / solo, 0.90)
        session.notes[f"queueing_delay_us_{direction}"] = _queueing_delay_us(
            session, gemms, side, direction
        )


def slots(session: Session) -> None:
    """G8: Mamba slots of all layers, conv and SSM, in one launch."""
    bench = session.bench
    num_layers, num_slots = (36, 24) if bench.on_gpu else (2, 24)
    conv_words, ssm_words = (48 * KIB // 8, 2 * MIB // 8) if bench.on_gpu else (96, 1024)
    generator = torch.Generator(bench.device).manual_seed(0)

    def pools(words: int) -> list[Tensor]:
        return [
            torch.randint(
                -(2**62), 2**62, (num_slots, words), generator=generator, device=bench.device
            )
            for _ in range(num_layers)
        ]

    conv, ssm = pools(conv_words), pools(ssm_words)
    every = torch.arange(num_slots, dtype=torch.int32, device=bench.device)
    for num_moved, src_ids, dst_ids in ((8, every[:8], every[8:16]), (1, every[:1], every[16:17])):
        for name, buffers in (("conv and SSM", conv + ssm), ("conv", conv)):
            transfer = Transfer(
                table=copy_table(buffers, buffers), src_ids=src_ids, dst_ids=dst_ids
            )
            transfer.launch()
            bench.synchronize()
            for buffer in buffers:
                if not torch.equal(buffer[dst_ids.long()], buffer[src_ids.long()]):
                    raise RuntimeError(f"{num_moved} slots, {name}: a copy differs")
            case = f"{num_moved} slots, {name}"
            rate = session.time("slots", case, transfer.launch, transfer.num_bytes)
            if num_moved == 8 and name != "conv":
                flat = bench.arenas["device"][: min(transfer.num_bytes, bench.device_bytes)]
                into = bench.arenas["device_target"][: flat.numel()]
                ceiling = session.time(
                    "slots",
                    "copy_ of as many bytes",
                    partial(into.copy_, flat),
                    flat.numel(),
                )
                session.at_least("G8", f"{case}, over device copy_", rate / ceiling, 0.88)
            if num_moved == 8 and name == "conv" and bench.on_gpu:
                peer = peers.slot_copy_of_sglang(
                    transfer, num_programs=4 * copy.num_sms(bench.device)
                )
                two_bytes = session.time("slots", f"{case}, 16-bit peer", peer, transfer.num_bytes)
                session.at_least("G8", f"{case}, over a 16-bit copy", rate / two_bytes, 1.15)
            if num_moved == 1 and name != "conv":
                each = session.time(
                    "slots", f"{case}, a launch for each tensor",
                    peers.memcpy_per_page(transfer), transfer.num_bytes,
                )  # fmt: skip
                session.at_least("G8", f"{case}, over a launch for each tensor", rate / each, 5.0)


def windows(session: Session) -> None:
    """The sliding window, translated on the way, against the plain copy of the same pages."""
    transfer = session.within_device(64, KIB, "layer_first", "layer_first")
    table, ids = transfer.table, transfer.src_ids
    plain = session.verified("window", "plain", transfer, transfer.launch)
    to_swa = torch.full((2 * len(ids) + 5,), -1, dtype=torch.int32, device=ids.device)
    full_ids = torch.randperm(
        len(to_swa), generator=torch.Generator().manual_seed(1)
    )[: len(ids)].to(ids.device)  # fmt: skip
    to_swa[full_ids] = ids
    full_ids = full_ids.int()
    plane = copy if session.bench.on_gpu else reference
    rate = session.verified(
        "window",
        "translated",
        transfer,
        lambda: plane.copy_items(table, full_ids, transfer.dst_ids, src_map=to_swa),
    )
    session.notes["window_translated_over_plain"] = rate / plain


def checksums(session: Session) -> None:
    """The checksum fused into the copy: what it costs within the device and across the link."""
    plane = checksum if session.bench.on_gpu else reference
    for name, transfer in (
        ("device", session.within_device(64, 2 * KIB, "layer_first", "page_first")),
        ("to_host", session.across("to_host", 64, 2 * KIB)),
    ):
        plain = session.verified("checksum", f"{name}, plain", transfer, transfer.launch)
        rate = session.verified(
            "checksum",
            f"{name}, with checksum",
            transfer,
            partial(
                plane.copy_items_with_checksum, transfer.table, transfer.src_ids, transfer.dst_ids
            ),
        )
        session.notes[f"checksum_over_plain_{name}"] = rate / plain


def indices(session: Session) -> None:
    """G9: page tables and windows of 256 requests with a context of 128 Ki tokens, page 64."""
    bench = session.bench
    num_requests, num_columns = (256, 2048) if bench.on_gpu else (4, 64)
    plane = index if bench.on_gpu else reference

    def to_device(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(bench.device)

    per_request = 8  # nodes on the path of a request
    first = torch.arange(per_request) * (num_columns // per_request)
    spans = torch.stack([first, torch.full_like(first, num_columns // per_request)], dim=1)
    spans = to_device(spans.repeat(num_requests, 1))
    bounds = to_device(torch.arange(num_requests + 1) * per_request)
    page_ids = to_device(torch.arange(num_columns))
    seq_lens = to_device(torch.full((num_requests,), 64 * num_columns))
    launches: dict[str, Callable[[], Tensor]] = {
        "page table": lambda: plane.page_table(page_ids, spans, bounds, num_columns=num_columns),
        "window table": lambda: plane.window_table(
            page_table, seq_lens, page_ids, page_size=64, window_len=1024
        ),
        "translation": lambda: plane.translate_pages(page_table.flatten(), page_ids),
    }
    page_table = launches["page table"]()
    if not torch.equal(page_table, page_ids.expand(num_requests, num_columns)):
        raise RuntimeError("the page table differs from the pages of its spans")
    for name, launch in launches.items():
        repeated = _graphed(launch, times=20) if bench.on_gpu else launch
        num_bytes = launch().numel() * 4
        session.time("index", name, repeated, 20 * num_bytes, launches=20)
        got_us = session.records[-1].timing.p50_s / 20 * 1e6
        session.at_most("G9", f"{name}, {num_requests} requests, µs", got_us, 6.0)


def launches(session: Session) -> None:
    """G10: what a load-back of 8 MiB costs the host, and whether a graph replays it."""
    if not session.bench.on_gpu:
        session.unmeasured("G10", "host time of a launch, µs", "<= 30", "it needs a GPU")
        return
    transfer = session.across("to_device", 16, 2 * KIB, num_bytes=8 * MIB)
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
    replay = _graphed(transfer.launch, times=1)
    session.bench.verify(transfer, replay)
    session.at_least("G10", "a replayed graph moves equal bytes", 1.0, 1.0)


def sweep(session: Session) -> None:
    """Bandwidth against page size, row bytes, contiguity and programs, in every direction."""
    for direction in ("device", "to_device", "to_host"):
        for row_bytes in (256, 2 * KIB):
            for page_size in (1, 4, 16, 64, 128):
                for contiguous in (False, True):
                    if contiguous and (page_size, row_bytes) != (16, 2 * KIB):
                        continue
                    if direction == "device":
                        transfer = session.within_device(
                            page_size, row_bytes, "layer_first", "page_first"
                        )
                    else:
                        num_bytes = session.bench.host_bytes // 4
                        transfer = session.across(
                            direction, page_size, row_bytes,
                            num_bytes=num_bytes, contiguous=contiguous,
                        )  # fmt: skip
                    session.bench.verify(transfer, transfer.launch)
                    for num_programs in (None,) if direction == "device" else (2, 4, 16):
                        session.time(
                            "sweep",
                            direction,
                            partial(transfer.launch, num_programs),
                            transfer.num_bytes,
                            repeats=5,
                            page_size=page_size,
                            row_bytes=row_bytes,
                            contiguous=int(contiguous),
                            num_programs=num_programs or 0,
                        )


def crossover(session: Session) -> None:
    """The piece size from which the copy engine should be used on this machine."""
    if session.bench.on_gpu:
        session.notes["crossover_bytes"] = copy_engine.measured_crossover(session.bench.device)


CASES: dict[str, Callable[[Session], None]] = {
    "ceilings": ceilings,
    "pages": pages,
    "links": links,
    "peers": against_peers,
    "interference": interference,
    "slots": slots,
    "windows": windows,
    "checksums": checksums,
    "indices": indices,
    "launches": launches,
    "crossover": crossover,
    "sweep": sweep,
}


def _two_pass(transfer: Transfer) -> Callable[[], None]:
    """Gather each buffer into a staging buffer, then permute it into the target's pages."""
    table = transfer.table
    sources, targets = transfer.src_ids.long(), transfer.dst_ids.long()
    words = table.src[0].shape[1]
    staging = torch.empty(
        len(table.src), len(sources), words, dtype=torch.int64, device=table.device
    )
    pool = table.dst[0].as_strided(
        (table.dst[0].shape[0], len(table.dst), words), (len(table.dst) * words, words, 1)
    )

    def launch() -> None:
        for buffer, src in zip(staging, table.src, strict=True):
            torch.index_select(src, 0, sources, out=buffer)
        pool[targets] = staging.transpose(0, 1)

    return launch


def _graphed(launch: Callable[[], object], *, times: int) -> Callable[[], None]:
    """A CUDA graph of some launches in a row."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            launch()
    return graph.replay


def _queueing_delay_us(
    session: Session, gemms: Callable[[], None], side: torch.cuda.Stream, direction: str
) -> float:
    """How much longer a small copy takes when it is asked for in the middle of the products."""
    small = session.across(direction, 16, 2 * KIB, num_bytes=MIB)

    def seconds() -> float:
        start = time.perf_counter()
        with torch.cuda.stream(side):
            small.launch(4)
        side.synchronize()
        return time.perf_counter() - start

    seconds()
    torch.cuda.synchronize()
    alone = min(seconds() for _ in range(5))
    gemms()
    beside = sorted(seconds() for _ in range(9))[4]
    torch.cuda.synchronize()
    return (beside - alone) * 1e6
