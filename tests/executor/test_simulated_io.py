"""Copies and storage in simulated time, to the nanosecond."""

from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.tiers.transfer import (
    BackUp,
    CopyState,
    LoadBack,
    Move,
    StorageDelete,
    StorageWrite,
)
from hicache.clock import NEVER, SimulatedClock, Stall
from hicache.config import StorageConfig
from hicache.executor.simulated.cut import CuttingExecutor
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.scheduler.batch import Batch, Extend

MS = 1_000_000
SIZES = (1_000_000, 2_000_000, 500_000)  # bytes of a page, a window page and a state: 1, 2, 0.5 ms
ENDLESS = 1e15


class Kept:
    """A storage of keys, with room for so many."""

    def __init__(self, *keys: bytes, room: int = 1 << 30) -> None:
        self.keys = set(keys)
        self.asked: list[list[bytes]] = []
        self._room = room

    def contains(self, keys: list[bytes]) -> list[bool]:
        self.asked.append(keys)
        return [key in self.keys for key in keys]

    def read(self, keys: list[bytes]) -> int:
        return len(list(takewhile(self.keys.__contains__, keys)))

    def write(self, keys: list[bytes]) -> int:
        num_fit = min(len(keys), self._room - len(self.keys))
        self.keys |= set(keys[:num_fit])
        return len(keys) - num_fit

    def delete(self, keys: list[bytes]) -> None:
        self.keys -= set(keys)


def io_of(
    *storages: Kept, engines: int = 1, stalls: tuple[Stall, ...] = (), seed: int = 0, **knobs: Any
) -> SimulatedIo:
    """A gigabyte a second to and from storage; a round trip takes 1 ms, an operation 0.1."""
    plain: dict[str, Any] = {
        "read_gbps": 1.0,
        "write_gbps": 1.0,
        "query_s": 1e-3,
        "operation_s": 1e-4,
        "sidecar_s": 0.0,
        "batch_pages": 2,
        "read_workers": 1,
        "write_workers": 1,
    }
    config = StorageConfig(kind="memory", **{**plain, **knobs})
    rates = {"to_device": 2e9, "to_host": 1e9, "host_memory": ENDLESS}
    return SimulatedIo(config, storages, [rates] * engines, stalls=stalls, seed=seed)  # type: ignore[arg-type]


class Read:
    """A prefetch of so many pages, named by the letters a, b, c, ..."""

    def __init__(self, num_pages: int, *, windows: int = 0, has_state: bool = False) -> None:
        self.num_pages = num_pages
        self.has_state = has_state
        self.needs = ((SWA, Window(windows)), (MAMBA, Window(1)))
        self.has_sidecars = bool(windows or has_state)
        self.staged = [
            np.arange(count, dtype=np.int32) for count in (num_pages, windows, has_state)
        ]
        self.completed_pages = 0
        self.restorable: list[int] | None = None
        self.read_ns: tuple[int, int] | None = None
        self.restored_pages = 0
        self.stop_pages: int | None = None
        self.is_read = False
        self.is_settled = False

    def keys(self, kind: int, first: int, end: int) -> list[bytes]:
        return [bytes([97 + page]) for page in range(first, end)]

    def usable_pages(self, completed: int) -> int:
        return completed if completed == self.num_pages else 0

    def first_page(self, window: Window, end: int) -> int:
        return max(end - window.num_pages, 0)

    def sidecar_keys(self, end: int) -> list[bytes]:
        return [b"w"] * len(self.staged[SWA]) + [b"s"] * self.has_state

    def ask(self, contains: Any) -> list[int]:
        return [number + 1 for number, there in enumerate(contains([b"a", b"b"])) if there]


def events(io: SimulatedIo) -> list[tuple[int, int, Any]]:
    """All that happens from now on: when, for which engine, and what is done."""
    seen = []
    while (moment := io.pass_by(0, SimulatedClock())) < NEVER:
        seen += [(moment, engine, done) for engine, done in io.advance(moment)]
    return seen


