"""Ranks as processes: the collectives of `hicache.engine.ranks.agreement` over torch.distributed.

Every rank runs the same engine on the same requests, with its own part of every page in its own
storage. Queries and reads run in two threads, each with groups of its own, so that a collective of
one never meets one of another or of the engine's steps.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread

import torch
from torch import distributed

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import CopyState, StorageDelete, StorageWrite, Work
from hicache.cache.tree.keys import Key, key_bytes
from hicache.config import HitAgreement
from hicache.engine.ranks.agreement import RankAgreement, ReadProgress, offer, taken
from hicache.executor.completions import StepEnds, StepRun
from hicache.executor.storage_script import read_script
from hicache.scheduler.batch import Batch
from hicache.storage.base import Storage, StorageError

PURPOSES = ("step", "query", "read")


def groups_of(axes: Sequence[Sequence[Sequence[int]]]) -> list[tuple[tuple[int, ...], ...]]:
    """The partitions of the world that a MIN over all axes takes, one after another.

    `axes`: of each parallel axis (context, tensor, pipeline) its groups of ranks. Axes of groups
    of one are left out, and so are those that part the world as an earlier one does.
    """
    partitions: list[tuple[tuple[int, ...], ...]] = []
    for axis in axes:
        partition = tuple(sorted(tuple(sorted(group)) for group in axis))
        if any(len(group) > 1 for group in partition) and partition not in partitions:
            partitions.append(partition)
    return partitions


class GlooChannel:
    """MIN over a rank's group of each axis in turn, hence over all ranks."""

    def __init__(self, groups: Sequence[distributed.ProcessGroup]) -> None:
        self._groups = groups
        self.num_collectives = 0

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The element-wise MIN over the ranks' offers. Blocks until all ranks have called it."""
        offered = torch.tensor(values, dtype=torch.int64)
        for group in self._groups:
            distributed.all_reduce(offered, op=distributed.ReduceOp.MIN, group=group)
            self.num_collectives += 1
        return [int(value) for value in offered]


def join(
    rank: int,
    num_ranks: int,
    store_path: str,
    axes: Sequence[Sequence[Sequence[int]]],
    timeout_s: float,
) -> dict[str, GlooChannel]:
    """Meet the other ranks and make the channels of each purpose.

    A rank that waits longer than `timeout_s` in one collective raises, rather than hang.
    """
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    channels = {}
    for purpose in PURPOSES:
        own = []
        for partition in groups_of(axes):
            for members in partition:  # every rank makes every group, in one order
                group = distributed.new_group(
                    list(members), backend="gloo", timeout=timedelta(seconds=timeout_s)
                )
                if rank in members:
                    own.append(group)
        channels[purpose] = GlooChannel(own)
    return channels


def leave() -> None:
    """Part from the other ranks."""
    distributed.destroy_process_group()


