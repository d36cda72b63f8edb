"""The engine that a configuration asks for."""

from collections.abc import Mapping
from pathlib import Path

from hicache.clock import Clock
from hicache.config import StorageConfig
from hicache.storage.base import Storage
from hicache.storage.breaker import BreakerStorage
from hicache.storage.deadline import DeadlineStorage
from hicache.storage.file import FileStorage
from hicache.storage.memory import MemoryStorage
from hicache.storage.mooncake import MooncakeStorage
from hicache.storage.redis import RedisStorage
from hicache.storage.slab import SlabStorage

KINDS = ("none", "memory", "slab", "file", "redis", "mooncake")
FILE_DEADLINE_S = 5.0


def open_storage(
    config: StorageConfig, *, namespace: str, page_bytes: Mapping[int, int]
) -> Storage | None:
    """Open the engine of `config.kind`, or none.

    `config.root` is a directory for slab and file, a URL for redis, and the master's HOST:PORT
    for mooncake, where `config.capacity_gib` is the memory that this process adds to the store.
    `page_bytes` gives the size of a page for each component (the last byte of a key); it is what
    pages are charged, also where their payload is a stand-in.

    Raises:
        ValueError: The configuration makes no sense.
        StorageError: The engine cannot be opened or reached.
    """
    capacity_bytes = None if config.capacity_gib is None else int(config.capacity_gib * 2**30)
    match config.kind:
        case "none":
            return None
        case "memory":
            return MemoryStorage(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        case "slab":
            return SlabStorage(
                Path(_root(config)),
                namespace=namespace,
                capacity_bytes=capacity_bytes,
                page_bytes=page_bytes,
            )
        case "file":
            return FileStorage(
                Path(_root(config)),
                namespace=namespace,
                capacity_bytes=capacity_bytes,
                page_bytes=page_bytes,
            )
        case "redis":
            if capacity_bytes is not None:
                raise ValueError(
                    "storage.capacity_gib must be none for redis, whose server is given its own "
                    f"maxmemory, got {config.capacity_gib}"
                )
            return RedisStorage(_root(config), namespace=namespace)
        case "mooncake":
            return MooncakeStorage(
                _root(config), namespace=namespace, segment_bytes=capacity_bytes or 0
            )
        case unknown:
            raise ValueError(f"storage.kind must be one of {', '.join(KINDS)}, got {unknown!r}")


def open_guarded_storage(
    config: StorageConfig, *, namespace: str, page_bytes: Mapping[int, int], clock: Clock
) -> Storage | None:
    """The same engine for use in earnest: its faults are misses, and its calls end in time.

    Redis and Mooncake have deadlines of their own, and the slab is on a local disk. Files may be
    on a network, which can block for ever: their calls are given `FILE_DEADLINE_S`.
    """
    storage = open_storage(config, namespace=namespace, page_bytes=page_bytes)
    if storage is None:
        return None
    if config.kind == "file":
        storage = DeadlineStorage(storage, deadline_s=FILE_DEADLINE_S)
    return BreakerStorage(storage, clock=clock)


def _root(config: StorageConfig) -> str:
    if config.root is None:
        raise ValueError(f"storage.root must be given when storage.kind is {config.kind}, got none")
    return config.root
