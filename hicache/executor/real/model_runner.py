"""Runs a step on real memory: load-backs beside the layers, then the model, then back-ups.

Copies into the device are collected until the step that needs them begins. One launch brings all
layers in order, and each layer waits for its own part only (`kernels.load`). Writes to freed pages
wait for the back-ups that still read them (fences).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hicache.cache.kinds import MAMBA
from hicache.cache.pages import PageIds, Pools, joined
from hicache.cache.tiers.transfer import BackUp, CopyState, LoadBack, Move
from hicache.cache.tree.node import TIERS
from hicache.executor.real.copy_streams import CopyEvent, CopyStream, timed_event
from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import Arrival, TorchPools
from hicache.executor.real.tables import Stretch
from hicache.executor.real.verify import Model, Verifier
from hicache.scheduler.batch import Batch
from hicache.scheduler.request_state import RequestState

Saves = Sequence[tuple[int, PageIds]]


class CopyStreams(NamedTuple):
    load: CopyStream
    save: CopyStream


class ModelRunner:
    """Computes the steps of one engine on real memory, while copies run in parallel.

    Args:
        model: computes the layers.
        pools: KV cache and Mamba states on device and host.
        streams: streams for copies into the device and out of the device.
        verifier: records logits, to compare them with a run without a cache. None means that
            nothing is recorded.
        allocators: allocators of the pools. If given, freed pages are overwritten with NaN, for
            debugging. None means that they are not.
    """

    def __init__(
        self,
        model: Model,
        pools: TorchPools,
        streams: CopyStreams,
        *,
        verifier: Verifier | None = None,
        allocators: Pools | None = None,
    ) -> None:
        self.pools = pools
        self._model = model
        self._streams = streams
        self._verifier = verifier
        self._allocators = allocators
        self._were_taken: dict[tuple[int, int], set[int]] = {}
        self._pending: list[LoadBack | CopyState] = []
        self._due: dict[int, CopyEvent] = {}  # layer → the last launch that it waits for
        self._num_launches = 0  # of all ranks, into the device
        self._fences: list[CopyEvent] = []
        self._events: dict[LoadBack | BackUp, CopyEvent] = {}
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launched: list[CopyEvent] = []  # copies into the device since the last step
        self.exposed_ns = 0  # time that the last step waited for copies
        self.total_exposed_ns = self.total_copied_ns = 0  # of all steps

    def warm_up(self) -> None:
        """Compile and load the kernels of a step, so that no request waits for the compiler.

        The step computes one token in the first page and slot, which hold nothing yet.
        """
        slot = [0]
        self.pools.clear_state(slot)
        if self.pools.ranks[0].copies is not None:
            self.pools.copy_states([], [])
        pages = [[0]] * len(self.pools.model.kind_names)
        one_token = Stretch(tokens=bytes(4), start=0, end=1, pages=pages, slot=slot[0])
        self._model.forward(PagedKvView(self.pools, [one_token], self._model.together))

    def submit(self, work: LoadBack | BackUp | CopyState) -> None:
        """Start a back-up (device to host) at once; queue any other copy for the next step."""
        if not isinstance(work, BackUp):
            self._pending.append(work)
            return
        event = self._streams.save.run(lambda: self.pools.save(work.moves))
        self._events[work] = event
        if work.is_fence:
            self._fences.append(event)

    def receive(self, source: TorchPools, moves: Sequence[Move]) -> CopyEvent:
        """Copy pages and states from another engine, after all copies that were submitted."""
        self.launch()
        return self._streams.load.run(partial(self.pools.receive, source, moves))

    def launch(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if self._fences:  # separate, so that a copy's time excludes the wait
            self._streams.load.run(partial(_wait_for, list(self._fences)))
        arrivals = merged(pending)
        event = self._streams.load.run(partial(self.pools.load, arrivals))
        self._launched.append(event)
        self._num_launches += len(arrivals) * len(self.pools.ranks)
        self._due = dict.fromkeys(range(len(self.pools.landed)), event)
        for work in pending:
            if isinstance(work, LoadBack):
                self._events[work] = event

    def is_done(self, work: LoadBack | BackUp) -> bool:
        """Return True if a copy is complete.

        A copy that was reported as complete is forgotten, so a second call returns False.
        """
        event = self._events.get(work)
        if event is None or not event.is_done():
            return False
        del self._events[work]
        return True

    def close(self) -> None:
        self.launch()
        for stream in self._streams:
            stream.close()

    def compute(self, batch: Batch) -> None:
        self.exposed_ns = 0
        self.launch()
        for fence in self._fences:
            self._timed(fence.wait)
        self._fences = []
        if self._allocators is not None:
            self._poison(self._allocators)
        self._forward(batch)
        for layer in list(self._due):  # layers that the step did not wait for
            self._ready(layer)
        if self.pools.device.type == "cuda":
            torch.cuda.current_stream(self.pools.device).synchronize()
            stalls, self._stalls = self._stalls, []
            self.exposed_ns = round(sum(a.elapsed_time(b) for a, b in stalls) * 1e6)
        self.total_exposed_ns += self.exposed_ns
        self.total_copied_ns += sum(event.duration_ns() for event in self._launched)
        self._launched = []

    # -- inside --------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> None:
        for extend in batch.extends:
            slot = extend.req.sequence.working_slot
            if slot is not None and extend.start == 0:
                self.pools.clear_state(slot)
        parts = [(each.req, each.start, each.end, each.saves) for each in batch.extends]
        parts += [_decode(req, self.pools.page_size) for req in batch.decodes]
        if not parts:
            return
        stretches = [_stretch(*part) for part in parts]
        memory = PagedKvView(self.pools, stretches, self._model.together)
        logits = self._model.forward(memory, ready=self._ready)
        for (req, _, end, _), its_logits in zip(parts, logits, strict=True):
            if self._verifier is not None and end >= req.target_len:
                self._verifier.saw(req, end - 1, its_logits[-1])
        boundaries = [
            (req.sequence.working_slot, req.sequence.boundary_slot)
            for req in batch.decodes
            if req.sequence.boundary_slot
            and not req.gains
            and (req.kv_len + 1) % self.pools.page_size == 0
        ]
        if boundaries:
            sources, targets = zip(*boundaries, strict=True)
            self.pools.copy_states(joined(sources), joined(targets))

    def _ready(self, layer: int) -> None:
        event = self._due.pop(layer, None)
        if event is not None:
            landed, count = self.pools.landed, self._num_launches
            self._timed(lambda: event.wait_for_layer(landed, layer, count))

    def _timed(self, wait: Callable[[], None]) -> None:
        if self.pools.device.type == "cuda":  # the stream waits, the thread does not
            before, after = timed_event(), timed_event()
            before.record()
            wait()
            after.record()
            self._stalls.append((before, after))
            return
        started = time.perf_counter_ns()
        wait()
        self.exposed_ns += time.perf_counter_ns() - started

    def _poison(self, allocators: Pools) -> None:
        for tier in TIERS:
            for kind in range(len(allocators[tier])):
                taken = allocators[tier][kind].taken
                freed = self._were_taken.get((tier, kind), set()) - taken
                if freed:
                    self.pools.poison(tier, kind, list(freed))
                self._were_taken[tier, kind] = set(taken)


def _decode(
    req: RequestState, page_size: int
) -> tuple[RequestState, int, int, list[tuple[int, PageIds]]]:
    # one token, or with speculation as many as the step gains, and the state at a page's end
    if not req.gains:
        return req, req.kv_len, req.kv_len + 1, []
    end = req.kv_len + req.gains[0]
    last = end // page_size * page_size
    slot = req.sequence.boundary_slot if last > req.kv_len else None
    return req, req.kv_len, end, [(last, slot)] if slot else []


def _stretch(req: RequestState, start: int, end: int, saves: Saves) -> Stretch:
    sequence = req.sequence
    return Stretch(
        req.request.tokens(),
        start,
        end,
        [page_ids[: sequence.num_pages] for page_ids in sequence.pages],
        -1 if sequence.working_slot is None else int(sequence.working_slot[0]),
        [(length, int(slot[0])) for length, slot in saves],
    )


def merged(pending: Sequence[LoadBack | CopyState]) -> list[Arrival]:
    """Merge the pending copies to the device, so that they need few kernel launches.

    The result has the effect of running the copies one by one in the given order. So two copies get
    separate launches if one writes a page that the other reads or writes.
    """
    arrivals: list[tuple[bool, dict[int, list[Move]]]] = []
    read: set[tuple[int, int]] = set()  # by the last of them: (kind, id on the device)
    written: set[tuple[int, int]] = set()
    for work in pending:
        is_within = isinstance(work, CopyState)
        moves = (
            [Move(MAMBA, work.source, work.target)] if isinstance(work, CopyState) else work.moves
        )
        reads = {(move.kind, item) for move in moves if is_within for item in move.sources}
        writes = {(move.kind, item) for move in moves for item in move.targets}
        clashes = writes & (read | written) or reads & written
        if not arrivals or arrivals[-1][0] != is_within or clashes:
            arrivals.append((is_within, {}))
            read, written = set(), set()
        read |= reads
        written |= writes
        for move in moves:
            arrivals[-1][1].setdefault(move.kind, []).append(move)
    return [Arrival(is_within, list(map(_joined, kinds.values()))) for is_within, kinds in arrivals]


def _joined(moves: Sequence[Move]) -> Move:
    if len(moves) == 1:
        return moves[0]
    sources, targets = ([getattr(move, end) for move in moves] for end in ("sources", "targets"))
    return Move(moves[0].kind, joined(sources), joined(targets))


def _wait_for(events: Sequence[CopyEvent]) -> None:
    for event in events:
        event.wait()
