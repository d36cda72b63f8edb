"""I/O in real time: storage calls in threads, copies on streams, and completions that are polled.

Threads only move bytes and post results. The engine's own thread changes the state of the cache,
when it polls.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import (
    BackUp,
    CopyState,
    LoadBack,
    StorageDelete,
    StorageWrite,
)
from hicache.cache.tree.keys import Key, key_bytes, kinds_of
from hicache.clock import NEVER, SECOND_NS, Clock
from hicache.config import StorageConfig
from hicache.executor.completions import Delivery, StepEnds, StepRun
from hicache.executor.real.copy_streams import CopyEvent
from hicache.executor.real.model_runner import ModelRunner
from hicache.executor.storage_script import Ask, Item, Store, read_script, write_script
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import Parcel, Sent
from hicache.storage.guards.breaker import BreakerStorage

POLL_NS = 200_000  # between two polls
Items = list[Item]


class TorchIo:
    """Runs the copies and storage calls of all engines, and is the clock of the run.

    The clock shows real time while copies or storage calls are under way. While none is under way,
    the clock jumps to the next arrival of a request. So a trace of one hour takes only as long as
    its work.

    Args:
        config: configuration of the storage tier.
        storages: one storage engine per tensor-parallel rank. A failed call counts as a miss. An
            empty list means no storage.
    """

    def __init__(self, config: StorageConfig, storages: Sequence[BreakerStorage]) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._storages = list(storages)
        # by rank and key: checksum of each page that this process wrote to storage
        self._sums: list[dict[bytes, int]] = [{} for _ in self._storages]
        self.runners: list[ModelRunner] = []
        self._copies: list[tuple[int, LoadBack | BackUp]] = []
        self._num_calls = 0  # in threads
        self._parcels: list[tuple[Parcel, CopyEvent | None]] = []  # between engines
        self._posts: SimpleQueue[Callable[[], Delivery | None]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(config.read_workers, thread_name_prefix="read")
        self._writers = ThreadPoolExecutor(config.write_workers, thread_name_prefix="write")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        self._started = time.monotonic_ns()
        self._skipped = 0

    def attach(self, runner: ModelRunner) -> int:
        self.runners.append(runner)
        return len(self.runners) - 1

    # -- the clock -----------------------------------------------------------------------------

    def now(self) -> int:
        """Return the nanoseconds since the run began, including skipped idle time."""
        return time.monotonic_ns() - self._started + self._skipped

    def wait_until(self, time_ns: int) -> None:
        delay = time_ns - self.now()
        if delay <= 0:
            return
        if self.is_idle:
            self._skipped += delay
        else:
            time.sleep(min(delay, POLL_NS) / SECOND_NS)

    # -- the machinery -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not (self._copies or self._num_calls or self._parcels)

    def pass_by(self, limit_ns: int, clock: Clock) -> int:
        return NEVER if self.is_idle else min(self.now() + POLL_NS, limit_ns)

    def advance(self, now_ns: int) -> list[Delivery]:
        for runner in self.runners:
            runner.launch()
        done = self._arrived() if self._parcels else []
        still = []
        for engine, work in self._copies:
            if self.runners[engine].is_done(work):
                done.append((engine, work))
            else:
                still.append((engine, work))
        self._copies = still
        while not self._posts.empty():  # this thread is the only consumer
            delivery = self._posts.get()()
            if delivery is not None:
                self._num_calls -= 1
                done.append(delivery)
        return done

    def send(self, parcel: Parcel) -> None:
        """Copy KV between the devices of two engines, or pass on a message."""
        event = None
        if moves := parcel.moves:
            source, target = self.runners[parcel.source], self.runners[parcel.target]
            event = target.receive(source.pools, moves)
        self.counters["transfer/link_bytes"] += parcel.num_bytes
        self._parcels.append((parcel, event))

    def _arrived(self) -> list[Delivery]:
        parcels, self._parcels = self._parcels, []
        done: list[Delivery] = []
        for parcel, event in parcels:
            if event is not None and not event.is_done():
                self._parcels.append((parcel, event))
                continue
            done.append((parcel.target, parcel))
            if parcel.num_bytes:
                done.append((parcel.source, parcel))
        return done

    def track(self, engine: int, work: LoadBack | BackUp) -> None:
        self._copies.append((engine, work))

    def close(self) -> None:
        for threads in (self._readers, self._writers, self._queries):
            threads.shutdown()
        for runner in self.runners:
            runner.close()
        for storage in self._storages:
            storage.close()

    # -- storage -------------------------------------------------------------------------------

    def query(self, engine: int, prefetch: Prefetch) -> None:
        def ask() -> None:
            restorable = prefetch.ask(self._on_all_ranks)
            self._posts.put(lambda: answer(restorable))

        def answer(restorable: list[int]) -> Delivery:
            if not prefetch.is_settled:
                prefetch.restorable = restorable
            self.counters["storage/query_count"] += 1
            return engine, prefetch

        self._call(self._queries, ask)

    def read(self, engine: int, prefetch: Prefetch) -> None:
        script = read_script(prefetch, self._config.batch_pages)

        def fetch() -> None:
            began_ns = self.now()
            sidecars: list[int] = []
            restored_pages = 0
            for load in script:
                load.found = self._load(engine, key_bytes(load.keys), load.items)
                if not load.restores:
                    self._posts.put(partial(progress, load.found))
                elif load.is_whole:
                    sidecars = [kind for kind, _ in load.items]
                    restored_pages = load.restores
            read_ns = began_ns, self.now()
            self._posts.put(lambda: let_go(sidecars, restored_pages, read_ns))

        def progress(found: int) -> None:
            prefetch.completed_pages += found
            self._count("transfer/storage_read_bytes", engine, [FULL] * found)

        def let_go(sidecars: list[int], restored_pages: int, read_ns: tuple[int, int]) -> Delivery:
            self._count("transfer/storage_read_bytes", engine, sidecars)
            prefetch.restored_pages = restored_pages
            prefetch.read_ns = read_ns
            prefetch.is_read = True
            return engine, prefetch

        self._call(self._readers, fetch)

    def write(self, engine: int, work: StorageWrite) -> None:
        """Write KV-cache pages to storage in batches, in another thread.

        Pages that storage already holds are skipped. If `work.is_given_away`, the host pages may be
        reused at once, so their bytes are copied first.
        """
        ranks, keys = self.runners[engine].pools.ranks, key_bytes(work.keys)
        payloads = [
            {key: rank.payload(*item) for key, item in zip(keys, work.pages, strict=True)}
            for rank in ranks
        ]
        sums = [dict(zip(keys, rank.sums(work.pages), strict=True)) for rank in ranks]
        if work.is_given_away:
            payloads = [
                {key: memoryview(bytes(page)) for key, page in each.items()} for each in payloads
            ]
        script = write_script(work, self._config.batch_pages)

        def store() -> None:
            for part in script:
                if isinstance(part, Ask):
                    part.present = self._on_all_ranks(part.keys)
                else:
                    self._posts.put(partial(count, self._store(engine, part, payloads, sums)))
            self._posts.put(lambda: (engine, work))

        def count(stored: list[int]) -> None:
            self._count("transfer/storage_write_bytes", engine, stored)

        self._call(self._writers, store)

    def _call(self, threads: ThreadPoolExecutor, function: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                function()
            except BaseException as error:  # the polling thread raises it
                self._posts.put(partial(_raise, error))

        self._num_calls += 1
        threads.submit(guarded)

    def delete(self, work: StorageDelete) -> None:
        keys = key_bytes(work.keys)

        def forget() -> None:
            for storage in self._storages:
                storage.delete(keys)
            for known in self._sums:
                for key in keys:
                    known.pop(key, None)

        self._writers.submit(forget)  # no caller waits for the result

    # -- in threads ----------------------------------------------------------------------------

    def _on_all_ranks(self, keys: Sequence[Key]) -> list[bool]:
        flags = [storage.contains(key_bytes(keys)) for storage in self._storages]
        return [all(each) for each in zip(*flags, strict=True)]

    def _load(self, engine: int, keys: list[bytes], items: Items) -> int:
        least = len(keys)
        ranks = self.runners[engine].pools.ranks
        for storage, rank, known in zip(self._storages, ranks, self._sums, strict=True):
            buffers = [rank.landing(*item) for item in items]
            flags = storage.read(keys, buffers)
            found = [place for place, flag in enumerate(flags) if flag]
            sums = rank.landed([items[place] for place in found], [buffers[n] for n in found])
            for place, now in zip(found, sums, strict=True):
                # a page that another process wrote has no checksum here; it counts as unchanged,
                # unless injected faults corrupt pages
                other = None if self._config.faults.corrupt_rate else now
                if known.get(keys[place], other) != now:
                    flags[place] = False
                    self._posts.put(partial(self.counters.update, ["storage/changed_pages"]))
            least = min(least, flags.index(False) if False in flags else len(flags))
        return least

    def _store(
        self,
        engine: int,
        part: Store,
        payloads: Sequence[dict[bytes, memoryview]],
        sums: Sequence[dict[bytes, int]],
    ) -> list[int]:
        keys = key_bytes(part.keys)
        stored = [True] * len(keys)
        forms = [rank.stored for rank in self.runners[engine].pools.ranks]
        ranks = zip(self._storages, forms, payloads, sums, self._sums, strict=True)
        for storage, form, pages, its_sums, known in ranks:
            buffers = [pages[key] for key in keys]
            if form.is_own:
                packed = [form.packed(*each) for each in zip(kinds_of(keys), buffers, strict=True)]
                buffers, now = map(list, zip(*packed, strict=True))
                its_sums = dict(zip(keys, now, strict=True))
            known.update((key, its_sums[key]) for key in keys)
            flags = storage.write(keys, buffers)
            stored = [was and flag for was, flag in zip(stored, flags, strict=True)]
        return [kind for kind, is_stored in zip(kinds_of(keys), stored, strict=True) if is_stored]

    def _count(self, name: str, engine: int, kinds: list[int]) -> None:
        ranks = self.runners[engine].pools.ranks
        self.counters[name] += sum(rank.stored.page_bytes(kind) for rank in ranks for kind in kinds)


class TorchExecutor:
    is_fenced = False  # streams order the copies

    def __init__(self, runner: ModelRunner, io: TorchIo) -> None:
        self._runner = runner
        self._io = io
        self._engine = io.attach(runner)

    def submit(self, work: Sent, now_ns: int) -> None:
        if isinstance(work, Parcel):
            self._io.send(work)
            return
        if isinstance(work, StorageWrite):
            self._io.write(self._engine, work)
            return
        if isinstance(work, StorageDelete):
            self._io.delete(work)
            return
        self._runner.submit(work)
        if not isinstance(work, CopyState):
            self._io.track(self._engine, work)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        self._io.query(self._engine, prefetch)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        self._io.read(self._engine, prefetch)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        assert batch.num_steps == 1, f"real steps are taken one by one, got {batch.num_steps}"
        self._runner.compute(batch)
        return StepRun(StepEnds([self._io.now()]), self._runner.exposed_ns)


def _raise(error: BaseException) -> Delivery | None:
    raise error
