"""One file per page: for directories shared over a network, and for pages of any size.

A writer puts the page in a file under `writing/` and renames that file into place, so a reader sees
the whole page or none. The digest follows the payload in the file. With a capacity, the files with
the oldest modification time are removed first; reads and writes of existing keys renew that time.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from uuid import uuid4

from hicache.storage.base import KEY_BYTES, StorageError, StorageStats
from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest
from hicache.storage.engines.own_files import (
    ForeignFileError,
    names_in,
    open_own,
    own_directory,
    own_status,
)
from hicache.storage.engines.owner import Owner, current_owner, is_alive, is_this_boot, parse_owner

_SUFFIX = ".page"
_WRITING = "writing"
_BUCKETS = tuple(f"{first:02x}" for first in range(256))  # by first byte of a key
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESCAN_SHARE = 0.05  # rescan after writing this share of the capacity: other processes write too
_FOREIGN_LEFTOVER_S = 3600.0  # writing one page never takes longer, on any machine


class FileStorage:
    """A storage engine that keeps each KV-cache page in a file of its own below `root`.

    Each namespace (the pages of one model, layout, page size and rank) has its own directory.
    `capacity_bytes` limits the sum of the namespace's page sizes; None means no limit. `page_bytes`
    maps a kind of page (the last byte of a key) to the size that is counted for a page. A page of
    any other kind counts with its own length. A single process never exceeds the limit. Each
    further process that writes to the directory can exceed the limit by 5% until it scans the
    directory again.

    The engine never touches a file that it cannot have written, such as a link or a file longer
    than a page. Reads of that file's key miss, and writes return False. A file with a wrong digest
    counts as a damaged page and is deleted.
    """

    def __init__(
        self,
        root: Path,
        *,
        namespace: str,
        capacity_bytes: int | None,
        page_bytes: Mapping[int, int] | None = None,
    ) -> None:
        self._namespace = namespace.encode()
        self._capacity_bytes = capacity_bytes
        self._page_bytes = {} if page_bytes is None else dict(page_bytes)
        self._root = root / namespace_name(namespace)
        self._owner = current_owner()
        self._lock = Lock()
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # oldest first, with charged bytes
        self._stats = StorageStats()
        self._used_bytes = 0
        self._unscanned_bytes = 0
        with self._reached():
            self._root.mkdir(parents=True, exist_ok=True)
        with self._opened() as directory:
            for name in (_WRITING, *_BUCKETS):
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=directory)
            self._sweep(directory)
            self._scan(directory)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._opened() as directory:
            return [self._contains(directory, key) for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._opened() as directory:
            return [
                self._read(directory, key, buffer)
                for key, buffer in zip(keys, buffers, strict=True)
            ]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._opened() as directory:
            return [
                self._write(directory, key, buffer)
                for key, buffer in zip(keys, buffers, strict=True)
            ]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._opened() as directory, self._lock:
            for key in keys:
                self._remove(directory, key)

    def stats(self) -> StorageStats:
        with self._opened() as directory, self._lock:
            self._scan(directory)
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

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._reached(), own_directory(self._root) as directory:
            yield directory

    def _status(self, bucket: int, key: bytes) -> os.stat_result | None:
        status = own_status(_name(key), bucket)
        longest = self._page_bytes.get(key[-1])
        if status and longest is not None and status.st_size > longest + PAGE_DIGEST_BYTES:
            raise ForeignFileError(errno.EFBIG, f"longer than {longest} bytes", _name(key))
        return status

    def _contains(self, directory: int, key: bytes) -> bool:
        with suppress(FileNotFoundError, ForeignFileError), _bucket(directory, key) as bucket:
            return self._status(bucket, key) is not None
        return False

    def _read(self, directory: int, key: bytes, buffer: memoryview) -> bool:
        # read one byte more than the digest, to detect a longer file without a stat
        trailer = bytearray(PAGE_DIGEST_BYTES + 1)
        try:
            with _bucket(directory, key) as bucket:
                file = open_own(_name(key), os.O_RDONLY, bucket)
                if self._capacity_bytes is not None:
                    _refresh_file(_name(key), bucket)
            try:
                num_bytes = _move_all(os.preadv, file, buffer, memoryview(trailer))
            finally:
                os.close(file)
        except (FileNotFoundError, ForeignFileError):
            return False
        except OSError as error:
            if error.errno == errno.EIO:
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
        with self._lock:
            if not whole:
                # remove the damaged page: a later write would keep it
                self._stats.damaged_pages += 1
                self._remove(directory, key)
            if right:
                self._refresh(key)
        return right

    def _write(self, directory: int, key: bytes, buffer: memoryview) -> bool:
        try:
            with _bucket(directory, key) as bucket:
                is_stored = self._status(bucket, key) is not None
                if is_stored and self._capacity_bytes is not None:
                    _refresh_file(_name(key), bucket)
        except ForeignFileError:
            return False
        if is_stored:
            with self._lock:
                self._refresh(key)
            return True
        charged_bytes = self._charged_bytes(key, buffer.nbytes)
        with self._lock:
            if not self._make_room(directory, charged_bytes):
                return False
            # charge before writing, so that concurrent writers keep the bound
            self._used_bytes += charged_bytes
            self._unscanned_bytes += charged_bytes
        written = False
        try:
            written = self._publish(directory, key, buffer)
        finally:
            with self._lock:
                if written and key not in self._pages:
                    self._pages[key] = charged_bytes
                else:
                    self._used_bytes -= charged_bytes
        return written

    def _publish(self, directory: int, key: bytes, buffer: memoryview) -> bool:
        draft = f"{self._owner}.{uuid4().hex}"
        digest = page_digest(self._namespace, key, buffer)
        try:
            with own_directory(_WRITING, directory) as writing, _bucket(directory, key) as bucket:
                try:
                    file = open_own(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, writing)
                    try:
                        _move_all(os.pwritev, file, buffer, memoryview(digest))
                    finally:
                        os.close(file)
                    # may replace a page that another process just published: the contents are equal
                    os.rename(draft, _name(key), src_dir_fd=writing, dst_dir_fd=bucket)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(draft, dir_fd=writing)
                    raise
        except ForeignFileError:
            return False
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise
        return True

    def _charged_bytes(self, key: bytes, payload_bytes: int) -> int:
        return self._page_bytes.get(key[-1], payload_bytes)

    def _refresh(self, key: bytes) -> None:
        if key in self._pages:
            self._pages.move_to_end(key)

    def _make_room(self, directory: int, wanted_bytes: int) -> bool:
        if self._capacity_bytes is None:
            return True
        if wanted_bytes > self._capacity_bytes:
            return False
        if self._unscanned_bytes > _RESCAN_SHARE * self._capacity_bytes:
            self._scan(directory)
        while self._used_bytes + wanted_bytes > self._capacity_bytes:
            if not self._pages:
                return False  # pages being written take all the room
            self._remove(directory, next(iter(self._pages)))
        return True

    def _remove(self, directory: int, key: bytes) -> None:
        with suppress(FileNotFoundError, ForeignFileError), _bucket(directory, key) as bucket:
            if self._status(bucket, key) is not None:
                os.unlink(_name(key), dir_fd=bucket)
        self._used_bytes -= self._pages.pop(key, 0)

    def _scan(self, directory: int) -> None:
        writing_bytes = self._used_bytes - sum(self._pages.values())
        order = {key: place for place, key in enumerate(self._pages)}
        found = []
        for key, status in self._stored(directory):
            size_bytes = max(status.st_size - PAGE_DIGEST_BYTES, 0)
            # file systems resolve times to some milliseconds only
            age = (status.st_mtime_ns, order.get(key, len(order)))
            found.append((age, key, self._charged_bytes(key, size_bytes)))
        self._pages = OrderedDict((key, size_bytes) for _, key, size_bytes in sorted(found))
        self._used_bytes = writing_bytes + sum(self._pages.values())
        self._unscanned_bytes = 0

    def _stored(self, directory: int) -> Iterator[tuple[bytes, os.stat_result]]:
        foreign = (FileNotFoundError, ForeignFileError)
        for prefix in _BUCKETS:
            with suppress(*foreign), own_directory(prefix, directory) as bucket:
                for name in names_in(bucket):
                    key = _key(name) if name.startswith(prefix) else None
                    if key is not None:
                        with suppress(ForeignFileError):
                            status = self._status(bucket, key)
                            if status is not None:
                                yield key, status

    def _sweep(self, directory: int) -> None:
        with own_directory(_WRITING, directory) as writing:
            for draft in names_in(writing):
                owner = parse_owner(draft.rpartition(".")[0])
                if owner is None:
                    continue
                with suppress(FileNotFoundError, ForeignFileError):
                    status = own_status(draft, writing)
                    if status is not None and _is_abandoned(owner, status):
                        os.unlink(draft, dir_fd=writing)


def _is_abandoned(owner: Owner, draft: os.stat_result) -> bool:
    if is_this_boot(owner):
        return not is_alive(owner)
    # perhaps of another machine, whose processes are not visible here
    return time.time() - draft.st_mtime > _FOREIGN_LEFTOVER_S


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _key(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and name == _name(key) else None


def _bucket(directory: int, key: bytes) -> AbstractContextManager[int]:
    return own_directory(_BUCKETS[key[0]], directory)


def _refresh_file(name: str, directory: int) -> None:
    with suppress(OSError):
        os.utime(name, dir_fd=directory, follow_symlinks=False)


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
