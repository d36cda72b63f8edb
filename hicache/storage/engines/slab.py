"""The embedded default engine: fixed slots in one sparse file per page size, shared by processes.

A write has three steps. The writer reserves a slot in the slot table, writes the bytes to the slot,
and then publishes the slot under the page's key with a digest. A reader looks the key up, reads the
slot straight into the caller's buffer, and accepts it only if the digest agrees. So the pages of a
killed writer stay invisible, and a slot that is reused during a read is a miss. The engine never
syncs the disk: after a power cut pages may be missing, but never wrong.
"""

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

from hicache.storage.base import StorageError, StorageStats
from hicache.storage.digest import namespace_name, page_digest, page_hasher
from hicache.storage.engines.private import make_directory, open_file
from hicache.storage.engines.slot_files import ALIGN_BYTES, Place, SlotFiles
from hicache.storage.engines.slot_table import Reservation, SlotTable, StoredPage, Written

Where = TypeVar("Where")
Result = TypeVar("Result")

_PART_BYTES = 256 * 1024  # fits the second-level cache together with the source
# errors of a damaged table, whose rows may hold anything
_DAMAGES = (sqlite3.Error, TypeError, ValueError, OverflowError)
_LOCK_POLL_S = 0.01
_TOUCHED_AT_MOST = 1024  # at most this many reads wait for the next write to refresh their pages


class _DiskFullError(StorageError):
    pass


