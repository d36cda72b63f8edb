"""Copies, storage and steps of the simulated executor, to the nanosecond."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefetch.prefetch import Phase
from hicache.cache.tiers.transfer import BackUp, CopyState, LoadBack, Move, StorageDelete
from hicache.clock import NEVER, SimulatedClock, Stall
from hicache.config import StorageConfig
from hicache.executor.simulated.cut import CuttingExecutor
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.stores import EndlessStore
from hicache.scheduler.batch import Batch, Extend
from tests.executor.works import key, prefetch_of, write_of

MS = 1_000_000
SIZES = (MS, 2 * MS, MS // 2)  # bytes of a page, a window page and a state: 1, 2, 0.5 ms
PLAIN = {
    "kind": "memory",
    "read_gbps": 1.0,
    "write_gbps": 1.0,
    "query_s": 1e-3,
    "operation_s": 1e-4,
    "sidecar_s": 0.0,
    "batch_pages": 2,
    "read_workers": 1,
    "write_workers": 1,
}


class Kept(EndlessStore):
    """A storage that holds `keys` and has room for `room` of them."""

    def __init__(self, *keys, room=1 << 30):
        super().__init__()
        self.room, self.num_questions = room, 0
        super().write(keys)

    def contains(self, keys):
        self.num_questions += 1
        return super().contains(keys)

    def write(self, keys):
        fit = keys[: self.room - len(self._stored)]
        super().write(fit)
        return len(keys) - len(fit)


def io_of(*storages, engines=1, stalls=(), seed=0, links=(), **knobs):
    """Simulated I/O: 1 GB/s to and from storage; a query takes 1 ms, an operation 0.1 ms."""
    rates = {"to_device": 2e9, "to_host": 1e9, "host_memory": 1e15} | dict(links)
    config = StorageConfig(**PLAIN | knobs)
    return SimulatedIo(config, storages, [rates] * engines, stalls=stalls, seed=seed)


def events(io):
    """Run until all work is done; return (time in ns, engine, finished work) of each."""
    seen = []
    while (moment := io.pass_by(0, SimulatedClock())) < NEVER:
        seen += [(moment, engine, done) for engine, done in io.advance(moment)]
    return seen


def moments(io):
    return [moment / MS for moment, _, _ in events(io)]


def started(io, prefetch, engine=0, now_ns=0):
    io.enqueue("read", io.read(engine, prefetch, SIZES), now_ns)
    return prefetch


def copy_of(kind, num_bytes, **more):
    extra = {"starts": {}, "points": [], "is_fence": False} if kind is BackUp else {}
    return kind(moves=[], num_bytes=num_bytes, node=None, **extra | more)


def test_each_engine_queries_storage_for_one_request_at_a_time_in_parallel_with_others():
    io = io_of(Kept(key(0)), engines=2)
    asked = [prefetch_of(2) for _ in range(3)]
    for prefetch, engine in zip(asked, (0, 0, 1), strict=True):
        io.enqueue(f"query{engine}", io.query(engine, prefetch), 5)
    assert asked[0].restorable is None
    assert events(io) == [(MS + 5, 0, asked[0]), (MS + 5, 1, asked[2]), (2 * MS + 5, 0, asked[1])]
    assert asked[0].restorable == [1]
    assert io.counters["storage/query_count"] == 3


def test_a_storage_query_waits_for_a_stall_and_is_skipped_for_a_stopped_prefetch():
    stall, storage = Stall(), Kept(key(0))
    io = io_of(storage, stalls=(stall,))
    waiting, settled = prefetch_of(2), prefetch_of(2)
    settled.phase = Phase.stopped
    for prefetch in (settled, waiting):
        io.begin(io.query(0, prefetch), 0)
    stall.add(3 * MS)
    assert events(io) == [(MS, 0, settled), (4 * MS, 0, waiting)]
    assert (storage.num_questions, settled.restorable, waiting.restorable) == (1, None, [1])


SIDECARS = [key(0, SWA), key(1, SWA), key(1, MAMBA)]
READS = {  # keys in storage, what is read, milliseconds of the reports, pages, restored, bytes
    "two batches": ([*map(key, range(3))], {"num_pages": 3}, [2.1, 3.2], 3, 0, 3 * MS),
    "a missing page": (
        [*map(key, (0, 2, 3, 4, 5))], {"num_pages": 6, "windows": 1}, [1.1], 1, 0, MS
    ),
    "window and state": (
        [key(0), key(1), *SIDECARS], {"num_pages": 2, "windows": 2, "has_state": True},
        [2.1, 2.2 + 5 + 4 + 0.5], 2, 2, 6 * MS + MS // 2,
    ),
    "a missing window": (
        [key(0), key(1), *SIDECARS[2:]], {"num_pages": 2, "windows": 1, "has_state": True},
        [2.1, 2.2 + 5], 2, 0, 2 * MS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "what", "ends", "pages", "restored", "num_bytes"), READS.values(), ids=READS
)
def test_a_read_moves_its_batches_of_pages_and_then_its_window_and_state(
    keys, what, ends, pages, restored, num_bytes
):
    io = io_of(Kept(*keys), sidecar_s=5e-3)
    read = started(io, prefetch_of(**what))
    assert io.pass_by(0, SimulatedClock()) == MS // 10  # the first bytes move
    assert moments(io) == pytest.approx(ends)
    assert (read.completed_pages, read.restored_pages, read.is_read) == (pages, restored, True)
    assert read.read_ns == (0, round(ends[-1] * MS))
    assert io.counters["transfer/storage_read_bytes"] == num_bytes


@pytest.mark.parametrize("num_pages", [4, 2], ids=["between batches", "before the window"])
def test_a_read_that_is_stopped_ends_with_its_current_batch(num_pages):
    io = io_of(Kept(*map(key, range(4)), key(1, SWA), key(3, SWA)))
    read = started(io, prefetch_of(num_pages, windows=1))
    io.advance(MS)
    read.phase = Phase.stopped
    assert moments(io) == [2.1]
    assert (read.completed_pages, read.restored_pages, read.is_read) == (2, 0, True)
    assert io.counters["transfer/storage_read_bytes"] == 2 * MS


@pytest.mark.parametrize(
    ("workers", "ends"), [(1, [1.1, 2.2, 3.3]), (2, [2.1, 2.1, 3.2]), (3, [3.1] * 3)]
)
def test_reads_wait_for_a_worker_and_share_the_link(workers, ends):
    io = io_of(Kept(key(0)), read_workers=workers)
    for _ in ends:
        started(io, prefetch_of(1))
    assert moments(io) == ends


def test_random_delays_follow_from_seed_and_engine_and_have_the_configured_mean():
    def late_s(seed, engine, count=1):
        io = io_of(Kept(), engines=2, seed=seed, delay_s=1e-2)
        return [io._latency_ns(engine) * 1e-9 - 1e-4 for _ in range(count)]

    assert late_s(1, 0) == late_s(1, 0)
    assert len({*late_s(1, 0), *late_s(2, 0), *late_s(1, 1)}) == 3
    many = late_s(0, 0, 2000)
    assert min(many) >= 0
    assert sum(many) / len(many) == pytest.approx(1e-2, rel=0.1)
    io = io_of(Kept(key(0)), delay_s=1e-2)
    started(io, prefetch_of(1))
    assert moments(io)[-1] > 1.1


def test_reads_and_writes_share_the_bandwidth_limit_of_storage():
    io = io_of(Kept(key(0)), shared_gbps=1.0, query_s=1e-4)
    started(io, prefetch_of(1))
    io.enqueue("write", io.write(0, write_of((FULL, 1)), SIZES), 0)
    assert moments(io) == [2.0, 2.1]  # the write waits for its question first


def test_a_write_stores_in_batches_the_pages_that_storage_lacks_and_has_room_for():
    storage = Kept(key(1), room=3)
    io, write = io_of(storage), write_of((FULL, 0), (FULL, 1), (SWA, 2), (MAMBA, 3))
    io.enqueue("write", io.write(0, write, SIZES), 0)
    io.advance(MS + 3 * MS + MS // 10 - 1)
    assert storage.contains(write.keys) == [False, True, False, False]
    assert events(io) == [(4 * MS + MS // 2 + MS // 5, 0, write)]
    assert storage.contains(write.keys) == [True, True, True, False]
    assert io.counters["transfer/storage_write_bytes"] == 3_500_000
    assert io.counters["storage/refused_write_pages"] == 1
    again = write_of((FULL, 0), (FULL, 1))  # storage has both
    io.enqueue("write", io.write(0, again, SIZES), 5 * MS)
    assert events(io) == [(6 * MS, 0, again)]


def test_a_write_from_pages_that_are_free_already_copies_them_to_a_buffer_first():
    knobs = {"links": {"host_memory": 1e9}, "write_gbps": 1e6, "operation_s": 0.0}
    io, write = io_of(Kept(), **knobs), write_of((FULL, 0), num_bytes=MS, is_given_away=True)
    io.enqueue("write", io.write(0, write, SIZES), 0)
    assert events(io) == [(3 * MS, 0, write)]  # to the buffer, the question, to storage


@pytest.mark.parametrize(("links", "ends"), [({}, [2, 4]), ({"both_ways": 1e9}, [8, 8])])
def test_the_time_of_a_copy_is_that_of_its_bytes_on_the_links_of_its_direction(links, ends):
    io = io_of(links=links)
    load, save = copy_of(LoadBack, 4 * MS), copy_of(BackUp, 4 * MS, is_fence=True)
    for work in (load, save):
        io.begin(io.copy(0, work), 0)
    assert (io.copying[0], io.backing_up[0], io.fences[0]) == (2, 1, 1)
    assert [io.copying_s(0, now) for now in (0, 3 * MS, 5 * MS)] == pytest.approx([4e-3, 1e-3, 0])
    assert events(io) == [(ends[0] * MS, 0, load), (ends[1] * MS, 0, save)]
    assert (io.copying[0], io.backing_up[0], io.fences[0]) == (0, 0, 0)


def test_a_rank_moves_its_share_of_bytes_and_queries_its_own_storage():
    io = io_of(Kept(key(0)), Kept(key(0), key(1)), engines=4)
    work, reads = copy_of(BackUp, 4 * MS), [prefetch_of(2), prefetch_of(2)]
    io.begin(io.copy(2, work), 0)
    for rank, read in enumerate(reads):
        io.begin(io.query(2 + rank, read), 0)
    assert events(io) == [(MS, 1, reads[0]), (MS, 1, reads[1]), (2 * MS, 1, work)]
    assert [read.restorable for read in reads] == [[1], [1, 2]]


def test_work_that_takes_no_time_is_done_at_once():
    io, read = io_of(Kept(), query_s=0.0), prefetch_of(2)
    io.begin(io.query(0, read), 7)
    assert io.pass_by(0, SimulatedClock()) == 7
    assert io.advance(7) == [(0, read)]
    assert io.pass_by(0, SimulatedClock()) == NEVER


class Priced:
    """A cost model that records its arguments; a decode step takes 100 ns × the slowdown."""

    def __init__(self):
        self.asked = []

    def decode_ends_ns(self, lens, num_steps, now_ns, *, slowdown):
        self.asked.append(lens)
        yield [now_ns + round(100 * slowdown) * (step + 1) for step in range(num_steps)]

    def layer_bytes(self, *counts):
        return counts

    def forward_ns(self, extends, lens, **more):
        self.asked.append({"extends": extends, "lens": lens, **more})
        return SimpleNamespace(total_ns=1000, load_stall_ns=30)


def executor_of(io, engine=0, shared_load_rate=None, kind=SimulatedExecutor):
    cost = Priced()
    rates = {"load_rate": 7.0, "shared_load_rate": shared_load_rate, "slowdown": 1.5}
    return kind(engine, cost, io, page_size=16, page_bytes=SIZES, **rates), cost


def batch_of(*extends, lens=(), load_backs=(), num_steps=1):
    """Prompt chunks as (start, end, saves), and decodes by the length of their KV."""
    return Batch(
        extends=[Extend(None, *each) for each in extends],
        decodes=[SimpleNamespace(kv_len=kv_len) for kv_len in lens],
        load_backs=load_backs,
        num_steps=num_steps,
    )


def test_decode_steps_end_one_after_the_other_and_each_sees_one_more_token():
    executor, cost = executor_of(io_of())
    run = executor.forward(batch_of(lens=(40, 7), num_steps=3), 5000)
    assert [run.ends[step] for step in range(3)] == [5100, 5200, 5300]
    assert run.load_stall_ns == 0
    assert cost.asked == [[41, 8]]


@pytest.mark.parametrize(("kind", "rate"), [(BackUp, 4.0), (LoadBack, 7.0)])
def test_a_copy_slows_steps_of_its_own_engine_and_a_back_up_its_load_backs(kind, rate):
    io = io_of(engines=2)
    (executor, cost), (other, _) = executor_of(io, shared_load_rate=4.0), executor_of(io, engine=1)
    executor.submit(copy_of(kind, 4 * MS), 0)
    assert executor.forward(batch_of(), 0).ends[0] == 150
    assert other.forward(batch_of(), 0).ends[0] == 100
    executor.forward(batch_of((0, 5, [])), 0)
    assert (cost.asked[-1]["slowdown"], cost.asked[-1]["load_rate"]) == (1.5, rate)
    assert cost.asked[-1]["load_layer_bytes"] is None  # nothing is loaded


def test_a_step_with_prompts_is_priced_with_its_loaded_bytes_and_saved_states():
    executor, cost = executor_of(io_of())
    loads = [
        LoadBack(
            moves=[Move(kind, [0] * count, [0] * count) for kind, count in enumerate(counts)],
            num_bytes=0,
            node=None,
        )
        for counts in ((2, 1, 1), (3, 0, 1))
    ]
    extends = (0, 64, [(32, 1), (64, 2)]), (16, 20, [(20, 3)])
    run = executor.forward(batch_of(*extends, lens=[9], load_backs=loads), 5000)
    assert (run.ends[0], run.load_stall_ns) == (6000, 30)
    assert cost.asked == [
        {
            "extends": [(0, 64), (16, 20)],
            "lens": [10],
            "load_layer_bytes": (5 * 16, 1 * 16, 2),
            "load_rate": 7.0,
            "slowdown": 1.0,
            "copying_s": 0.0,
            "saved_states": 3,
            "num_queries": 1,
        }
    ]


def test_a_prefill_that_is_cut_at_the_states_it_saves_is_priced_in_passes():
    executor, cost = executor_of(io_of(), kind=CuttingExecutor)
    batch = batch_of((0, 64, [(16, 1), (32, 2)]), (16, 48, [(48, 3)]), lens=[9])
    run = executor.forward(batch, 5000)
    assert (run.ends[0], run.load_stall_ns) == (5000 + 3 * 1000, 30)
    assert [(each["extends"], each["lens"], each["saved_states"]) for each in cost.asked] == [
        ([(0, 16), (16, 48)], [10], 2),
        ([(16, 32)], [], 1),
        ([(32, 64)], [], 0),
    ]


def test_an_executor_passes_each_kind_of_work_to_its_link_or_to_storage():
    storage, ids = Kept(key(0)), np.zeros(1, np.int32)
    io = io_of(storage)
    executor, _ = executor_of(io)
    executor.submit(CopyState(source=ids, target=ids), 0)
    assert io.pass_by(0, SimulatedClock()) == NEVER  # part of the step
    executor.submit(StorageDelete(keys=[key(0)]), 0)
    assert storage.contains([key(0)]) == [False]
    fence, write, read = copy_of(BackUp, MS, is_fence=True), write_of((FULL, 1)), prefetch_of(1)
    executor.submit(fence, 0)
    assert executor.is_fenced
    executor.submit(write, 0)
    executor.query(read, 0)
    executor.read(read, 0)
    assert {id(done) for _, _, done in events(io)} == {id(fence), id(write), id(read)}
    assert not executor.is_fenced
    assert storage.contains([key(1)]) == [True]
