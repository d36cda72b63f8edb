"""Prefetches and storage writes as executors get them."""

from typing import Any

import numpy as np

from hicache.cache.kinds import KEY_TAGS, MAMBA, SWA, Window
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.node import HOST, Lock, Node
from hicache.cache.tree.sequence import Sequence

NAMES = [bytes([number]) * 16 for number in range(8)]


def key(number: int, kind: int = 0) -> bytes:
    return NAMES[number] + KEY_TAGS[kind : kind + 1]


def prefetch_of(
    num_pages: int, *, windows: int = 0, has_state: bool = False, first: int = 0, **more: Any
) -> Prefetch:
    """A prefetch of pages into host pages from `first` on, with a window of `windows` pages."""
    root = Node(None, b"", 0, 0)
    counts = num_pages, min(windows, num_pages), int(has_state)
    return Prefetch(
        request_id=0,
        sequence=Sequence(b""),
        anchor=root,
        anchor_lock=Lock(HOST, root, []),
        start_page=0,
        asked_pages=num_pages,
        num_pages=num_pages,
        names=NAMES[:num_pages],
        enqueued_ns=0,
        needs=((SWA, Window(windows)),) * (windows > 0) + ((MAMBA, Window(1)),) * has_state,
        staged=[np.arange(first, first + count, dtype=np.int32) for count in counts],
        **more,
    )


def write_of(*pages: tuple[int, int], num_bytes: int = 0, **more: Any) -> StorageWrite:
    """A storage write of `pages`, each a pair of its kind and the number of its host page."""
    return StorageWrite(
        keys=[key(number, kind) for kind, number in pages],
        parts=[(kind, [number]) for kind, number in pages],
        num_bytes=num_bytes,
        host_locks=[],
        **more,
    )