class SlabStorage:
    """A storage engine that keeps pages in fixed-size slots of large sparse files.

    An SQLite table records which slot holds which page. Several processes can share the files.
    `root` must be on a local file system, because SQLite's log cannot be shared over a network.
    Each namespace (the pages of one model, layout, page size and rank) has its own directory and
    its own `capacity_bytes`. A slot is as large as its page, rounded up to a multiple of 4 KiB.
    `num_threads` threads copy the pages of one call.
    """

    def __init__(
        self,
        root: Path,
        *,
        namespace: str,
        capacity_bytes: int | None,
        num_threads: int = 2,
        busy_s: float = 5.0,
    ) -> None:
        self._namespace = namespace.encode()
        self._root = root / namespace_name(namespace)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="slab")
        self._touched: dict[bytes, None] = {}
        self._lock = Lock()  # held for table access, never while pages move
        self._num_calls = 0  # calls that move pages, or are about to
        self._is_closed = False
        self._stats = StorageStats()
        try:
            make_directory(self._root)
            with _opening(self._root / "opening", busy_s) as self._is_read_only:
                self._files = SlotFiles(self._root, is_read_only=self._is_read_only)
                self._table = SlotTable(
                    self._root / "slots.sqlite",
                    self._files,
                    capacity_bytes=capacity_bytes,
                    busy_s=busy_s,
                    is_read_only=self._is_read_only,
                )
        except (OSError, *_DAMAGES) as error:
            raise StorageError(f"cannot open the slab storage in {self._root}: {error}") from error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._in_use(), self._use_table() as table:
            found = table.find(keys)
        return [key in found for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._in_use():
            return self._read_all(keys, buffers)

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._in_use():
            return self._write_all(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        def free(table: SlotTable) -> None:
            for page in table.find(keys).values():
                table.free(page.place)

        with self._in_use():
            self._change(free)

    def stats(self) -> StorageStats:
        with self._in_use(), self._use_table() as table:
            stored_pages, stored_bytes = table.stored()
            return replace(self._stats, stored_pages=stored_pages, stored_bytes=stored_bytes)

    def close(self) -> None:
        # A call abandoned at its deadline may run on for long. If its file were closed, the same
        # descriptor could name another file by the time the call writes to it. So the last such
        # call closes the files.
        with self._lock:
            if self._is_closed:
                return
        try:
            with self._in_use():
                self._touch_all()
        finally:
            with self._lock:
                is_idle = not (self._is_closed or self._num_calls)
                self._is_closed = True
            if is_idle:
                self._let_go()

    def _let_go(self) -> None:
        self._threads.shutdown()
        self._table.close()
        self._files.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise StorageError(f"the slab storage in {self._root} is closed")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                is_last = self._is_closed and not self._num_calls
            if is_last:
                self._let_go()

    def _read_all(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._use_table() as table:
            found = table.find(keys)
        pages = [found.get(key) for key in keys]
        results = self._spread(self._read, keys, pages, buffers)
        hits = [key for key, result in zip(keys, results, strict=True) if result]
        with self._lock:
            for key in hits:
                self._touched.pop(key, None)
                self._touched[key] = None
        if len(self._touched) > _TOUCHED_AT_MOST:
            self._touch_all()
        return results

    def _write_all(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        wanted = list(zip(keys, map(_slot_bytes, buffers), strict=True))
        try:
            touched = self._take_touched()

            def reserve(table: SlotTable) -> list[Reservation | StoredPage | None]:
                table.touch(touched)
                return table.reserve(wanted)

            places = self._change(reserve)
        except _DiskFullError:
            return self.contains(keys)
        written: list[Written | None] = [None] * len(keys)
        try:
            written = self._spread(self._write, keys, places, buffers)
        finally:
            # also when interrupted: a reserved slot stays reserved as long as this process lives
            failed = [
                place
                for place, page in zip(places, written, strict=True)
                if isinstance(place, Reservation) and page is None
            ]
            published = self._publish([page for page in written if page is not None], failed)
        return [
            isinstance(place, StoredPage) or (page is not None and page.key in published)
            for place, page in zip(places, written, strict=True)
        ]

    def _read(self, key: bytes, page: StoredPage | None, buffer: memoryview) -> bool:
        if page is None:
            return False
        if page.length == buffer.nbytes:
            if self._move(self._files.read, key, page.place, buffer) == page.digest:
                return True
        elif page.place.slot_bytes > _slot_bytes(buffer) or self._is_whole(key, page):
            return False  # a page of another length
        if self._is_read_only:
            return False
        with suppress(_DiskFullError), self._change_table() as table:
            # or the slot was reused meanwhile and holds another page: an ordinary miss
            if table.find([key]).get(key) == page:
                table.free(page.place)
                self._stats.damaged_pages += 1
        return False

    def _is_whole(self, key: bytes, page: StoredPage) -> bool:
        if not 0 <= page.length <= page.place.slot_bytes:
            return False
        scratch = memoryview(bytearray(page.length))
        return self._move(self._files.read, key, page.place, scratch) == page.digest

    def _write(
        self, key: bytes, place: Reservation | StoredPage | None, buffer: memoryview
    ) -> Written | None:
        if not isinstance(place, Reservation):
            return None
        digest = self._move(self._files.write, key, place.place, buffer)
        return None if digest is None else Written(key, place, buffer.nbytes, digest)

    def _move(
        self,
        move: Callable[[Place, int, memoryview], bool],
        key: bytes,
        place: Place,
        buffer: memoryview,
    ) -> bytes | None:
        if buffer.nbytes <= _PART_BYTES:
            is_moved = move(place, 0, buffer)
            return page_digest(self._namespace, key, buffer) if is_moved else None
        # in parts, each hashed while it is in the processor's cache
        hasher = page_hasher(self._namespace, key, buffer.nbytes)
        for start in range(0, buffer.nbytes, _PART_BYTES):
            part = buffer[start : start + _PART_BYTES]
            if not move(place, start, part):
                return None
            hasher.update(part)
        return hasher.digest()

    def _publish(self, pages: Sequence[Written], failed: Sequence[Reservation]) -> set[bytes]:
        try:
            stored = self._change(lambda table: table.publish(pages, failed=failed))
        except _DiskFullError:
            self._withdraw([*(page.reservation for page in pages), *failed])
            return set()
        return {page.key for page, result in zip(pages, stored, strict=True) if result}

    def _withdraw(self, reservations: Sequence[Reservation]) -> None:
        for reservation in reservations:
            self._files.free_space(reservation.place)
        with suppress(_DiskFullError), self._change_table() as table:
            table.publish([], failed=reservations)

    def _spread(
        self,
        move: Callable[[bytes, Where, memoryview], Result],
        keys: Sequence[bytes],
        places: Sequence[Where],
        buffers: Sequence[memoryview],
    ) -> list[Result]:
        pages = list(zip(keys, places, buffers, strict=True))
        results: dict[int, Result] = {}
        rest = iter(range(len(pages)))

        def move_rest() -> None:
            for index in rest:
                results[index] = move(*pages[index])

        # this thread starts at once, so a batch of one page never switches threads
        others = [
            self._threads.submit(move_rest) for _ in range(min(self._num_threads, len(pages)) - 1)
        ]
        try:
            move_rest()
        finally:
            for _ in rest:
                pass  # interrupted: no thread starts another page
            for other in others:
                if not other.cancel():  # a thread that has not started yet is not needed
                    other.result()
        return [results[index] for index in range(len(pages))]

    def _touch_all(self) -> None:
        touched = self._take_touched()
        if not self._is_read_only:
            with suppress(_DiskFullError):
                self._change(lambda table: table.touch(touched))

    def _take_touched(self) -> list[bytes]:
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def _change(self, change: Callable[[SlotTable], Result]) -> Result:
        try:
            with self._change_table() as table:
                return change(table)
        except _DiskFullError:
            # the log of the table may take the space that deleted pages have left
            with suppress(StorageError), self._use_table() as table:
                table.shrink_log()
        with self._change_table() as table:
            return change(table)

    @contextmanager
    def _change_table(self) -> Iterator[SlotTable]:
        with self._use_table() as table, table.transaction():
            yield table

    @contextmanager
    def _use_table(self) -> Iterator[SlotTable]:
        with self._lock:
            try:
                yield self._table
            except _DAMAGES as error:
                code = getattr(error, "sqlite_errorcode", None)
                if code == sqlite3.SQLITE_FULL:
                    raise _DiskFullError from error
                raise StorageError(f"the slot table in {self._root} failed: {error}") from error


def _slot_bytes(buffer: memoryview) -> int:
    return max(-(-buffer.nbytes // ALIGN_BYTES), 1) * ALIGN_BYTES


@contextmanager
def _opening(path: Path, busy_s: float) -> Iterator[bool]:
    # One process at a time, because SQLite does not wait while a table is created. Yields True if
    # the disk is read-only, and the table cannot be created.
    give_up_at = time.monotonic() + busy_s
    try:
        file = open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        yield True
        return
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    told = f"locked by another process for more than {busy_s:g} s"
                    raise TimeoutError(told) from None
                time.sleep(_LOCK_POLL_S)
        yield False
    finally:
        os.close(file)
