"""Names of pages by hash, as in a real store.

A page's name is a hash of its tokens and of all tokens before them. Each chain of hashes starts
from the namespace, so two adapters or tenants never share a page. Where a page is named by tokens
of the next page too (bigrams), the chain has another start, so no plain page has the same name.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Any

import numpy as np

from hicache.cache.tree.node import Node
from hicache.cache.tree.sequence import Sequence
from hicache.request import TOKEN_BYTES, Request, TokenSpans
from hicache.storage.base import DIGEST_BYTES


class Digests:
    """Names each page by a hash of its tokens and of all tokens before them."""

    def __init__(
        self,
        page_size: int,
        pages: Mapping[int, TokenSpans] | None = None,
        overlap: int = 0,
    ) -> None:
        # `pages`: the workload's page numbers by request id, which `contents` then returns
        self.page_size, self.overlap = page_size, overlap
        self.page_bytes = (page_size + overlap) * TOKEN_BYTES
        self._pages = pages
        self._numbers: dict[bytes, int] = {}  # by digest, of the requests so far

    def tokens(self, request: Request) -> bytes:
        tokens = self.of_tokens(request.tokens())
        if self._pages is not None:
            seed = chain_seed(request.namespace, self.overlap)
            digests = page_digests(seed, tokens, self.page_bytes)
            numbers = np.frombuffer(self._pages[request.id].to_bytes(), "<i4").tolist()
            self._numbers.update(zip(digests, numbers, strict=True))
        return tokens

    def of_tokens(self, tokens: bytes) -> bytes:
        """Return the bytes of `tokens` in the tree; with `overlap`, two pages share tokens."""
        if not self.overlap:
            return tokens
        step, end = self.page_size * TOKEN_BYTES, len(tokens) - self.page_bytes + 1
        return b"".join(tokens[first : first + self.page_bytes] for first in range(0, end, step))

    def of_node(self, node: Node, start: int = 0) -> list[bytes]:
        # computed once; O(pages on the node's path without a digest)
        pending, above = [], node
        while above.digests is None and above.parent is not None:
            pending.append(above)
            above = above.parent
        seed = above.digests[-1] if above.digests else chain_seed(above.namespace, self.overlap)
        for below in reversed(pending):
            below.digests = page_digests(seed, below.edge, self.page_bytes)
            seed = below.digests[-1]
        return (node.digests or [])[start:]

    def of_span(self, anchor: Node, sequence: Sequence, num_pages: int) -> list[bytes]:
        first, end = (pages * self.page_bytes for pages in (anchor.end, anchor.end + num_pages))
        above = self.of_node(anchor)[-1:] or [chain_seed(anchor.namespace, self.overlap)]
        digests = page_digests(above[0], sequence.tokens[first:end], self.page_bytes)
        sequence.digests, sequence.digests_start = digests, anchor.end
        return digests

    def contents(self, names: Items[Any]) -> list[int]:
        return [self._numbers.get(name, int.from_bytes(name, "little")) for name in names]


def chain_seed(namespace: str, overlap: int = 0) -> bytes:
    rule = b"hicache-bigrams-1\0" if overlap else b"hicache-1\0"
    return hashlib.sha256(rule + namespace.encode()).digest()[:DIGEST_BYTES]


@lru_cache(maxsize=16)  # simulated ranks ask for the same pages one after the other
def page_digests(seed: bytes, tokens: bytes, page_bytes: int) -> list[bytes]:
    """Return a 16-byte hash for each whole page of `tokens`. The caller must not change the list.

    Each hash covers the tokens of the page and the hash of the page before. `seed` takes the place
    of the hash before the first page.
    """
    # truncated SHA-256: with 128 bits, 2**40 pages collide with probability 2**-49
    sha256 = hashlib.sha256
    digests = []
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        seed = sha256(seed + tokens[start : start + page_bytes]).digest()[:DIGEST_BYTES]
        digests.append(seed)
    return digests
