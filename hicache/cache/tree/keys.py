"""Names of pages: what storage is asked for.

A page's digest stands for every token up to its end, so equal digests mean equal prefixes. The
chain starts from the namespace: equal tokens of two adapters or tenants never share a page.
"""

import hashlib
from functools import lru_cache

from hicache.cache.tree.node import MAMBA, Node
from hicache.storage.base import DIGEST_BYTES

COMPONENT_TAGS = (b"f", b"s", b"m")  # by component number: full, swa, mamba


def chain_seed(namespace: str) -> bytes:
    """The digest that stands before the first page of a namespace."""
    return hashlib.sha256(b"hicache-1\0" + namespace.encode()).digest()[:DIGEST_BYTES]


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


def keys_of(node: Node, kind: int) -> list[bytes]:
    """The storage keys of a node's pages, or of the state after it, of one component."""
    if kind == MAMBA:
        return [last_digest(node) + COMPONENT_TAGS[MAMBA]]
    return [digest + COMPONENT_TAGS[kind] for digest in digests_of(node)]
