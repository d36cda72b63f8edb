"""The readers of two ranks in one process: what each makes of what its storage holds."""

from collections.abc import Callable, Sequence
from threading import Barrier, Thread

import numpy as np
import pytest

from hicache.cache.kinds import FULL, KEY_TAGS, MAMBA, SWA
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.tiers.transfer import BackUp, CopyState, StorageDelete, StorageWrite
from hicache.config import HitAgreement
from hicache.engine.ranks.agreement import ReadProgress
from hicache.engine.ranks.processes import RankedReader
from hicache.scheduler.batch import Batch
from hicache.storage.base import StorageError
from tests.engine.test_agreement import Rank

NUM_PAGES = 5


class Table:
    """Where ranks in threads meet."""

    def __init__(self, num_ranks: int) -> None:
        self.offers: list[Sequence[int]] = [()] * num_ranks
        self.barrier = Barrier(num_ranks, timeout=30)


class Seat:
    """One rank's channel."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank
        self.num_collectives = 0

    def minimum(self, values: Sequence[int]) -> list[int]:
        self._table.offers[self._rank] = list(values)
        self._table.barrier.wait()
        least = [min(column) for column in zip(*self._table.offers, strict=True)]
        self._table.barrier.wait()  # nobody offers anew before all have seen this
        self.num_collectives += 1
        return least


class Shelf:
    """A storage of pages by key, some of which cannot be read though they are there."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.unreadable: set[bytes] = set()
        self.is_broken = False
        self.asked: list[list[bytes]] = []  # by each read

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self.is_broken:
            raise StorageError("gone")
        return [key in self.pages for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self.asked.append(list(keys))
        if self.is_broken:
            raise StorageError("gone")
        flags = []
        for key, buffer in zip(keys, buffers, strict=True):
            flags.append(key in self.pages and key not in self.unreadable)
            if flags[-1]:
                buffer[:] = self.pages[key]
        return flags

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        if self.is_broken:
            raise StorageError("gone")
        self.pages |= {key: bytes(page) for key, page in zip(keys, pages, strict=True)}
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        if self.is_broken:
            raise StorageError("gone")
        for key in keys:
            self.pages.pop(key, None)


def payload(key: bytes) -> bytes:
    return key[:8] * 2


class Pair:
    """Two ranks that have been asked for the same, each with a shelf that holds all of it."""

    def __init__(
        self,
        *,
        window_len: int = 0,
        has_states: bool = False,
        batch_pages: int = 2,
        rule: HitAgreement = HitAgreement.restorable,
    ) -> None:
        self.ranks = [Rank(window_len=window_len, has_states=has_states) for _ in range(2)]
        self.prefetches = [rank.start(num_pages=NUM_PAGES) for rank in self.ranks]
        self.shelves = [Shelf() for _ in self.ranks]
        tables = {purpose: Table(2) for purpose in ("query", "read")}
        self.channels = [
            {purpose: Seat(table, rank) for purpose, table in tables.items()} for rank in (0, 1)
        ]
        self.readers = [
            RankedReader(
                shelf,
                rank.agreement,
                channels,  # type: ignore[arg-type]
                payload=payload,
                batch_pages=batch_pages,
                rule=rule,
            )
            for rank, shelf, channels in zip(self.ranks, self.shelves, self.channels, strict=True)
        ]
        for shelf, prefetch in zip(self.shelves, self.prefetches, strict=True):
            for kind in (FULL, SWA, MAMBA):
                for key in prefetch.keys(kind, 0, NUM_PAGES):
                    shelf.pages[key] = payload(key)

    def key(self, page: int, kind: int = FULL) -> bytes:
        return self.prefetches[0].names[page] + KEY_TAGS[kind : kind + 1]

    def do(self, what: Callable[[RankedReader, Prefetch], None]) -> None:
        """Let both readers do something, and wait for them."""
        for reader, prefetch in zip(self.readers, self.prefetches, strict=True):
            what(reader, prefetch)
        threads = [Thread(target=reader.close) for reader in self.readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        for reader in self.readers:
            reader.check()

    def query(self) -> list[list[int] | None]:
        self.do(lambda reader, prefetch: reader.query(prefetch, 0))
        answers = [rank.agreement.answers for rank in self.ranks]
        assert [len(each) for each in answers] == [1, 1]
        return [each[0].restorable for each in answers]

    def read(self) -> list[tuple[int, int, bool]]:
        """The news of a read, which both ranks must have alike: pages, sidecars, whether all."""
        self.do(lambda reader, prefetch: reader.read(prefetch, 0))
        news = [
            [(each.completed_pages, each.restored_pages, each.is_read) for each in progress]
            for progress in (rank.agreement.progress for rank in self.ranks)
        ]
        assert news[0] == news[1]
        for rank, prefetch in zip(self.ranks, self.prefetches, strict=True):
            assert {each.prefetch for each in rank.agreement.progress} == {prefetch}
        assert [reader.num_wrong_pages for reader in self.readers] == [0, 0]
        return news[0]

    def collectives(self) -> list[tuple[int, int]]:
        return [
            (each["query"].num_collectives, each["read"].num_collectives) for each in self.channels
        ]


def test_a_query_tells_every_rank_what_all_can_restore() -> None:
    pair = Pair(has_states=True)
    del pair.shelves[0].pages[pair.key(1, MAMBA)]
    del pair.shelves[1].pages[pair.key(4)]
    assert pair.query() == [[1, 3, 4], [1, 3, 4]]
    assert pair.collectives() == [(1, 0), (1, 0)]


def test_a_query_of_a_storage_that_is_gone_finds_nothing() -> None:
    pair = Pair()
    pair.shelves[1].is_broken = True
    assert pair.query() == [[], []]


def test_under_min_of_maxima_a_query_tells_the_shorter_of_the_longest() -> None:
    pair = Pair(has_states=True, rule=HitAgreement.min_of_maxima)
    for page in (2, 4):
        del pair.shelves[0].pages[pair.key(page, MAMBA)]
    for page in (3, 4):
        del pair.shelves[1].pages[pair.key(page, MAMBA)]
    assert pair.query() == [[3], [3]]  # which the first cannot


@pytest.mark.parametrize(
    ("batch_pages", "batches"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_pages_are_told_of_batch_by_batch(batch_pages: int, batches: list[int]) -> None:
    pair = Pair(batch_pages=batch_pages)
    news = pair.read()
    assert news == [*((pages, 0, False) for pages in batches), (5, 0, True)]
    assert pair.collectives() == [(0, len(batches) + 1)] * 2


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize(
    ("missing", "pages"), [(0, [0, 0, 0]), (1, [1, 1, 1]), (2, [2, 2, 2]), (3, [2, 3, 3])]
)
def test_a_page_that_one_rank_cannot_read_ends_the_read_of_all(
    missing: int, pages: list[int], short: int
) -> None:
    pair = Pair()
    pair.shelves[short].unreadable.add(pair.key(missing))
    news = pair.read()
    assert news == [*((each, 0, False) for each in pages), (pages[-1], 0, True)]


def test_nothing_is_read_behind_a_gap() -> None:
    pair = Pair()
    pair.shelves[0].unreadable.add(pair.key(1))
    pair.read()
    assert pair.shelves[0].asked == [[pair.key(0), pair.key(1)]]
    assert len(pair.shelves[1].asked) == 3


def test_a_storage_that_is_gone_reads_nothing() -> None:
    pair = Pair()
    pair.shelves[0].is_broken = True
    assert pair.read() == [(0, 0, False)] * 3 + [(0, 0, True)]


def test_a_read_that_was_terminated_takes_part_in_every_collective() -> None:
    pair = Pair()
    pair.prefetches[1].phase = Phase.stopped
    assert pair.read() == [(0, 0, False)] * 3 + [(0, 0, True)]
    assert pair.shelves[1].asked == []
    assert pair.collectives() == [(0, 4), (0, 4)]


@pytest.mark.parametrize("kind", [SWA, MAMBA])
@pytest.mark.parametrize("lacking", [(), (0,), (1,), (0, 1)])
def test_window_and_state_are_found_if_every_rank_has_them(
    lacking: tuple[int, ...], kind: int
) -> None:
    pair = Pair(window_len=8 if kind == SWA else 0, has_states=kind == MAMBA)
    for rank in lacking:
        pair.shelves[rank].unreadable.add(pair.key(4, kind))
    assert pair.read()[-1] == (5, 0 if lacking else 5, True)


def test_no_window_is_read_for_pages_that_did_not_come() -> None:
    pair = Pair(window_len=8)
    pair.shelves[0].unreadable.add(pair.key(4))
    assert pair.read()[-1] == (4, 0, True)
    assert all(key[-1:] == b"f" for shelf in pair.shelves for keys in shelf.asked for key in keys)


def test_a_wrong_page_is_counted() -> None:
    pair = Pair()
    pair.shelves[1].pages[pair.key(3)] = b"x" * 16
    pair.do(lambda reader, prefetch: reader.read(prefetch, 0))
    assert [reader.num_wrong_pages for reader in pair.readers] == [0, 1]


@pytest.mark.plain
def test_copies_are_done_at_once_and_writes_reach_the_shelf() -> None:
    pair = Pair()
    (reader, _), (shelf, _) = pair.readers, pair.shelves
    agreement = pair.ranks[0].agreement
    slot = np.zeros(1, np.int32)
    reader.submit(CopyState(source=slot, target=slot), 0)
    reader.submit(StorageDelete(keys=[pair.key(0)]), 0)
    assert pair.key(0) not in shelf.pages
    assert agreement.pack(0)[2:5] == [0, 0, 0]
    reader.submit(
        StorageWrite(keys=[b"12345678a"], parts=[(0, [0])], num_bytes=1, host_locks=[]), 0
    )
    assert shelf.pages[b"12345678a"] == b"1234567812345678"
    back_up = BackUp(
        moves=[],
        num_bytes=0,
        node=pair.prefetches[0].anchor,
        starts={},
        points=[],
        is_fence=False,
    )
    reader.submit(back_up, 0)
    assert agreement.pack(0)[2:5] == [0, 1, 1]
    pair.do(lambda *_: None)


def test_a_storage_that_takes_nothing_stops_nobody() -> None:
    pair = Pair()
    reader, shelf = pair.readers[0], pair.shelves[0]
    shelf.is_broken = True
    reader.submit(
        StorageWrite(keys=[b"12345678a"], parts=[(0, [0])], num_bytes=1, host_locks=[]), 0
    )
    reader.submit(StorageDelete(keys=[b"12345678a"]), 0)
    assert pair.ranks[0].agreement.pack(0)[2:5] == [0, 0, 1]
    pair.do(lambda *_: None)


def test_steps_take_no_time() -> None:
    pair = Pair()
    assert not pair.readers[0].is_fenced
    run = pair.readers[0].forward(Batch(num_steps=3), 70)
    assert ([run.ends[step] for step in range(3)], run.load_stall_ns) == ([70] * 3, 0)
    pair.do(lambda *_: None)


def test_what_a_reader_dies_of_is_told() -> None:
    pair = Pair()
    reader = pair.readers[0]
    reader.check()

    def die(keys: list[bytes]) -> list[bool]:
        raise KeyError("a bug")

    pair.shelves[0].contains = die  # type: ignore[method-assign, assignment]
    reader.query(pair.prefetches[0], 0)
    with pytest.raises(RuntimeError, match="a reader has died") as error:
        reader.close()
    assert isinstance(error.value.__cause__, KeyError)
    pair.readers[1].close()


def test_news_names_what_was_agreed() -> None:
    news = ReadProgress(Rank().start())
    assert (news.restorable, news.completed_pages, news.restored_pages) == (None, 0, 0)
    assert (news.is_read, news.read_ns) == (False, None)