def start_read(io: SimulatedIo, read: Read, engine: int = 0, now_ns: int = 0) -> None:
    io.enqueue("read", io.read(engine, read, SIZES), now_ns)  # type: ignore[arg-type]


# -- asking ------------------------------------------------------------------------------------


def test_copies_to_the_host_are_counted_until_each_is_done() -> None:
    io = io_of(Kept())
    for num_bytes in (1_000_000, 4_000_000):
        io.begin(io.copy(0, copy_of(BackUp, num_bytes)), 0)
    counts = [io.backing_up[0]]
    while (moment := io.pass_by(0, SimulatedClock())) < NEVER:
        counts += [io.backing_up[0] for _ in io.advance(moment)]
    assert counts == [2, 1, 0]


def test_a_question_takes_a_round_trip() -> None:
    io, read = io_of(Kept(b"b")), Read(2)
    io.enqueue("query0", io.query(0, read), 5)  # type: ignore[arg-type]
    assert read.restorable is None
    assert events(io) == [(MS + 5, 0, read)]
    assert read.restorable == [2]
    assert io.counters["storage/query_count"] == 1


def test_nobody_asks_for_a_request_that_has_gone_on() -> None:
    storage, read = Kept(), Read(2)
    io = io_of(storage)
    io.begin(io.query(0, read), 0)  # type: ignore[arg-type]
    read.is_settled = True
    assert events(io) == [(MS, 0, read)]
    assert storage.asked == []
    assert read.restorable is None


def test_an_engine_asks_about_one_request_after_another_and_two_engines_side_by_side() -> None:
    io = io_of(Kept(), engines=2)
    reads = [Read(2) for _ in range(3)]
    for read, engine in zip(reads, (0, 0, 1), strict=True):
        io.enqueue(f"query{engine}", io.query(engine, read), 0)  # type: ignore[arg-type]
    assert events(io) == [(MS, 0, reads[0]), (MS, 1, reads[2]), (2 * MS, 0, reads[1])]


def test_an_answer_that_comes_late_takes_the_time_that_storage_was_stuck() -> None:
    stall = Stall()
    io, read = io_of(Kept(b"a"), stalls=(stall,)), Read(2)
    io.begin(io.query(0, read), 0)  # type: ignore[arg-type]
    stall.add(3 * MS)
    assert events(io) == [(4 * MS, 0, read)]


# -- reading -----------------------------------------------------------------------------------


def test_pages_come_in_batches_each_after_an_operation() -> None:
    io, read = io_of(Kept(b"a", b"b", b"c")), Read(3)
    start_read(io, read)
    first, last = 2 * MS + MS // 10, 3 * MS + 2 * MS // 10
    assert io.pass_by(0, SimulatedClock()) == MS // 10
    assert events(io) == [(first, 0, read), (last, 0, read)]
    assert (read.completed_pages, read.is_read, read.read_ns) == (3, True, (0, last))
    assert io.counters["transfer/storage_read_bytes"] == 3_000_000


