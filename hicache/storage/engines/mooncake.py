"""Pages in a Mooncake Store: the memory of many machines, under one master.

Measurements with version 0.3.13 over TCP shape this adapter. After the master dies, every call
blocks for 4.3 s, so all calls go through a thread with a deadline. After a node dies, the store
reports its pages as existing for 9 s more. The store does not transfer a page whose key exists.
Keys are lost when the master restarts. The store authenticates no client, and clients listen on all
interfaces: use it in trusted networks only.
"""

import ctypes
import importlib
import mmap
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from threading import Lock

from hicache.storage.base import StorageError, StorageStats
from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest
from hicache.storage.engines.parts import parts
from hicache.storage.guards.deadline import DeadlineThreads

_RPC_FAILED = -900  # the master does not answer; every other code concerns a single page
_SETUP_S = 30.0
_CLOSE_S = 10.0  # measured: 0.5 to 2 s
_CLIENT_BYTES = 16 * 2**20  # the store's own buffer; calls on registered memory do not use it


class MooncakeStorage:
    """A storage engine that keeps pages in a Mooncake Store, a pool of many machines' memory.

    `master` is the HOST:PORT of the store's master. This process lends `segment_bytes` of its
    memory to the store until `close`; 0 lends none. Pages are copied through a staging buffer that
    is registered with Mooncake's transfer engine. So a call that is abandoned at its deadline never
    touches the caller's buffers. The engine runs one call at a time.
    """

    def __init__(
        self,
        master: str,
        *,
        namespace: str,
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
        staging_bytes: int = 64 * 2**20,
        deadline_s: float = 2.0,
    ) -> None:
        try:
            # needs the system libraries libibverbs1, libnuma1 and libcurl4
            store = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise StorageError(
                f"storage.kind=mooncake needs the Mooncake package ({error}): pip install -e "
                "'.[mooncake-cpu]', or '.[mooncake]' on a machine with a GPU"
            ) from error
        _reach(master, timeout_s=deadline_s)
        self._namespace = namespace.encode()
        self._prefix = namespace_name(namespace)
        self._master = master
        self._lock = Lock()  # held while staging memory is in use
        self._staging = memoryview(mmap.mmap(-1, staging_bytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
        self._stats = StorageStats()
        self._threads = DeadlineThreads(num_threads=1, deadline_s=deadline_s)
        self._store = store.MooncakeDistributedStore()  # its return codes below 0 are errors
        try:
            self._threads.call(lambda: self._set_up(host, segment_bytes), deadline_s=_SETUP_S)
        except StorageError:
            self._threads.close()
            raise

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        names = self._names(keys)
        with self._lock:
            answers = self._threads.call(lambda: self._store.batch_is_exist(names))
        return [code == 1 for code in self._checked(answers)]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        results: list[bool] = []
        for part, places in self._parts(buffers):
            with self._lock:
                answers = self._batch(self._store.batch_get_into, keys[part], places)
                for key, buffer, place, got in zip(
                    keys[part], buffers[part], places, answers, strict=True
                ):
                    whole = got == place.stop - place.start
                    results.append(whole and self._unpack(key, place, buffer))
        return results

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        results: list[bool] = []
        for part, places in self._parts(buffers):
            with self._lock:
                # an abandoned call may still use staging memory
                self._threads.call(lambda: None)
                for key, buffer, place in zip(keys[part], buffers[part], places, strict=True):
                    end = place.stop - PAGE_DIGEST_BYTES
                    self._staging[place.start : end] = buffer
                    self._staging[end : place.stop] = page_digest(self._namespace, key, buffer)
                answers = self._batch(self._store.batch_put_from, keys[part], places)
                results += [code == 0 for code in answers]
        return results

    def delete(self, keys: Sequence[bytes]) -> None:
        names = self._names(keys)
        with self._lock:
            self._threads.call(lambda: [self._store.remove(name, force=True) for name in names])

    def forget_all(self) -> None:
        with self._lock:
            code = self._threads.call(
                lambda: self._store.remove_by_regex(f"^{self._prefix}/", True)  # noqa: FBT003
            )
        self._checked([code])

    def stats(self) -> StorageStats:
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        try:
            self._threads.call(self._store.close, deadline_s=_CLOSE_S)
        finally:
            self._threads.close()

    def _set_up(self, host: str, segment_bytes: int) -> None:
        code = self._store.setup(
            host, "P2PHANDSHAKE", segment_bytes, _CLIENT_BYTES, "tcp", "", self._master
        )
        if code:
            raise StorageError(
                f"cannot connect to the Mooncake master at {self._master}: error code {code}"
            )
        code = self._store.register_buffer(self._address, self._staging.nbytes)
        if code:
            raise StorageError(
                f"Mooncake refused a staging buffer of {self._staging.nbytes} bytes: error code "
                f"{code}"
            )

    def _batch(
        self,
        call: Callable[[list[str], list[int], list[int]], list[int]],
        keys: Sequence[bytes],
        places: Sequence[slice],
    ) -> list[int]:
        names = self._names(keys)
        pointers = [self._address + place.start for place in places]
        sizes = [place.stop - place.start for place in places]
        return self._checked(self._threads.call(lambda: call(names, pointers, sizes)))

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._prefix}/{key.hex()}" for key in keys]

    def _parts(self, buffers: Sequence[memoryview]) -> Iterator[tuple[slice, list[slice]]]:
        # parts that fit staging memory, each with the places of its pages there
        sizes = [buffer.nbytes + PAGE_DIGEST_BYTES for buffer in buffers]
        for part in parts(sizes, self._staging.nbytes):
            ends = list(accumulate(sizes[part], initial=0))
            if ends[-1] > self._staging.nbytes:
                raise ValueError(
                    f"a page of {buffers[part][0].nbytes} bytes and its digest do not fit the "
                    f"staging buffer of {self._staging.nbytes} bytes"
                )
            yield part, [slice(start, end) for start, end in pairwise(ends)]

    def _unpack(self, key: bytes, place: slice, buffer: memoryview) -> bool:
        end = place.stop - PAGE_DIGEST_BYTES
        payload = self._staging[place.start : end]
        if page_digest(self._namespace, key, payload) != self._staging[end : place.stop]:
            self._stats.damaged_pages += 1
            return False
        buffer[:] = payload
        return True

    def _checked(self, codes: list[int]) -> list[int]:
        if _RPC_FAILED in codes:
            raise StorageError(f"the Mooncake master at {self._master} does not answer")
        return codes


def _reach(master: str, *, timeout_s: float) -> None:
    # checked early, because the store's own setup takes 90 s to fail
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the address of a Mooncake master must be HOST:PORT, got {master!r}")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        raise StorageError(f"cannot connect to a Mooncake master at {master}: {error}") from error
