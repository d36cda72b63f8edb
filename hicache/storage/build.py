"""The engine that a configuration asks for."""

from collections.abc import Mapping
from pathlib import Path

from hicache.config import StorageConfig
from hicache.storage.base import Storage
from hicache.storage.file import FileStorage
from hicache.storage.memory import MemoryStorage
from hicache.storage.slab import SlabStorage

KINDS = ("none", "memory", "slab", "file")


def open_storage(
    config: StorageConfig, *, namespace: str, page_bytes: Mapping[int, int]
) -> Storage | None:
    """Open the engine of `config.kind`, or none.

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
        case unknown:
            raise ValueError(f"storage.kind must be one of {', '.join(KINDS)}, got {unknown!r}")


def _root(config: StorageConfig) -> str:
    if config.root is None:
        raise ValueError(f"storage.root must be given when storage.kind is {config.kind}, got none")
    return config.root
