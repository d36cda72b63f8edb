"""Receipts of locks: what a lock forbids the eviction of, and what its release must undo."""

from typing import NamedTuple

from hicache.cache.node import Node


class Lock(NamedTuple):
    """The receipt of a lock on the device; which covers the path to the node."""

    node: Node
    swa_start: int


class HostLock(NamedTuple):
    """The receipt of a lock on the host: pages `[full_start, node.end)` and their sidecars."""

    node: Node
    full_start: int
    swa_start: int
    with_state: bool
