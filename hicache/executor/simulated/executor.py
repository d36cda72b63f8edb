"""Executor in simulated time: steps take what the cost model says, copies share simulated links.

`SimulatedIo` holds what engines share: links, storage and its workers. Storage holds keys only:
writes, evictions and look-ups are real, and bytes are charged to links.
"""

import heapq
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, compress, count, islice, repeat
from operator import not_
from random import Random

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import (
    BackUp,
    CopyState,
    LoadBack,
    StorageDelete,
    StorageWrite,
)
from hicache.cache.tree.keys import Key
from hicache.clock import Clock, Stall, to_ns
from hicache.config import EngineFaults, StorageConfig
from hicache.executor.completions import Delivery, StepEnds, StepRun
from hicache.executor.simulated.drafting import Drafting
from hicache.executor.simulated.links import Links
from hicache.executor.simulated.stores import KeyStore
from hicache.executor.storage_script import Ask, Load, read_script, write_script
from hicache.models.cost import CostModel, ForwardCost
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import Outage, Parcel, Sent

Wait = tuple[int, int, tuple[str, ...]]  # (latency in ns, bytes moved after it, links crossed)
IoJob = Generator[Wait, None, None]
NO_LIMIT_GBPS = 1e6  # a link that never binds


# a group of storage workers, and the operations that wait for one of them; `busy_counter` is the
# mean busy time of `num_counted` workers
class Workers:
    def __init__(self, operation: str, num_workers: int, num_counted: int) -> None:
        self.num_free = num_workers
        self.num_counted = num_counted
        self.busy_counter = f"storage/{operation}_busy_ns"
        self.queue: deque[IoJob] = deque()


