"""One file per page: for directories shared over a network, and for pages of any size.

A writer puts the page in a file under `writing/` and renames that file into place, so a reader sees
the whole page or none. A draft is locked while its writer lives. The digest follows the payload in
the file. With a capacity, the files with the oldest modification time are removed first; reads and
writes of existing keys renew that time.
"""

import errno
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from uuid import uuid4

from hicache.storage.base import KEY_BYTES, StorageError, StorageStats
from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest
from hicache.storage.engines.private import make_directory, open_file

_SUFFIX = ".page"
_WRITING = "writing"
_BUCKETS = tuple(f"{first:02x}" for first in range(256))  # by first byte of a key
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESCAN_SHARE = 0.05  # rescan after writing this share of the capacity: other processes write too
_UUID_LETTERS = 32
_LEFTOVER_S = 3600.0  # writing one page never takes longer


class FileStorage:
    """A storage engine that keeps each KV-cache page in a file of its own below `root`.

    Each namespace (the pages of one model, layout, page size and rank) has its own directory.
    `capacity_bytes` limits the sum of the namespace's page sizes; None means no limit. A single
    process never exceeds the limit. Each further process that writes to the directory can exceed
    the limit by 5% until it scans the directory again.

    A file with a wrong digest counts as a damaged page and is deleted.
    """

    def __init__(self, root: Path, *, namespace: str, capacity_bytes: int | None) -> None:
        self._namespace = namespace.encode()
        self._capacity_bytes = capacity_bytes
        self._root = root / namespace_name(namespace)
        self._lock = Lock()
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # oldest first, with charged bytes
        self._stats = StorageStats()
        self._used_bytes = 0
        self._unscanned_bytes = 0
        with self._reached():
            make_directory(self._root)
            for name in (_WRITING, *_BUCKETS):
                make_directory(self._root / name)
            self._sweep()
            self._scan()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._reached():
            return [self._path(key).exists() for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._reached():
            return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._reached():
            return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._reached(), self._lock:
            for key in keys:
                self._remove(key)

    def stats(self) -> StorageStats:
        with self._reached(), self._lock:
            self._scan()
            return replace(
                self._stats, stored_pages=len(self._pages), stored_bytes=self._used_bytes
            )

    def close(self) -> None:
        pass  # no file stays open between calls

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot store pages in {self._root}: {error}") from error

    def _path(self, key: bytes) -> Path:
        return self._root / _BUCKETS[key[0]] / _name(key)

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        # read one byte more than the digest, to detect a longer file without a stat
        trailer = bytearray(PAGE_DIGEST_BYTES + 1)
        try:
            file = open_file(self._path(key), os.O_RDONLY)
            try:
                num_bytes = _move_all(os.preadv, file, buffer, memoryview(trailer))
            finally:
                os.close(file)
        except FileNotFoundError:
            self._root.stat()  # an error if the whole store is gone
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link: not a page, and not followed
                with self._lock:
                    self._remove(key)
            if error.errno in (errno.EIO, errno.ELOOP):
                return False
            raise
        length = num_bytes - PAGE_DIGEST_BYTES
        if length > buffer.nbytes:
            return False  # not the caller's length: a miss
        digest = (
            bytes(buffer[max(length, 0) : num_bytes]) + trailer[: max(num_bytes - buffer.nbytes, 0)]
        )
        whole = length >= 0 and page_digest(self._namespace, key, buffer[:length]) == digest
        right = whole and length == buffer.nbytes
        if right:
            self._refresh(key)
        elif not whole:
            with self._lock:
                # remove the damaged page: a later write would keep it
                self._stats.damaged_pages += 1
                self._remove(key)
        return right

    def _write(self, key: bytes, buffer: memoryview) -> bool:
        if self._path(key).exists():
            self._refresh(key)
            return True
        with self._lock:
            if not self._make_room(buffer.nbytes):
                return False
            # charge before writing, so that concurrent writers keep the bound
            self._used_bytes += buffer.nbytes
            self._unscanned_bytes += buffer.nbytes
        written = False
        try:
            written = self._publish(key, buffer)
        finally:
            with self._lock:
                if written and key not in self._pages:
                    self._pages[key] = buffer.nbytes
                else:
                    self._used_bytes -= buffer.nbytes
        return written

    def _publish(self, key: bytes, buffer: memoryview) -> bool:
        draft = self._root / _WRITING / uuid4().hex
        digest = page_digest(self._namespace, key, buffer)
        try:
            file = open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                _move_all(os.pwritev, file, buffer, memoryview(digest))
                # may replace a page that another process just published: the contents are equal
                draft.rename(self._path(key))
            finally:
                os.close(file)
        except BaseException as error:
            with suppress(OSError):
                draft.unlink()
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                return False
            raise
        return True

    def _refresh(self, key: bytes) -> None:
        if self._capacity_bytes is not None:
            with suppress(OSError):
                os.utime(self._path(key), follow_symlinks=False)
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)

    def _make_room(self, wanted_bytes: int) -> bool:
        if self._capacity_bytes is None:
            return True
        if wanted_bytes > self._capacity_bytes:
            return False
        if self._unscanned_bytes > _RESCAN_SHARE * self._capacity_bytes:
            self._scan()
        while self._used_bytes + wanted_bytes > self._capacity_bytes:
            if not self._pages:
                return False  # pages being written take all the room
            self._remove(next(iter(self._pages)))
        return True

    def _remove(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)
        self._used_bytes -= self._pages.pop(key, 0)

    def _scan(self) -> None:
        writing_bytes = self._used_bytes - sum(self._pages.values())
        order = {key: place for place, key in enumerate(self._pages)}
        found = []
        for key, status in self._stored():
            size_bytes = max(status.st_size - PAGE_DIGEST_BYTES, 0)
            # file systems resolve times to some milliseconds only
            age = (status.st_mtime_ns, order.get(key, len(order)))
            found.append((age, key, size_bytes))
        self._pages = OrderedDict((key, size_bytes) for _, key, size_bytes in sorted(found))
        self._used_bytes = writing_bytes + sum(self._pages.values())
        self._unscanned_bytes = 0

    def _stored(self) -> Iterator[tuple[bytes, os.stat_result]]:
        for prefix in _BUCKETS:
            for path in (self._root / prefix).iterdir():
                key = _key(path.name) if path.name.startswith(prefix) else None
                if key is not None:
                    with suppress(FileNotFoundError):
                        yield key, path.lstat()

    def _sweep(self) -> None:
        # drafts of writers that died, which may have run on another machine
        for draft in (self._root / _WRITING).iterdir():
            with suppress(FileNotFoundError):
                age_s = time.time() - draft.lstat().st_mtime
                # earlier versions put the process before a dot
                number = draft.name.rpartition(".")[2]
                if len(number) == _UUID_LETTERS and age_s > _LEFTOVER_S:
                    _remove_abandoned(draft)


def _remove_abandoned(draft: Path) -> None:
    # clocks may differ by hours, so the age alone does not prove that the writer is dead
    try:
        file = open_file(draft, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # a link, or a file of another user
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink()
    except OSError:  # its writer holds the lock, or the file system has no locks
        pass
    finally:
        os.close(file)


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _key(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and name == _name(key) else None


def _move_all(
    move: Callable[[int, list[memoryview], int], int],
    file: int,
    buffer: memoryview,
    trailer: memoryview,
) -> int:
    done = 0
    while done < buffer.nbytes + trailer.nbytes:
        moved = move(file, [buffer[done:], trailer[max(done - buffer.nbytes, 0) :]], done)
        if moved == 0:
            break
        done += moved
    return done