class RankedReader:
    """An executor whose prefetches are real reads from this rank's storage, agreed with the others.

    Device and host copies are done at once, and steps take no time: it is what the ranks agree on
    that is real here. Pages carry what `payload` gives for their key.
    """

    def __init__(
        self,
        storage: Storage,
        agreement: RankAgreement,
        channels: dict[str, GlooChannel],
        *,
        payload: Callable[[bytes], bytes],
        batch_pages: int,
        rule: HitAgreement = HitAgreement.restorable,
    ) -> None:
        self.num_wrong_pages = 0  # read as if whole, and not what was written
        self._storage = storage
        self._agreement = agreement
        self._channels = channels
        self._payload = payload
        self._batch_pages = batch_pages
        self._rule = rule
        self._failure: BaseException | None = None
        self._queries: SimpleQueue[Prefetch | None] = SimpleQueue()
        self._reads: SimpleQueue[Prefetch | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._work, args=each, daemon=True)
            for each in ((self._queries, self._query), (self._reads, self._read))
        ]
        for thread in self._threads:
            thread.start()

    is_fenced = False

    def submit(self, work: Work, now_ns: int) -> None:
        """Carry a copy out; the ranks agree that all have."""
        if isinstance(work, CopyState):
            return
        if isinstance(work, StorageDelete):
            with suppress(StorageError):  # a page that stays is never wrong, only unwanted
                self._storage.delete(key_bytes(work.keys))
            return
        if isinstance(work, StorageWrite):
            keys = key_bytes(work.keys)
            pages = [memoryview(self._payload(key)) for key in keys]
            with suppress(StorageError):  # pages that are not there are found missing
                self._storage.write(keys, pages)
        self._agreement.submitted(work)
        self._agreement.copied(work)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Ask this rank's storage, and agree."""
        self._queries.put(prefetch)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Read this rank's part of the pages, and agree batch by batch."""
        self._reads.put(prefetch)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        """All steps end now."""
        return StepRun(StepEnds([[now_ns] * batch.num_steps]), 0)

    def check(self) -> None:
        """Raise what a thread has died of."""
        if self._failure is not None:
            raise RuntimeError("a reader has died") from self._failure

    def close(self) -> None:
        """Wait for what is under way. The ranks must have submitted the same."""
        self._queries.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join()
        self.check()

    def _work(
        self, queue: "SimpleQueue[Prefetch | None]", carry_out: Callable[[Prefetch], None]
    ) -> None:
        try:
            while True:
                prefetch = queue.get()
                if prefetch is None:
                    return
                carry_out(prefetch)
        except BaseException as error:
            self._failure = error

    def _query(self, prefetch: Prefetch) -> None:
        num_pages = prefetch.num_pages
        try:
            restorable = prefetch.ask(lambda keys: self._storage.contains(key_bytes(keys)))
        except StorageError:
            restorable = []
        offered = offer(restorable, num_pages, self._rule)
        common = taken(self._channels["query"].minimum(offered), self._rule)
        self._agreement.answers.append(ReadProgress(prefetch, restorable=common))

    def _read(self, prefetch: Prefetch) -> None:
        # the number of collectives is fixed by what was staged, whatever happens meanwhile
        total = prefetch.num_pages
        left = -(-total // self._batch_pages)
        channel = self._channels["read"]
        completed = agreed = restored = 0
        for load in read_script(prefetch, self._batch_pages):
            if not load.restores:
                load.found = self._load(load.keys)
                completed += load.found
                agreed = self._agree(prefetch, completed)
                left -= 1
                continue
            while left:
                agreed = self._agree(prefetch, completed)
                left -= 1
            if load.restores <= agreed:  # else some rank has not the pages that they belong to
                load.found = self._load(load.keys)
                restored = load.restores if load.is_whole else 0
        for _ in range(left):
            self._agree(prefetch, completed)
        agreed, least, negated = channel.minimum([completed, restored, -restored])
        self._agreement.progress.append(
            ReadProgress(
                prefetch,
                completed_pages=agreed,
                restored_pages=least if least == -negated else 0,
                is_read=True,
            )
        )

    def _agree(self, prefetch: Prefetch, completed: int) -> int:
        """How many pages every rank has read by now."""
        (agreed,) = self._channels["read"].minimum([completed])
        self._agreement.progress.append(ReadProgress(prefetch, completed_pages=agreed))
        return agreed

    def _load(self, names: Sequence[Key]) -> int:
        # how many lead without a gap
        keys = key_bytes(names)
        wanted = [self._payload(key) for key in keys]
        buffers = [bytearray(len(page)) for page in wanted]
        try:
            flags = self._storage.read(keys, [memoryview(buffer) for buffer in buffers])
        except StorageError:
            return 0
        for index, (page, buffer, flag) in enumerate(zip(wanted, buffers, flags, strict=True)):
            if not flag:
                return index
            self.num_wrong_pages += page != buffer
        return len(keys)
