"""What pages are called in the tree and in storage.

In a real store a page's digest stands for its tokens and every token before them, and each chain
starts from the namespace: equal tokens of two adapters or tenants never share a page. A simulated
run knows all its pages beforehand, and calls each by a number.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, cast

import numpy as np

from hicache.cache.kinds import KEY_TAGS, KIND_NAMES
from hicache.cache.tree.node import Node
from hicache.cache.tree.sequence import Sequence
from hicache.request import EMPTY_SPANS, TOKEN_BYTES, Request, TokenSpans
from hicache.storage.base import DIGEST_BYTES

NUMBER_BYTES = 4
KIND_BITS = 3
MAX_KIND = (1 << KIND_BITS) - 1
# of a page: its name, and with its kind its key in storage. A digest gets the kind's tag, a number
# has `KIND_BITS` left for it
Key = bytes | int


class PageNames(Protocol):
    """Names of pages, equal where all tokens up to a page's end are.

    `page_bytes`: what one page is in a node's edge and in a sequence's tokens.
    """

    page_bytes: int

    def tokens(self, request: Request) -> bytes:
        """Prompt and answer as the tree takes them."""
        ...

    def of_node(self, node: Node, start: int = 0) -> Items[Key]:
        """The names of a node's pages, from its `start`-th on."""
        ...

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> Items[Key]:
        """The names of the pages of a sequence that follow those up to the anchor."""
        ...

    def content(self, name: Key) -> int:
        """A number for the tokens up to the end of the page of this name, equal where they are."""
        ...


class Digests:
    """Pages called by the chained digests of their tokens."""

    def __init__(self, page_size: int, pages: Mapping[int, TokenSpans] | None = None) -> None:
        """`pages`: as of `Numbers`, whose content numbers these pages then have as well."""
        self.page_bytes = page_size * TOKEN_BYTES
        self._pages = pages
        self._numbers: dict[bytes, int] = {}  # by digest, of the requests so far

    def tokens(self, request: Request) -> bytes:
        """The ids themselves."""
        tokens = request.prompt.to_bytes() + request.output.to_bytes()
        if self._pages is not None:
            digests = page_digests(chain_seed(request.namespace), tokens, self.page_bytes)
            numbers = np.frombuffer(self._pages[request.id].to_bytes(), "<i4").tolist()
            self._numbers.update(zip(digests, numbers, strict=True))
        return tokens

    def of_node(self, node: Node, start: int = 0) -> list[bytes]:
        """The digests, computed once. O(pages not hashed yet on its path)."""
        return digests_of(node)[start:]

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> list[bytes]:
        """The digests, which the nodes that grow of them take over."""
        first, end = (pages * self.page_bytes for pages in (anchor.end, anchor.end + num_pages))
        digests = page_digests(last_digest(anchor), sequence.tokens[first:end], self.page_bytes)
        sequence.digests, sequence.digests_start = digests, anchor.end
        return digests

    def content(self, name: Key) -> int:
        """The number of the page in the workload; of its digest, where no workload is known."""
        return self._numbers.get(cast(bytes, name), int.from_bytes(cast(bytes, name), "little"))


class Numbers:
    """Pages called by their numbers in a workload, shifted by `KIND_BITS`."""

    page_bytes = NUMBER_BYTES

    def __init__(self, pages: Mapping[int, TokenSpans]) -> None:
        """`pages`: of each request, by its id, the numbers of its whole pages."""
        spans = list(pages.values()) or [EMPTY_SPANS]
        counts = np.concatenate([each.counts for each in spans])
        ends = counts.cumsum(dtype=np.int32)
        firsts = np.concatenate([each.starts for each in spans]) - ends + counts
        numbers = firsts.repeat(counts) + np.arange(len(firsts) and ends[-1], dtype=np.int32)
        if numbers.max(initial=0) >> (31 - KIND_BITS):
            raise ValueError(f"a workload may have {1 << (31 - KIND_BITS)} pages at most")
        self._names: bytes = (numbers << KIND_BITS).tobytes()
        bounds = np.append(0, NUMBER_BYTES * ends)[np.cumsum([0, *(len(s.starts) for s in spans)])]
        self._places = dict(zip(pages, pairwise(bounds.tolist()), strict=False))

    def tokens(self, request: Request) -> bytes:
        """The names of its pages."""
        first, end = self._places[request.id]
        return self._names[first:end]

    def of_node(self, node: Node, start: int = 0) -> list[int]:
        """The names in its edge."""
        return memoryview(node.edge).cast("i")[start:].tolist()

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> list[int]:
        """The names among its tokens."""
        return memoryview(sequence.tokens).cast("i")[anchor.end : anchor.end + num_pages].tolist()

    def content(self, name: Key) -> int:
        """The number of the page."""
        return int(name) >> KIND_BITS


def chain_seed(namespace: str) -> bytes:
    """The digest that stands before the first page of a namespace."""
    return hashlib.sha256(b"hicache-1\0" + namespace.encode()).digest()[:DIGEST_BYTES]


def make_root(namespace: str, num_kinds: int = len(KIND_NAMES)) -> Node:
    """Where a namespace begins."""
    root = Node(None, b"", 0, 0, num_kinds)
    root.seed = chain_seed(namespace)
    return root


@lru_cache(maxsize=16)  # the simulated ranks of an engine ask for the same one after the other
def page_digests(seed: bytes, tokens: bytes, page_bytes: int) -> list[bytes]:
    """The digests of the whole pages of `tokens`, each chained to the one before it; not to change.

    Truncated SHA-256: 128 bits make an accidental collision in 2**40 pages a 2**-49 event.
    """
    sha256 = hashlib.sha256
    digests = []
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        seed = sha256(seed + tokens[start : start + page_bytes]).digest()[:DIGEST_BYTES]
        digests.append(seed)
    return digests


def digests_of(node: Node) -> list[bytes]:
    """The digest of each page of a node, computed once. O(pages not hashed yet on its path)."""
    pending = []
    above = node
    while above.digests is None and above.parent is not None:
        pending.append(above)
        above = above.parent
    seed = above.seed if above.digests is None else above.digests[-1]
    assert seed is not None
    for below in reversed(pending):
        below.digests = page_digests(seed, below.edge, len(below.edge) // below.num_pages)
        seed = below.digests[-1]
    return node.digests or []


def last_digest(node: Node) -> bytes:
    """What the digest of the next page is chained to."""
    if node.parent is None:
        assert node.seed is not None
        return node.seed
    return digests_of(node)[-1]


def keys(names: Items[Key], kind: int) -> Items[Key]:
    """The storage keys of pages of these names, of one kind."""
    if names and isinstance(names[0], int):
        return [name + kind for name in cast(Items[int], names)] if kind else names
    tag = KEY_TAGS[kind : kind + 1]
    return [name + tag for name in cast(Items[bytes], names)]


def kinds_of(keys: Items[Key]) -> list[int]:
    """The kind of each key."""
    if keys and isinstance(keys[0], int):
        return [key & MAX_KIND for key in cast(Items[int], keys)]
    return [KEY_TAGS.index(key[-1:]) for key in cast(Items[bytes], keys)]


def key_bytes(keys: Items[Key]) -> list[bytes]:
    """Keys as real stores take them, `KEY_BYTES` each."""
    return [key if isinstance(key, bytes) else _number_key(key) for key in keys]


def _number_key(key: int) -> bytes:
    tag = key & MAX_KIND
    return (key >> KIND_BITS).to_bytes(DIGEST_BYTES, "little") + KEY_TAGS[tag : tag + 1]
