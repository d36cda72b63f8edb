"""Real time: storage in threads, copies on lanes, and completions that are polled.

Threads only move bytes and post what they did; everything the cache sees is changed in the
engine's own thread, when it polls.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np

from hicache.cache.node import FULL, MAMBA, SWA
from hicache.cache.prefetch import Prefetch
from hicache.cache.transfer import BackUp, CopyState, LoadBack, StorageDelete, StorageWrite, Work
from hicache.clock import SECOND_NS
from hicache.config import StorageConfig
from hicache.executor.base import StepRun
from hicache.executor.torch_plane import DataPlane
from hicache.scheduler.batch import Batch
from hicache.storage.base import Storage, StorageError

POLL_NS = 200_000  # between two looks at what is under way
Delivery = tuple[int, Work | Prefetch]  # (engine, what is done)
Items = list[tuple[int, int]]  # (component, host page id)


class TorchIo:
    """What is under way on all engines, by the machine's own clock.

    Also the clock: it sleeps while something is under way, and skips idle time, in which nothing
    but the next arrival is waited for. So a trace of an hour takes as long as its work does.

    Args:
        storages: one a rank; empty: no storage.
    """

    def __init__(self, config: StorageConfig, storages: Sequence[Storage]) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._storages = list(storages)
        # by rank and key, the checksum of each page that this process gave to storage
        self._sums: list[dict[bytes, int]] = [{} for _ in self._storages]
        self.planes: list[DataPlane] = []
        self._copies: list[tuple[int, LoadBack | BackUp]] = []
        self._num_calls = 0  # in threads
        self._posts: SimpleQueue[Callable[[], Delivery | None]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(config.read_workers, thread_name_prefix="read")
        self._writers = ThreadPoolExecutor(config.write_workers, thread_name_prefix="write")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        self._started = time.monotonic_ns()
        self._skipped = 0

    def attach(self, plane: DataPlane) -> int:
        """Take in an engine; returns its number."""
        self.planes.append(plane)
        return len(self.planes) - 1

    # -- the clock -----------------------------------------------------------------------------

    def now(self) -> int:
        """Nanoseconds since the run began, idle time included."""
        return time.monotonic_ns() - self._started + self._skipped

    def wait_until(self, time_ns: int) -> None:
        """Sleep, or skip."""
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
        """Whether nothing is under way."""
        return not self._copies and not self._num_calls

    def next_event_ns(self) -> int | None:
        """When to look again."""
        return None if self.is_idle else self.now() + POLL_NS

    def advance(self, now_ns: int) -> list[Delivery]:
        """What is done by now."""
        for plane in self.planes:
            plane.launch()
        done: list[Delivery] = []
        still = []
        for engine, work in self._copies:
            if self.planes[engine].is_done(work):
                done.append((engine, work))
            else:
                still.append((engine, work))
        self._copies = still
        while True:
            try:
                post = self._posts.get_nowait()
            except Empty:
                return done
            delivery = post()
            if delivery is not None:
                self._num_calls -= 1
                done.append(delivery)

    def track(self, engine: int, work: LoadBack | BackUp) -> None:
        """Report a copy when it is over."""
        self._copies.append((engine, work))

    def close(self) -> None:
        """Let everything end."""
        for threads in (self._readers, self._writers, self._queries):
            threads.shutdown()
        for plane in self.planes:
            plane.close()
        for storage in self._storages:
            storage.close()

    # -- storage -------------------------------------------------------------------------------

    def query(self, engine: int, prefetch: Prefetch) -> None:
        """Ask storage what all ranks have."""

        def ask() -> None:
            try:
                restorable = prefetch.ask(self._on_all_ranks)
            except StorageError:
                restorable = []
            self._posts.put(lambda: answer(restorable))

        def answer(restorable: list[int]) -> Delivery:
            if not prefetch.is_settled:
                prefetch.restorable = restorable
            self.counters["storage/query_count"] += 1
            return engine, prefetch

        self._call(self._queries, ask)

    def read(self, engine: int, prefetch: Prefetch) -> None:
        """Read pages in batches, then the window and the state if all pages came."""
        total, step = prefetch.num_pages, self._config.batch_pages
        staged = list(prefetch.staged)  # as they are now: a termination takes them apart
        batches = [
            (
                prefetch.keys(FULL, first, min(first + step, total)),
                _items(FULL, staged[FULL][first : first + step]),
            )
            for first in range(0, total, step)
        ]
        sidecar_keys = prefetch.sidecar_keys()
        sidecars = _items(SWA, staged[SWA]) + _items(MAMBA, staged[MAMBA])

        def fetch() -> None:
            began_ns, num_read = self.now(), 0
            for keys, items in batches:
                if prefetch.is_terminated:
                    break
                found = self._load(engine, keys, items)
                num_read += found
                self._posts.put(partial(progress, found))
                if found < len(keys):
                    break
            found_sidecars = False
            if num_read == total and sidecars and not prefetch.is_terminated:
                found_sidecars = self._load(engine, sidecar_keys, sidecars) == len(sidecars)
            read_ns = began_ns, self.now()
            self._posts.put(lambda: let_go(found_sidecars, read_ns))

        def progress(found: int) -> None:
            prefetch.completed_pages += found
            self._count("transfer/storage_read_bytes", engine, [(FULL, 0)] * found)

        def let_go(found_sidecars: bool, read_ns: tuple[int, int]) -> Delivery:  # noqa: FBT001 - a result, not an option
            if found_sidecars:
                self._count("transfer/storage_read_bytes", engine, sidecars)
            prefetch.sidecars_found = found_sidecars
            prefetch.read_ns = read_ns
            prefetch.sidecars_read = True
            prefetch.is_read = True
            return engine, prefetch

        self._call(self._readers, fetch)

    def write(self, engine: int, work: StorageWrite) -> None:
        """Write pages that storage has not, in batches; those given away from a copy of them."""
        step = self._config.batch_pages
        ranks = self.planes[engine].pools.ranks
        pages = [[rank.payload(*item) for item in work.pages] for rank in ranks]
        sums = [rank.sums(work.pages) for rank in ranks]
        if work.is_given_away:
            pages = [[memoryview(bytes(page)) for page in part] for part in pages]

        def store() -> None:
            for first in range(0, len(work.keys), step):
                keys, items = work.keys[first : first + step], work.pages[first : first + step]
                part = [each[first : first + step] for each in pages]
                its_sums = [each[first : first + step] for each in sums]
                stored = self._store(keys, items, part, its_sums)
                self._posts.put(partial(count, stored))
            self._posts.put(lambda: (engine, work))

        def count(stored: Items) -> None:
            self._count("transfer/storage_write_bytes", engine, stored)

        self._call(self._writers, store)

    def _call(self, threads: ThreadPoolExecutor, function: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                function()
            except BaseException as error:  # whatever it was, the one who polls must hear of it
                self._posts.put(partial(_raise, error))

        self._num_calls += 1
        threads.submit(guarded)

    def delete(self, work: StorageDelete) -> None:
        """Forget pages, in the order of writes."""

        def forget() -> None:
            for storage in self._storages:
                with suppress(StorageError):  # a page that stays is never wrong, only unwanted
                    storage.delete(work.keys)
            for known in self._sums:
                for key in work.keys:
                    known.pop(key, None)

        self._writers.submit(forget)  # nobody waits for it

    # -- in threads ----------------------------------------------------------------------------

    def _on_all_ranks(self, keys: list[bytes]) -> list[bool]:
        flags = [storage.contains(keys) for storage in self._storages]
        return [all(each) for each in zip(*flags, strict=True)]

    def _load(self, engine: int, keys: list[bytes], items: Items) -> int:
        """How many pages lead without a gap, on the rank that has least."""
        least = len(keys)
        ranks = self.planes[engine].pools.ranks
        for storage, rank, known in zip(self._storages, ranks, self._sums, strict=True):
            try:
                flags = storage.read(keys, [rank.payload(*item) for item in items])
            except StorageError:
                return 0
            found = [place for place, flag in enumerate(flags) if flag]
            sums = rank.new_sums([items[place] for place in found])
            for place, now in zip(found, sums, strict=True):
                if known.get(keys[place], now) != now:
                    flags[place] = False
                    self._posts.put(self._note_a_changed_page)
            least = min(least, flags.index(False) if False in flags else len(flags))
        return least

    def _note_a_changed_page(self) -> None:
        self.counters["storage/changed_pages"] += 1

    def _store(
        self,
        keys: list[bytes],
        items: Items,
        pages: list[list[memoryview]],
        sums: list[list[int]],
    ) -> Items:
        """The items that storage did not have and has now, on every rank."""
        stored = [True] * len(keys)
        for storage, part, its_sums, known in zip(
            self._storages, pages, sums, self._sums, strict=True
        ):
            try:
                present = storage.contains(keys)
                missing = [place for place, there in enumerate(present) if not there]
                known.update((keys[place], its_sums[place]) for place in missing)
                flags = storage.write(
                    [keys[place] for place in missing],
                    [part[place] for place in missing],
                )
            except StorageError:
                return []
            new = {place for place, flag in zip(missing, flags, strict=True) if flag}
            stored = [is_new and place in new for place, is_new in enumerate(stored)]
        return [item for item, is_new in zip(items, stored, strict=True) if is_new]

    def _count(self, name: str, engine: int, items: Items) -> None:
        ranks = self.planes[engine].pools.ranks
        self.counters[name] += sum(rank.host[kind].shape[1] for rank in ranks for kind, _ in items)


class TorchExecutor:
    """One engine's steps and copies in real time."""

    def __init__(self, plane: DataPlane, io: TorchIo) -> None:
        self._plane = plane
        self._io = io
        self._engine = io.attach(plane)

    @property
    def is_fenced(self) -> bool:
        """Never: lanes keep the order."""
        return False

    def submit(self, work: Work, now_ns: int) -> None:
        """Begin a copy."""
        if isinstance(work, StorageWrite):
            self._io.write(self._engine, work)
            return
        if isinstance(work, StorageDelete):
            self._io.delete(work)
            return
        self._plane.submit(work)
        if not isinstance(work, CopyState):
            self._io.track(self._engine, work)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Ask storage what it has."""
        self._io.query(self._engine, prefetch)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Begin to read."""
        self._io.read(self._engine, prefetch)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        """Compute one step, to its end."""
        assert batch.num_steps == 1, f"real steps are taken one by one, got {batch.num_steps}"
        self._plane.compute(batch)
        return StepRun(np.array([self._io.now()], np.int64), self._plane.exposed_ns)


def _raise(error: BaseException) -> Delivery | None:
    raise error


def _items(kind: int, page_ids: np.ndarray) -> Items:
    return [(kind, int(page_id)) for page_id in page_ids]