class SimulatedIo:
    """Simulates the copies and storage operations of all engines, in one event queue.

    Each operation is a generator. It yields what it waits for: a delay, or bytes that move over
    links. Storage operations queue until a storage worker is free, and then run to their end.
    """

    _bytes_read = "transfer/storage_read_bytes"

    def __init__(
        self,
        config: StorageConfig,
        storages: Sequence[KeyStore],
        copy_rates: Sequence[dict[str, float]],
        *,
        stalls: Sequence[Stall] = (),
        overlaps_loads: bool = True,
        seed: int,
        link_s: float = 0.0,
        faults: EngineFaults | None = None,
    ) -> None:
        """Build the simulated copy links and storage of all engines.

        If an engine has several tensor-parallel ranks, each rank counts as an engine here.

        Args:
            config: the speeds and limits of storage.
            storages: the storages of the engines. Engine `n` uses `storages[n % len(storages)]`; an
                empty list means no storage.
            copy_rates: for each engine, the bytes per second of its links: to_device, to_host and
                host_memory. A link both_ways limits the sum of both directions; it may be missing.
                With separate engines for prefill and decode, also sends and receives.
            stalls: for each storage, the extra time that its calls take; empty means none.
            overlaps_loads: whether steps compute while pages are loaded from the host.
            seed: seed of the random storage delays.
            link_s: latency in seconds of what one engine sends to another.
            faults: the losses of engines and of what they send; None means none.
        """
        duplex = ("both_ways",) if any("both_ways" in rates for rates in copy_rates) else ()
        self._routes = {
            direction: [
                tuple([f"{link}{engine}" for link in (direction, "host_memory", *duplex)])
                for engine in range(len(copy_rates))
            ]
            for direction in ("to_host", "to_device")
        }
        self.links = Links(_capacities(config, copy_rates))
        self.overlaps_loads = overlaps_loads
        self.storages = storages
        self._num_ranks = max(len(storages), 1)
        self._stalls = stalls or [Stall() for _ in range(self._num_ranks)]
        self.config = config
        self._query_ns, self._operation_ns = to_ns(config.query_s), to_ns(config.operation_s)
        self._sidecar_ns, self._link_ns = to_ns(config.sidecar_s), to_ns(link_s)
        self._seed = seed
        self._delays: dict[int, Random] = {}
        self.counters: Counter[str] = Counter()
        self._numbers = count()
        self._timers: list[tuple[int, int, int, tuple[str, ...], IoJob]] = []
        self._flows: dict[int, IoJob] = {}
        self._now = 0
        self._done: list[Delivery] = []
        num_readers, num_writers = (
            number * self._num_ranks for number in (config.read_workers, config.write_workers)
        )
        self._workers = {
            "read": Workers("read", num_readers, num_readers),
            "write": Workers("write", num_writers, num_writers),
        }
        for engine in range(len(copy_rates)):
            self._workers[f"read{engine}"] = self._workers["read"]
            # an engine queries one request at a time, as SGLang's prefetch thread does
            self._workers[f"query{engine}"] = Workers("query", 1, len(copy_rates))
        self.copying: Counter[int] = Counter()  # copies under way, by engine
        # when the copies of a link end (ns), if nothing else slows them; by engine
        self._copied_ns = {direction: [0] * len(copy_rates) for direction in self._routes}
        self._copy_rates = copy_rates
        self.backing_up: Counter[int] = Counter()  # back-ups under way, by engine
        self.fences: Counter[int] = Counter()  # copies that the engine's next step waits for
        self._faults = faults or EngineFaults()
        if self._faults.gone_engine is not None:
            self.begin(self._lose(self._faults.gone_engine), 0)

    def _next_ns(self) -> int:
        timers, finish_ns = self._timers, self.links.next_finish_ns
        return timers[0][0] if timers and timers[0][0] < finish_ns else finish_ns

    def advance(self, now_ns: int) -> list[Delivery]:
        while (event := self._next_ns()) <= now_ns:
            self._happen(event)
        self._now = now_ns
        if not self._done:
            return []
        # report a read once if its last batch and its end coincide
        done, self._done = dict.fromkeys(self._done), []
        return [(number // self._num_ranks, each) for number, each in done]

    def pass_by(self, limit_ns: int, clock: Clock) -> int:
        """Process events before `limit_ns` until some work is complete; return the next event time.

        All times are in ns. `clock` moves along with the events. Return `NEVER` if no event is
        pending.
        """
        while not self._done:
            event = self._next_ns()
            if event >= limit_ns:
                return event
            clock.wait_until(event)
            self._happen(event)
        return self._now

    def begin(self, work: IoJob, now_ns: int) -> None:
        self._now = now_ns
        self._go_on(work)

    def enqueue(self, worker: str, work: IoJob, now_ns: int) -> None:
        """Start a storage operation as soon as a storage worker is free.

        `worker` names a group of workers. The groups "query0" and "read0" belong to engine 0, and
        so on. All engines share the group "write", and with one storage those that read.
        """
        self._now = now_ns
        workers = self._workers[worker]
        workers.queue.append(work)
        self._dispatch(workers)

    def copy(self, engine: int, work: BackUp | LoadBack) -> IoJob:
        direction = "to_host" if isinstance(work, BackUp) else "to_device"
        is_fence = work.is_fence if isinstance(work, BackUp) else not self.overlaps_loads
        self.copying[engine] += 1
        self.fences[engine] += is_fence
        self.backing_up[engine] += direction == "to_host"
        num_bytes = work.num_bytes // self._num_ranks
        ends = self._copied_ns[direction]
        began_ns = max(ends[engine], self._now)
        ends[engine] = began_ns + int(num_bytes * 1e9 / self._copy_rates[engine][direction])
        yield 0, num_bytes, self._routes[direction][engine]
        self.copying[engine] -= 1
        self.fences[engine] -= is_fence
        self.backing_up[engine] -= direction == "to_host"
        self._done.append((engine, work))

    @property
    def now_ns(self) -> int:
        return self._now

    def copying_s(self, engine: int, now_ns: int) -> float:
        """Return how long the copies under way take, in seconds, if no others begin."""
        end_ns = max(ends[engine] for ends in self._copied_ns.values())
        return max(end_ns - now_ns, 0) * 1e-9

    def query(self, engine: int, prefetch: Prefetch) -> IoJob:
        yield self._query_ns, 0, ()
        if not prefetch.is_settled:
            restorable = self._ask(engine, prefetch)
            yield self._stall_ns(engine), 0, ()
            if not prefetch.is_settled:
                prefetch.restorable = restorable
        self.counters["storage/query_count"] += 1
        self._done.append((engine, prefetch))

    def read(self, engine: int, prefetch: Prefetch, page_bytes: Sequence[int]) -> IoJob:
        links = self._read_links(engine, prefetch)
        began_ns = self._now
        for load in read_script(prefetch, self.config.batch_pages):
            load.found = self._load(engine, prefetch, load)
            late_ns = self._stall_ns(engine)
            num_bytes = load.found * page_bytes[FULL]
            if load.restores:
                late_ns += self._sidecar_ns
                sizes = [len(page_ids) * page_bytes[kind] for kind, page_ids in load.parts]
                num_bytes = sum(sizes) if load.is_whole else 0
            yield self._latency_ns(engine) + late_ns, num_bytes, links
            self.counters[self._bytes_read] += num_bytes
            if load.restores:
                prefetch.restored_pages = load.restores if load.is_whole else 0
                continue
            prefetch.completed_pages += load.found
            if load.is_whole:  # waiting requests check progress after each batch
                self._done.append((engine, prefetch))
        prefetch.read_ns = began_ns, self._now
        prefetch.is_read = True
        self._done.append((engine, prefetch))

    def write(self, engine: int, work: StorageWrite, page_bytes: Sequence[int]) -> IoJob:
        links = ("storage_write", "storage", f"host_memory{engine}")
        # bytes of each key to write
        sizes: Iterator[int] = chain.from_iterable(
            repeat(page_bytes[kind], len(page_ids)) for kind, page_ids in work.parts
        )
        if work.is_given_away:  # copied to a buffer first
            yield 0, work.num_bytes, (f"host_memory{engine}",)
        waited_ns = 0  # round trip of the existence check
        for part in write_script(work, self.config.batch_pages):
            if isinstance(part, Ask):
                part.present = self._storage_of(engine).contains(part.keys)
                waited_ns = self._query_ns + self._stall_ns(engine)
                if True in part.present:
                    sizes = compress(sizes, map(not_, part.present))
                continue
            num_bytes = sum(islice(sizes, len(part.keys)))
            yield waited_ns + self._operation_ns, num_bytes, links
            waited_ns = 0
            self.counters["transfer/storage_write_bytes"] += num_bytes
            num_refused = self._store(engine, work, part.keys)
            self.counters["storage/refused_write_pages"] += num_refused
            yield self._stall_ns(engine), 0, ()
        if waited_ns:  # storage holds all of it
            yield waited_ns, 0, ()
        self._done.append((engine, work))

    def _lose(self, engine: int) -> IoJob:
        faults = self._faults
        for time_s, is_over in ((faults.gone_from_s, False), (faults.gone_for_s, True)):
            yield to_ns(time_s), 0, ()
            self._done.append((engine, Outage(is_over=is_over)))

    def send(self, parcel: Parcel) -> IoJob:
        source, target, handover = parcel.source, parcel.target, parcel.handover
        number, links = handover.num_sent, [f"sends{source}", f"receives{target}"]
        if handover.to_host:
            links.append(f"host_memory{target}")
        yield self._link_ns, parcel.num_bytes, tuple(links)
        self.counters["transfer/link_bytes"] += parcel.num_bytes
        if parcel.num_bytes and self._faults.lost_rate:
            req = handover.req
            name = f"{req.request.id}/{len(req.handovers)}/{number}"
            if Random(f"{self._seed}/{name}").random() < self._faults.lost_rate:
                handover.is_dead = handover.is_lost = True
        self._done.append((target, parcel))
        if parcel.num_bytes:
            self._done.append((source, parcel))

    def delete(self, engine: int, work: StorageDelete) -> IoJob:
        self._storage_of(engine).delete(work.keys)
        yield self._query_ns + self._stall_ns(engine), 0, ()

    def _happen(self, event: int) -> None:
        self._now, timers = event, self._timers
        if self.links.next_finish_ns == event:
            for _, flow_id in self.links.finish_until(event):
                self._go_on(self._flows.pop(flow_id))
        while timers and timers[0][0] <= event:
            _, _, num_bytes, links, work = heapq.heappop(timers)
            if num_bytes:
                self._flow(num_bytes, links, work)
            else:
                self._go_on(work)

    def _storage_of(self, engine: int) -> KeyStore:
        return self.storages[engine % self._num_ranks]

    def _stall_ns(self, engine: int) -> int:
        return self._stalls[engine % self._num_ranks].take()

    def _store(self, engine: int, work: StorageWrite, keys: Sequence[Key]) -> int:
        # `work` is for subclasses that move real bytes: they find them by its pages
        return self._storage_of(engine).write(keys)

    def _latency_ns(self, engine: int) -> int:
        # before the first byte of a read batch
        delay_s = self.config.delay_s
        if not delay_s:
            return self._operation_ns
        draws = self._delays.setdefault(engine, Random(f"{self._seed}/{engine}"))
        return to_ns(self.config.operation_s + draws.expovariate(1 / delay_s))

    def _ask(self, engine: int, prefetch: Prefetch) -> list[int]:
        return prefetch.ask(self._storage_of(engine).contains)

    def _read_links(self, engine: int, prefetch: Prefetch) -> tuple[str, ...]:
        return "storage_read", "storage", f"host_memory{engine}"

    def _load(self, engine: int, prefetch: Prefetch, load: Load) -> int:
        return self._storage_of(engine).read(load.keys)

    def _dispatch(self, workers: Workers) -> None:
        while workers.queue and workers.num_free:
            workers.num_free -= 1
            self._go_on(self._occupy(workers, workers.queue.popleft()))

    def _occupy(self, workers: Workers, work: IoJob) -> IoJob:
        began_ns = self._now
        yield from work
        self.counters[workers.busy_counter] += (self._now - began_ns) // workers.num_counted
        workers.num_free += 1
        self._dispatch(workers)

    def _go_on(self, work: IoJob) -> None:
        for latency_ns, num_bytes, links in work:
            if latency_ns:
                # wait before the flow starts: the links know only flows that have begun
                event = (self._now + latency_ns, next(self._numbers), num_bytes, links, work)
                heapq.heappush(self._timers, event)
                return
            if num_bytes:
                self._flow(num_bytes, links, work)
                return

    def _flow(self, num_bytes: int, links: tuple[str, ...], work: IoJob) -> None:
        number = next(self._numbers)
        self._flows[number] = work
        self.links.start(number, num_bytes, links, self._now)


class SimulatedExecutor:
    def __init__(
        self,
        engine: int,
        cost: CostModel,
        io: SimulatedIo,
        *,
        page_size: int,
        page_bytes: Sequence[int],
        load_rate: float,
        shared_load_rate: float | None = None,
        load_shares: Sequence[float] | None = None,
        slowdown: float,
        begin_ns: int = 0,
        drafting: Drafting | None = None,
    ) -> None:
        """Create the executor of one engine.

        Args:
            engine: index of the engine.
            cost: predicts the durations of steps.
            io: simulates copies and storage.
            page_size: tokens per page.
            page_bytes: bytes of a page (or state) in storage, by kind of data.
            load_rate: bytes per second from host to device.
            shared_load_rate: the same for a step that begins while pages are copied to the host;
                None means `load_rate`.
            load_shares: by kind, the bytes of a page on the host divided by those on the device;
                None means 1 for all kinds.
            slowdown: factor by which copies slow down the steps that run at the same time.
            begin_ns: time in ns by which each request that begins makes its first step longer.
            drafting: predicts the steps with a draft model; None means that there is none.
        """
        self._engine = engine
        self._cost = cost
        self._io = io
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._load_rate = load_rate
        self._shared_load_rate = load_rate if shared_load_rate is None else shared_load_rate
        self._load_shares = load_shares or [1.0] * len(page_bytes)
        self._slowdown = slowdown
        self._begin_ns = begin_ns
        self._drafting = drafting
        self._num_queries = 1 if drafting is None else drafting.num_drafts + 1

    @property
    def is_fenced(self) -> bool:
        """True while the next step must wait for a copy.

        That is one to the host which still reads device pages that were already freed, because the
        step may overwrite them, and any load-back if loads do not overlap with computing.
        """
        return self._io.fences[self._engine] > 0

    def submit(self, work: Sent, now_ns: int) -> None:
        """Start a copy or a storage operation, or send a parcel to another engine.

        A copy of a Mamba state within the device takes no extra time: the cost of steps includes
        it.
        """
        if isinstance(work, CopyState):
            return
        if isinstance(work, StorageDelete):
            self._io.begin(self._io.delete(self._engine, work), now_ns)
            return
        if isinstance(work, StorageWrite):
            self._io.enqueue("write", self._io.write(self._engine, work, self._page_bytes), now_ns)
            return
        job = self._io.send(work) if isinstance(work, Parcel) else self._io.copy(self._engine, work)
        self._io.begin(job, now_ns)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        self._io.enqueue(f"query{self._engine}", self._io.query(self._engine, prefetch), now_ns)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        engine = self._engine
        self._io.enqueue(f"read{engine}", self._io.read(engine, prefetch, self._page_bytes), now_ns)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        ahead = self._num_queries
        lens = [req.kv_len + ahead for req in batch.decodes]
        if not batch.extends:
            slowdown = self._now_slowdown
            if self._drafting is None:
                ends = self._cost.decode_ends_ns(lens, batch.num_steps, now_ns, slowdown=slowdown)
            else:
                ends = self._drafting.verify_ends_ns(batch, lens, now_ns, slowdown)
            return StepRun(StepEnds(next(ends), ends), 0)
        cost = self._price(self._cost, batch, lens, now_ns)
        end_ns = now_ns + cost.total_ns + self._begin_total_ns(batch)
        if self._drafting is not None:
            end_ns += self._drafting.draft_ns(batch.extends, lens, self._now_slowdown)
        return StepRun(StepEnds([end_ns]), cost.load_stall_ns)

    @property
    def _now_slowdown(self) -> float:
        return self._slowdown if self._io.copying[self._engine] else 1.0

    def _begin_total_ns(self, batch: Batch) -> int:
        extends = batch.extends if self._begin_ns else ()
        return self._begin_ns * sum(each.start == each.req.cached_len for each in extends)

    def _price(self, model: CostModel, batch: Batch, lens: list[int], now_ns: int) -> ForwardCost:
        # the duration of one step by the cost `model`; its decodes reach the lengths `lens`
        is_backing_up = self._io.backing_up[self._engine] > 0
        load_layer_bytes = None
        if batch.load_backs and self._io.overlaps_loads:
            counts = [0.0] * len(self._page_bytes)
            for load in batch.load_backs:
                for move in load.moves:
                    counts[move.kind] += len(move.targets) * self._load_shares[move.kind]
            tokens = [count * self._page_size for count in counts]
            tokens[MAMBA] = counts[MAMBA]
            load_layer_bytes = model.layer_bytes(*tokens)
        return model.forward_ns(
            [(extend.start, extend.end) for extend in batch.extends],
            lens,
            load_layer_bytes=load_layer_bytes,
            load_rate=self._shared_load_rate if is_backing_up else self._load_rate,
            slowdown=self._now_slowdown,
            copying_s=self._io.copying_s(self._engine, now_ns),
            saved_states=sum(len(extend.saves) for extend in batch.extends),
            num_queries=self._num_queries,
        )


def _capacities(config: StorageConfig, copy_rates: Sequence[dict[str, float]]) -> dict[str, float]:
    # bytes per second of every link
    capacities = {
        "storage_read": config.read_gbps * 1e9,
        "storage_write": config.write_gbps * 1e9,
        "storage": (config.shared_gbps or NO_LIMIT_GBPS) * 1e9,
    }
    for engine, rates in enumerate(copy_rates):
        capacities |= {f"{name}{engine}": rate for name, rate in rates.items()}
    return capacities
