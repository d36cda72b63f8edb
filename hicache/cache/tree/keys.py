"""Names of pages in the tree, and their keys in storage.

In a real store, a page's name is a hash (`digests.py`). A simulated run knows all its pages
beforehand and numbers them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np

from hicache.cache.kinds import KEY_TAGS
from hicache.cache.tree.node import Node
from hicache.cache.tree.sequence import Sequence
from hicache.request import EMPTY_SPANS, Request, TokenSpans, byte_places
from hicache.storage.base import DIGEST_BYTES

NUMBER_BYTES = 4
# A hash table places integers by their low bits. This constant keeps the keys of two kinds apart:
# their low bits differ by 0x5A5A5, which is not close to a power of two.
KIND_STEP = (1 << 27) + 0x5A5A5
# a page's name, and also its storage key. As a key, a digest gets the kind's tag appended, and a
# number is increased by `KIND_STEP` times the kind
Key = bytes | int


class PageNames(Protocol):
    """Interface of an object that names each page of a prompt, by a number or a hash.

    Two pages have the same name if all tokens up to the ends of the pages are equal, and so many
    more as `overlap` says. The method `tokens` returns the bytes that stand for a request's tokens
    in the tree, `page_bytes` for each page.
    """

    page_bytes: int
    overlap: int

    def tokens(self, request: Request) -> bytes: ...

    def of_node(self, node: Node, start: int = 0) -> Items[Key]: ...

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> Items[Key]:
        """Name the `num_pages` pages of a sequence that follow `anchor`: numbers or hashes."""

    def contents(self, names: Items[Key]) -> list[int]:
        """Return one number per page name; equal numbers mean equal prompt prefixes."""


class Numbers:
    """Names each page of a simulated workload by a number that is fixed before the run.

    `pages` maps each request id to the numbers of the whole pages in the request's tokens, which
    were told apart by `overlap` tokens more.
    """

    page_bytes = NUMBER_BYTES

    def __init__(self, pages: Mapping[int, TokenSpans], overlap: int = 0) -> None:
        self.overlap = overlap
        spans = list(pages.values()) or [EMPTY_SPANS]
        # sums over the workload do not fit in the int32 of the numbers themselves
        counts = np.concatenate([each.counts for each in spans], dtype=np.int64)
        starts = np.concatenate([each.starts for each in spans], dtype=np.int64)
        if (starts + counts).max(initial=0) > KIND_STEP:
            raise ValueError(f"a workload may have {KIND_STEP} pages at most")
        # each number follows the one before it, except at the start of a run
        numbers = np.ones(counts.sum(), np.int32)
        numbers[counts.cumsum() - counts] = (
            np.diff(starts, prepend=0) - np.append(0, counts - 1)[:-1]
        )
        self._names: bytes = numbers.cumsum(dtype=np.int32, out=numbers).tobytes()
        self._places = byte_places(pages, NUMBER_BYTES)

    def tokens(self, request: Request) -> bytes:
        first, end = self._places[request.id]
        return self._names[first:end]

    def of_node(self, node: Node, start: int = 0) -> list[int]:
        return memoryview(node.edge).cast("i")[start:].tolist()

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> list[int]:
        return memoryview(sequence.tokens).cast("i")[anchor.end : anchor.end + num_pages].tolist()

    def contents(self, names: Items[Any]) -> list[int]:
        return list(names)


def keys(names: Items[Key], kind: int) -> Items[Key]:
    pages: Items[Any] = names
    if not names or isinstance(names[0], int):
        return [page + kind * KIND_STEP for page in pages] if kind else names
    tag = KEY_TAGS[kind : kind + 1]
    return [page + tag for page in pages]


def kinds_of(keys: Items[Key]) -> list[int]:
    marked: Items[Any] = keys
    if keys and isinstance(keys[0], int):
        return [key // KIND_STEP for key in marked]
    return [KEY_TAGS.index(key[-1:]) for key in marked]


def key_bytes(keys: Items[Key]) -> list[bytes]:
    return [key if isinstance(key, bytes) else _number_key(key) for key in keys]


def _number_key(key: int) -> bytes:
    kind, number = divmod(key, KIND_STEP)
    return number.to_bytes(DIGEST_BYTES, "little") + KEY_TAGS[kind : kind + 1]