def test_a_read_ends_at_the_first_page_that_is_not_there() -> None:
    io, read = io_of(Kept(b"a", b"c", b"d", b"e", b"f")), Read(6, windows=1)
    start_read(io, read)
    assert events(io) == [(MS + MS // 10, 0, read)]
    assert (read.completed_pages, read.is_read, read.restored_pages) == (1, True, 0)
    assert io.counters["transfer/storage_read_bytes"] == 1_000_000


def test_window_and_state_come_after_the_pages_and_take_longer_where_it_says_so() -> None:
    io = io_of(Kept(b"a", b"b", b"w", b"s"), sidecar_s=5e-3)
    read = Read(2, windows=2, has_state=True)
    start_read(io, read)
    pages, last = 2 * MS + MS // 10, 2 * MS + 2 * MS // 10 + 5 * MS + 4 * MS + MS // 2
    assert events(io) == [(pages, 0, read), (last, 0, read)]
    assert read.restored_pages == 2
    assert io.counters["transfer/storage_read_bytes"] == 2_000_000 + 4_000_000 + 500_000


def test_a_window_that_is_not_there_takes_an_operation_and_no_bytes() -> None:
    io, read = io_of(Kept(b"a", b"b", b"s")), Read(2, windows=1, has_state=True)
    start_read(io, read)
    assert events(io)[-1] == (2 * MS + 2 * MS // 10, 0, read)
    assert (read.is_read, read.restored_pages) == (True, 0)
    assert io.counters["transfer/storage_read_bytes"] == 2_000_000


def test_a_read_that_is_ended_stops_after_the_batch_at_hand() -> None:
    io, read = io_of(Kept(b"a", b"b", b"c", b"d", b"w")), Read(4, windows=1)
    start_read(io, read)
    io.advance(MS)
    read.is_settled = True
    assert events(io) == [(2 * MS + MS // 10, 0, read)]
    assert (read.completed_pages, read.restored_pages, read.is_read) == (2, 0, True)


def test_a_read_that_is_ended_with_its_last_page_leaves_window_and_state() -> None:
    io, read = io_of(Kept(b"a", b"b", b"w")), Read(2, windows=1)
    start_read(io, read)
    io.advance(MS)
    read.is_settled = True
    events(io)
    assert (read.completed_pages, read.restored_pages) == (2, 0)
    assert io.counters["transfer/storage_read_bytes"] == 2_000_000


@pytest.mark.parametrize(
    ("workers", "ends"), [(1, [1.1, 2.2, 3.3]), (2, [2.1, 2.1, 3.2]), (3, [3.1] * 3)]
)
def test_reads_wait_for_a_reader_and_share_the_link(workers: int, ends: list[float]) -> None:
    io = io_of(Kept(b"a"), read_workers=workers, operation_s=1e-4)
    for _ in ends:
        start_read(io, Read(1))
    assert [moment for moment, _, _ in events(io)] == [round(end * MS) for end in ends]


def test_delays_of_a_seed_and_an_engine_are_its_own() -> None:
    def end_of(seed: int, engine: int) -> int:
        io, read = io_of(Kept(b"a"), engines=2, seed=seed, delay_s=1e-3), Read(1)
        start_read(io, read, engine)
        return events(io)[-1][0]

    assert end_of(1, 0) == end_of(1, 0) > MS + MS // 10
    assert len({end_of(1, 0), end_of(2, 0), end_of(1, 1)}) == 3


def test_a_limit_on_all_of_storage_is_shared_by_reads_and_writes() -> None:
    io, read = io_of(Kept(b"a"), shared_gbps=1.0, query_s=1e-4), Read(1)
    start_read(io, read)
    write = StorageWrite(keys=[b"xf"], parts=[(FULL, [0])], num_bytes=SIZES[FULL], host_locks=[])
    io.enqueue("write", io.write(0, write, SIZES), 0)
    # the write waits for its question first: 0.1 ms more
    assert [moment for moment, _, _ in events(io)] == [2 * MS, 2 * MS + MS // 10]


# -- writing -----------------------------------------------------------------------------------


def write_of(*keys: bytes, **more: Any) -> StorageWrite:
    """Of keys that end with their kind's tag."""
    parts: Any = [(b"fsm".index(key[-1]), [number]) for number, key in enumerate(keys)]
    num_bytes = sum(SIZES[kind] for kind, _ in parts)
    return StorageWrite(keys=list(keys), parts=parts, num_bytes=num_bytes, host_locks=[], **more)


def test_only_pages_that_storage_lacks_are_written_in_batches_after_a_question() -> None:
    storage = Kept(b"bf")
    io, write = io_of(storage), write_of(b"af", b"bf", b"cs", b"dm")
    io.enqueue("write", io.write(0, write, SIZES), 0)
    io.advance(MS + 3 * MS + MS // 10 - 1)
    assert storage.keys == {b"bf"}
    assert events(io) == [(MS + 3 * MS + MS // 2 + 2 * MS // 10, 0, write)]
    assert storage.keys == {b"af", b"bf", b"cs", b"dm"}
    assert io.counters["transfer/storage_write_bytes"] == 3_500_000
    assert io.counters["storage/refused_write_pages"] == 0


def test_pages_that_storage_refuses_are_counted() -> None:
    io, write = io_of(Kept(room=1)), write_of(b"af", b"bf", b"cf")
    io.enqueue("write", io.write(0, write, SIZES), 0)
    events(io)
    assert io.counters["storage/refused_write_pages"] == 2


def test_pages_that_were_given_away_go_to_a_buffer_first() -> None:
    config: Any = {"to_device": 1e9, "to_host": 1e9, "host_memory": 1e9}
    knobs = StorageConfig(kind="memory", write_gbps=1e6, query_s=1e-3, operation_s=0.0)
    io = SimulatedIo(knobs, [Kept()], [config], seed=0)  # type: ignore[list-item]
    write = write_of(b"af", is_given_away=True)
    io.enqueue("write", io.write(0, write, SIZES), 0)
    assert events(io) == [(MS + MS + MS, 0, write)]  # to the buffer, the question, to storage


def test_what_is_deleted_is_gone_at_once_and_nobody_is_told() -> None:
    storage = Kept(b"a", b"b")
    io = io_of(storage)
    io.begin(io.delete(0, StorageDelete(keys=[b"a"])), 0)
    assert storage.keys == {b"b"}
    assert events(io) == []


# -- ranks and copies --------------------------------------------------------------------------


def load_of(*counts: int) -> LoadBack:
    moves = [Move(kind, [0] * count, [0] * count) for kind, count in enumerate(counts)]
    return LoadBack(moves=moves, num_bytes=0, node=None)  # type: ignore[arg-type]


def copy_of(kind: type, num_bytes: int, **more: Any) -> Any:
    extra: dict[str, Any] = {}
    if kind is BackUp:
        extra = {"starts": {}, "points": [], "is_fence": False}
    return kind(moves=[], num_bytes=num_bytes, node=None, **{**extra, **more})


def test_a_copy_takes_its_bytes_over_the_link_of_its_direction() -> None:
    io = io_of()
    load, save = copy_of(LoadBack, 4_000_000), copy_of(BackUp, 4_000_000)
    io.begin(io.copy(0, load), 0)
    io.begin(io.copy(0, save), 0)
    assert (io.copying[0], io.backing_up[0]) == (2, 1)
    assert [io.copying_s(0, now) for now in (0, 3 * MS, 5 * MS)] == pytest.approx([4e-3, 1e-3, 0])
    assert events(io) == [(2 * MS, 0, load), (4 * MS, 0, save)]
    assert io.copying[0] == 0


def test_copies_both_ways_share_what_both_ways_have() -> None:
    config = StorageConfig(kind="none")
    rates = {"to_device": 2e9, "to_host": 1e9, "host_memory": ENDLESS, "both_ways": 1e9}
    io = SimulatedIo(config, [], [rates], seed=0)
    load, save = copy_of(LoadBack, 4_000_000), copy_of(BackUp, 4_000_000)
    io.begin(io.copy(0, load), 0)
    io.begin(io.copy(0, save), 0)
    # half a gigabyte a second each: neither has its own link's
    assert events(io) == [(8 * MS, 0, load), (8 * MS, 0, save)]


def test_a_fence_stands_until_its_copy_is_done() -> None:
    io = io_of(engines=2)
    io.begin(io.copy(0, copy_of(BackUp, 1_000_000, is_fence=True)), 0)
    io.begin(io.copy(1, copy_of(BackUp, 1_000_000)), 0)
    assert (io.fences[0], io.fences[1]) == (1, 0)
    events(io)
    assert (io.fences[0], io.copying[0]) == (0, 0)


def test_a_rank_moves_its_part_and_asks_its_own_storage() -> None:
    storages = Kept(b"a"), Kept(b"b")
    io = io_of(*storages, engines=4)
    work = copy_of(BackUp, 4_000_000)
    io.begin(io.copy(2, work), 0)
    reads = [Read(2), Read(2)]
    for rank, read in enumerate(reads):
        io.begin(io.query(2 + rank, read), 0)  # type: ignore[arg-type]
    assert events(io) == [(MS, 1, reads[0]), (MS, 1, reads[1]), (2 * MS, 1, work)]
    assert [read.restorable for read in reads] == [[1], [2]]


def test_what_took_no_time_is_done_now() -> None:
    io, read = io_of(Kept(), query_s=0.0), Read(2)
    io.begin(io.query(0, read), 7)  # type: ignore[arg-type]
    assert io.pass_by(0, SimulatedClock()) == 7
    assert io.advance(7) == [(0, read)]
    assert io.pass_by(0, SimulatedClock()) == NEVER


def test_the_next_event_is_the_first_of_all_that_wait_and_all_that_move() -> None:
    io = io_of(Kept(b"a"), read_workers=3)
    start_read(io, Read(1))
    io.advance(MS // 2)  # moves bytes until 1.1 ms
    for _ in range(2):
        start_read(io, Read(1), now_ns=MS // 2)
    io.begin(io.query(0, Read(2)), MS // 2)  # type: ignore[arg-type]
    assert io.pass_by(0, SimulatedClock()) == MS // 2 + MS // 10
    io.advance(MS // 2 + MS // 10)
    io.begin(io.query(0, Read(2)), 2 * MS)  # type: ignore[arg-type]
    assert io.pass_by(0, SimulatedClock()) == MS // 2 + MS


# -- an engine's share ---------------------------------------------------------------------------


class Priced:
    """A cost model that says what it was asked, and multiplies by the slowdown."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.all_told: list[dict[str, Any]] = []

    def decode_ends_ns(self, lens: Any, num_steps: int, now_ns: int, *, slowdown: float) -> Any:
        self.told = {"lens": lens}
        yield [now_ns + round(100 * slowdown) * (step + 1) for step in range(num_steps)]

    def layer_bytes(self, *counts: int) -> Any:
        return counts

    def forward_ns(self, extends: Any, lens: Any, **told: Any) -> Any:
        self.told = {"extends": extends, "lens": lens, **told}
        self.all_told.append(self.told)
        return SimpleNamespace(total_ns=1000, load_stall_ns=30)


def executor_of(
    io: SimulatedIo,
    engine: int = 0,
    shared_load_rate: float | None = None,
    kind: type[SimulatedExecutor] = SimulatedExecutor,
) -> tuple[SimulatedExecutor, Priced]:
    cost = Priced()
    executor = kind(
        engine,
        cost,  # type: ignore[arg-type]
        io,
        page_size=16,
        page_bytes=SIZES,
        load_rate=7.0,
        shared_load_rate=shared_load_rate,
        slowdown=1.5,
    )
    return executor, cost


def batch_of(**parts: Any) -> Any:
    return SimpleNamespace(
        **{"extends": [], "decodes": [], "load_backs": [], "num_steps": 1, **parts}
    )


def test_decode_steps_end_one_after_the_other_and_see_one_token_more() -> None:
    executor, cost = executor_of(io_of())
    jobs = [SimpleNamespace(kv_len=40), SimpleNamespace(kv_len=7)]
    run = executor.forward(batch_of(decodes=jobs, num_steps=3), 5000)
    assert [run.ends[step] for step in range(3)] == [5100, 5200, 5300]
    assert run.load_stall_ns == 0
    assert cost.told["lens"] == [41, 8]


@pytest.mark.parametrize(("kind", "rate"), [(BackUp, 4.0), (LoadBack, 7.0)])
def test_a_load_back_is_slower_only_beside_a_back_up(kind: type, rate: float) -> None:
    executor, cost = executor_of(io_of(), shared_load_rate=4.0)
    executor.submit(copy_of(kind, 4_000_000), 0)
    executor.forward(batch_of(extends=[SimpleNamespace(start=0, end=5, saves=[])]), 0)
    assert cost.told["load_rate"] == rate


def test_a_step_beside_a_copy_of_its_own_engine_is_slower() -> None:
    io = io_of(engines=2)
    (executor, _), (other, _) = executor_of(io), executor_of(io, engine=1)
    executor.submit(copy_of(LoadBack, 4_000_000), 0)
    assert executor.forward(batch_of(), 0).ends[0] == 150
    assert other.forward(batch_of(), 0).ends[0] == 100
    executor.submit(copy_of(LoadBack, 4_000_000), 0)
    extend = SimpleNamespace(start=0, end=5, saves=[])
    _, cost = executor_of(io)
    executor._cost = cost  # type: ignore[assignment]
    executor.forward(batch_of(extends=[extend]), 0)
    assert cost.told["slowdown"] == 1.5


def test_a_step_with_prompts_is_one_that_knows_what_it_loads_and_saves() -> None:
    executor, cost = executor_of(io_of())
    extends = [
        SimpleNamespace(start=0, end=64, saves=[1, 2]),
        SimpleNamespace(start=16, end=20, saves=[3]),
    ]
    loads = [load_of(2, 1, 1), load_of(3, 0, 1)]
    decodes = [SimpleNamespace(kv_len=9)]
    run = executor.forward(batch_of(extends=extends, decodes=decodes, load_backs=loads), 5000)
    assert (run.ends[0], run.load_stall_ns) == (6000, 30)
    assert cost.told == {
        "extends": [(0, 64), (16, 20)],
        "lens": [10],
        "load_layer_bytes": (5 * 16, 1 * 16, 2),
        "load_rate": 7.0,
        "slowdown": 1.0,
        "copying_s": 0.0,
        "saved_states": 3,
    }


def test_a_prefill_that_is_cut_at_the_states_it_saves_is_priced_in_passes() -> None:
    executor, cost = executor_of(io_of(), kind=CuttingExecutor)
    one, other = ("one", 0, 64, [(16, 1), (32, 2)]), ("other", 16, 48, [(48, 3)])
    extends = [Extend(*each) for each in (one, other)]  # type: ignore[arg-type]
    decodes = [SimpleNamespace(kv_len=9)]
    batch = Batch(extends=extends, decodes=decodes)  # type: ignore[arg-type]
    run = executor.forward(batch, 5000)
    assert (run.ends[0], run.load_stall_ns) == (5000 + 3 * 1000, 30)
    assert [each["extends"] for each in cost.all_told] == [
        [(0, 16), (16, 48)],
        [(16, 32)],
        [(32, 64)],
    ]
    assert [each["lens"] for each in cost.all_told] == [[10], [], []]
    assert [each["saved_states"] for each in cost.all_told] == [2, 1, 0]


def test_a_step_that_loads_nothing_says_so() -> None:
    executor, cost = executor_of(io_of())
    executor.forward(batch_of(extends=[SimpleNamespace(start=0, end=5, saves=[])]), 0)
    assert cost.told["load_layer_bytes"] is None


def test_work_goes_where_it_belongs() -> None:
    storage = Kept(b"gone")
    io = io_of(storage)
    executor, _ = executor_of(io)
    executor.submit(CopyState(source=np.zeros(1, np.int32), target=np.zeros(1, np.int32)), 0)
    assert io.pass_by(0, SimulatedClock()) == NEVER  # part of the step
    executor.submit(StorageDelete(keys=[b"gone"]), 0)
    fence = copy_of(BackUp, 1_000_000, is_fence=True)
    executor.submit(fence, 0)
    assert executor.is_fenced
    write, read = write_of(b"xf"), Read(1)
    executor.submit(write, 0)
    executor.query(read, 0)  # type: ignore[arg-type]
    executor.read(read, 0)  # type: ignore[arg-type]
    done = [each for _, _, each in events(io)]
    assert not executor.is_fenced
    assert {id(each) for each in done} == {id(fence), id(write), id(read)}
    assert storage.keys == {b"xf"}


def test_a_read_is_late_by_the_configured_delay_on_the_mean() -> None:
    io = io_of(Kept(), delay_s=0.01)
    late_s = [io._latency_ns(0) * 1e-9 - 1e-4 for _ in range(2000)]
    assert min(late_s) >= 0
    assert sum(late_s) / len(late_s) == pytest.approx(0.01, rel=0.1)
