"""One file a page: for directories that are shared over a network, and for any size of page.

A page is written to a file of its own under `writing/` and renamed to its place, so whoever sees
it sees all of it. Its digest follows the payload in the file. With a capacity, the files whose
time of change is oldest are removed first; reads and existing writes set that time anew.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import Lock

from hicache.storage.base import KEY_BYTES, StorageError, StorageStats
from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest
from hicache.storage.engines.owner import current_owner, is_alive, is_this_boot, parse_owner

_SUFFIX = ".page"
_RESCAN_SHARE = 0.05  # of the capacity: what other processes wrote is looked for after so much
_FOREIGN_LEFTOVER_S = 3600.0  # no single page takes longer to write, on whatever machine


class FileStorage:
    """Pages as files under `root`, in one directory for each namespace.

    `capacity_bytes` bounds the payload of a namespace; `page_bytes` gives nominal sizes for each
    component to charge instead. One process keeps the bound exactly. Each further process that
    writes to the same directory can exceed it by 5%, until it looks at the directory again.
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
        self._writing = self._root / "writing"
        self._owner = current_owner()
        self._names = count()
        self._lock = Lock()
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # oldest first, with charged bytes
        self._used_bytes = 0
        self._unscanned_bytes = 0
        self._evicted_pages = 0
        self._read_bytes = 0
        self._written_bytes = 0
        self._damaged_pages = 0
        try:
            self._writing.mkdir(parents=True, exist_ok=True)
            for first in range(256):
                (self._root / f"{first:02x}").mkdir(exist_ok=True)
            self._sweep()
            self._scan()
        except OSError as error:
            raise StorageError(f"cannot keep pages in {self._root}: {error}") from error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a file now."""
        return [self._path(key).exists() for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers straight from the files."""
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store pages; False for a page larger than the capacity, or where the disk is full."""
        return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget pages; missing ones are ignored."""
        with self._lock:
            for key in keys:
                self._remove(key)

    def stats(self) -> StorageStats:
        """Counts so far. Scans the directory: what is stored is of all processes."""
        with self._lock:
            self._scan()
            return StorageStats(
                stored_pages=len(self._pages),
                stored_bytes=self._used_bytes,
                evicted_pages=self._evicted_pages,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                damaged_pages=self._damaged_pages,
            )

    def close(self) -> None:
        """Nothing is held open; pages stay."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + _SUFFIX)

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        path = self._path(key)
        # one byte more than the digest, so that a longer file is noticed without asking its size
        trailer = bytearray(PAGE_DIGEST_BYTES + 1)
        try:
            with path.open("rb", buffering=0) as file:
                length = _read_all(file.fileno(), buffer, memoryview(trailer))
                if self._capacity_bytes is not None:
                    os.utime(file.fileno())
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO):
                return False
            raise StorageError(f"cannot read {path}: {error}") from error
        if length != buffer.nbytes + PAGE_DIGEST_BYTES:
            whole = self._is_whole(key, path)
            right = False
        else:
            digest = page_digest(self._namespace, key, buffer)
            right = whole = digest == trailer[:PAGE_DIGEST_BYTES]
        with self._lock:
            if not whole:
                # or it would stay: a write keeps what is there
                self._damaged_pages += 1
                self._remove(key)
            if right:
                self._refresh(key)
                self._read_bytes += buffer.nbytes
        return right

    def _is_whole(self, key: bytes, path: Path) -> bool:
        """Whether a file of unexpected length is a page, only of that length."""
        content = memoryview(path.read_bytes())
        payload, digest = content[:-PAGE_DIGEST_BYTES], content[-PAGE_DIGEST_BYTES:]
        return page_digest(self._namespace, key, payload) == digest

    def _write(self, key: bytes, buffer: memoryview) -> bool:
        path = self._path(key)
        if path.exists():
            if self._capacity_bytes is not None:
                with self._lock:
                    self._refresh(key)
                _touch(path)
            return True
        charged_bytes = self._charged_bytes(key, buffer.nbytes)
        with self._lock:
            if not self._make_room(charged_bytes):
                return False
            # charged before it is there, so that threads writing at once keep the bound too
            self._used_bytes += charged_bytes
            self._unscanned_bytes += charged_bytes
        written = False
        try:
            written = self._publish(key, path, buffer)
        finally:
            with self._lock:
                if written and key not in self._pages:
                    self._pages[key] = charged_bytes
                    self._written_bytes += buffer.nbytes
                else:
                    self._used_bytes -= charged_bytes
        return written

    def _publish(self, key: bytes, path: Path, buffer: memoryview) -> bool:
        draft = self._writing / f"{self._owner}.{next(self._names)}"
        digest = page_digest(self._namespace, key, buffer)
        try:
            with draft.open("xb", buffering=0) as file:
                _write_all(file.fileno(), buffer, memoryview(digest))
            # may replace what another process has just published: the same page by contract
            draft.rename(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            raise StorageError(f"cannot write {path}: {error}") from error
        return True

    def _charged_bytes(self, key: bytes, payload_bytes: int) -> int:
        return self._page_bytes.get(key[-1], payload_bytes)

    def _refresh(self, key: bytes) -> None:
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
                return False  # all the room is taken by pages that are being written
            self._remove(next(iter(self._pages)))
            self._evicted_pages += 1
        return True

    def _remove(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)
        self._used_bytes -= self._pages.pop(key, 0)

    def _scan(self) -> None:
        """Look at all files: other processes add and remove pages, and refresh them."""
        writing_bytes = self._used_bytes - sum(self._pages.values())
        order = {key: place for place, key in enumerate(self._pages)}
        found = []
        for path in self._root.glob(f"[0-9a-f][0-9a-f]/*{_SUFFIX}"):
            try:
                status = path.stat()
                key = bytes.fromhex(path.stem)
            except (FileNotFoundError, ValueError):
                continue  # evicted by another process, or not of ours
            if len(key) == KEY_BYTES:
                size_bytes = max(status.st_size - PAGE_DIGEST_BYTES, 0)
                # file systems tell times apart by some milliseconds only
                age = (status.st_mtime_ns, order.get(key, len(order)))
                found.append((age, key, self._charged_bytes(key, size_bytes)))
        self._pages = OrderedDict((key, size_bytes) for _, key, size_bytes in sorted(found))
        self._used_bytes = writing_bytes + sum(self._pages.values())
        self._unscanned_bytes = 0

    def _sweep(self) -> None:
        """Remove what writers that died left behind."""
        for draft in self._writing.iterdir():
            owner = parse_owner(draft.name.rpartition(".")[0])
            try:
                if owner is not None and is_this_boot(owner):
                    abandoned = not is_alive(owner)
                else:
                    # perhaps another machine's, whose processes cannot be seen from here
                    abandoned = time.time() - draft.stat().st_mtime > _FOREIGN_LEFTOVER_S
                if abandoned:
                    draft.unlink()
            except FileNotFoundError:
                continue


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except FileNotFoundError:
        return  # evicted meanwhile


def _read_all(file: int, buffer: memoryview, trailer: memoryview) -> int:
    """Fill both from the start of the file, as far as it goes; the number of bytes read."""
    done = 0
    wanted = buffer.nbytes + trailer.nbytes
    while done < wanted:
        got = os.preadv(file, [buffer[done:], trailer[max(done - buffer.nbytes, 0) :]], done)
        if got == 0:
            break
        done += got
    return done


def _write_all(file: int, buffer: memoryview, trailer: memoryview) -> None:
    done = 0
    wanted = buffer.nbytes + trailer.nbytes
    while done < wanted:
        done += os.pwritev(file, [buffer[done:], trailer[max(done - buffer.nbytes, 0) :]], done)
