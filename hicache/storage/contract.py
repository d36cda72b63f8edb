"""What every storage engine must do: one function per rule, for `hicache check-storage` and tests.

A rule gets a function that opens a new, empty store, and again the same one. It raises
`ContractError` if the engine breaks the rule. Each page holds bytes that follow from its key, so a
wrong byte is noticed in any thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import shake_128
from typing import Protocol

from hicache.storage.base import Storage, StorageStats

PAGE_BYTES = 8192
NUM_KEYS = 300  # the keys of all rules, of kinds 0 and 1


class ContractError(ValueError):
    """Raised when a storage engine breaks a rule of `hicache.storage.base.Storage`."""


class Open(Protocol):
    """Opens the store of one rule, or another one with its own `suffix`."""

    def __call__(self, *, suffix: str = "", capacity_bytes: int | None = None) -> Storage: ...


def key(number: int, kind: int = 0) -> bytes:
    return number.to_bytes(16, "big") + bytes([kind])


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(page_key: bytes, num_bytes: int = PAGE_BYTES) -> memoryview:
    return memoryview(shake_128(page_key).digest(num_bytes))


def poisoned(num_bytes: int = PAGE_BYTES) -> memoryview:
    return memoryview(bytearray(b"\xdb" * num_bytes))


def write(storage: Storage, page_keys: Sequence[bytes], num_bytes: int = PAGE_BYTES) -> list[bool]:
    buffers = [payload(page_key, num_bytes) for page_key in page_keys]
    return _flags("write", storage.write(page_keys, buffers), page_keys)


def read(
    storage: Storage, page_keys: Sequence[bytes], num_bytes: int = PAGE_BYTES
) -> list[memoryview | None]:
    """Read pages; return None for each miss."""
    buffers = [poisoned(num_bytes) for _ in page_keys]
    found = _flags("read", storage.read(page_keys, buffers), page_keys)
    return [buffer if hit else None for buffer, hit in zip(buffers, found, strict=True)]


def contains(storage: Storage, page_keys: Sequence[bytes]) -> list[bool]:
    return _flags("contains", storage.contains(page_keys), page_keys)


def num_whole(storage: Storage, page_keys: Sequence[bytes], num_bytes: int = PAGE_BYTES) -> int:
    """Read pages, and return the number of hits.

    Raises:
        ContractError: a page was read with other bytes than its own.
    """
    pages = read(storage, page_keys, num_bytes)
    for page_key, page in zip(page_keys, pages, strict=True):
        if page is not None and page != payload(page_key, num_bytes):
            raise ContractError(f"read returned True with wrong bytes for key {page_key.hex()}")
    return sum(page is not None for page in pages)


def _flags(call: str, answer: list[bool], page_keys: Sequence[bytes]) -> list[bool]:
    if not isinstance(answer, list) or [type(each) for each in answer] != [bool] * len(page_keys):
        raise ContractError(f"{call} of {len(page_keys)} keys returned {answer!r:.80}")
    return answer


def _expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ContractError(f"{what}: expected {wanted!r:.80}, got {got!r:.80}")


def _expect_pages(storage: Storage, stored: Sequence[bytes], missing: Sequence[bytes] = ()) -> None:
    some = [*missing, *stored]  # one batch
    wanted = [False] * len(missing) + [True] * len(stored)
    _expect("contains", contains(storage, some), wanted)
    _expect("read", [page is not None for page in read(storage, some)], wanted)
    num_whole(storage, some)


def pages_are_read_as_written(open_store: Open) -> None:
    """a page of any length is read as it was written"""
    storage = open_store()
    for number, num_bytes in enumerate((1, 4095, 4096, 300_001)):
        _expect(f"write of {num_bytes} bytes", write(storage, keys(number), num_bytes), [True])
        hits = num_whole(storage, keys(number), num_bytes)
        _expect(f"hits of a read of {num_bytes} bytes", hits, 1)


def buffers_may_change_after_a_write(open_store: Open) -> None:
    """the caller may change a buffer once it is written"""
    storage, buffer = open_store(), poisoned()
    buffer[:] = payload(key(1))
    storage.write(keys(1), [buffer])
    buffer[:] = poisoned()
    _expect_pages(storage, keys(1))


def each_key_has_its_answer(open_store: Open) -> None:
    """each key of a batch has its own answer, and a missing page is no error"""
    storage = open_store()
    write(storage, keys(1, 3))
    _expect_pages(storage, keys(1, 3), missing=keys(0, 2))
    storage.delete([])
    for call in (contains, read, write):
        _expect(f"{call.__name__} of no keys", call(storage, []), [])


def long_batches_are_answered(open_store: Open) -> None:
    """contains answers a batch of 300 keys"""
    storage = open_store()
    write(storage, keys(*range(0, NUM_KEYS, 2)))
    _expect("contains", contains(storage, keys(*range(NUM_KEYS))), [True, False] * (NUM_KEYS // 2))


def kinds_are_separate(open_store: Open) -> None:
    """pages of two kinds are two pages"""
    storage = open_store()
    write(storage, [key(1, 0)])
    _expect_pages(storage, [key(1, 0)], missing=[key(1, 1)])


def other_lengths_are_misses(open_store: Open) -> None:
    """a read into a buffer of another length is a miss, and keeps the page"""
    storage = open_store()
    write(storage, keys(1))
    for num_bytes in (0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES):
        hit = read(storage, keys(1), num_bytes) != [None]
        _expect(f"read of {PAGE_BYTES} bytes into {num_bytes}", hit, wanted=False)
    _expect_pages(storage, keys(1))


def a_second_write_changes_nothing(open_store: Open) -> None:
    """a second write of a key answers True, and the page stays"""
    storage = open_store()
    _expect("write of one key twice", write(storage, keys(1, 1)), [True, True])
    answers = _flags("write", storage.write(keys(1, 2), [payload(key(2))] * 2), keys(1, 2))
    _expect("write of an old and a new key", answers, [True, True])
    _expect_pages(storage, keys(1, 2))


def deleted_pages_are_missing(open_store: Open) -> None:
    """a deleted page is missing until it is written again; deleting a missing page is no error"""
    storage = open_store()
    write(storage, keys(1, 2))
    storage.delete(keys(1, 7))
    _expect_pages(storage, keys(2), missing=keys(1))
    write(storage, keys(1))
    _expect_pages(storage, keys(1, 2))


def namespaces_are_separate(open_store: Open) -> None:
    """a page is missing in another namespace"""
    write(open_store(), keys(1))
    _expect_pages(open_store(suffix="other"), [], missing=keys(1))


def threads_read_no_wrong_byte(open_store: Open) -> None:
    """threads that write, read and delete the same keys, by two openings, read no wrong byte"""
    stores = open_store(), open_store()

    def work(start: int) -> None:
        storage = stores[start % 2]
        for turn in range(12):
            some = keys(*((start * 5 + turn * 3 + i) % 32 for i in range(4)))
            write(storage, some)
            num_whole(storage, some)
            if turn % 4 == start:
                storage.delete(some[:1])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    write(stores[0], keys(*range(32)))
    _expect("hits after all were written", num_whole(stores[0], keys(*range(32))), 32)


def a_full_store_is_no_error(open_store: Open) -> None:
    """a full store refuses or evicts pages, stays within its capacity and reads no wrong byte"""
    capacity_bytes = 10 * PAGE_BYTES
    storage = open_store(capacity_bytes=capacity_bytes)
    for number in range(40):
        write(storage, keys(number))
    num_whole(storage, keys(*range(40)))
    stats: object = storage.stats()
    if not isinstance(stats, StorageStats):
        raise ContractError(f"stats returned {stats!r:.80}, not StorageStats")
    if stats.stored_bytes > capacity_bytes:
        raise ContractError(f"{stats.stored_bytes} bytes are stored, {capacity_bytes} were allowed")


RULES: tuple[Callable[[Open], None], ...] = (
    pages_are_read_as_written, buffers_may_change_after_a_write, each_key_has_its_answer,
    long_batches_are_answered, kinds_are_separate, other_lengths_are_misses,
    a_second_write_changes_nothing, deleted_pages_are_missing, namespaces_are_separate,
    threads_read_no_wrong_byte, a_full_store_is_no_error,
)  # fmt: skip
