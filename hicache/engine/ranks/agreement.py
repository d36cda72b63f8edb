"""Agreement: how the ranks of an engine keep equal trees.

Each rank has a part of every page and its own storage. Ranks decide alike as long as they know the
same. Some facts only one rank knows: what its storage holds, how far its reads and copies are, and
whether its clock has passed a prefetch deadline. Each rank offers these facts, and all ranks use
the element-wise MIN of the offers:

- a query offers the prefix lengths that this rank could restore (`offer`, `taken`);
- a read offers the pages read so far, batch by batch, and whether window and state were read;
- once per step, `RankAgreement.pack` offers how many of these results have arrived here, a vote on
  every prefetch, and a digest of the tree with its negation.

Queries and reads are agreed in the background, each on its own channel. A rank acts only on results
that have reached every rank by the step's own agreement. Hence law 8: equal trees after every step.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Sequence as Items
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple, get_args

from hicache.cache.pages import PageAllocator, PageIds
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import Reported
from hicache.cache.tree.node import TIERS, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import HitAgreement

COPIES = get_args(Reported)  # by type, in the order of their counts in an offer
NUM_COUNTS = 2 + len(COPIES)
DIGEST_BITS = 62  # of a signed 64-bit element, which must also hold the negation


class RanksDivergedError(RuntimeError):
    """Raised when the radix trees of two tensor-parallel ranks differ.

    The ranks would then make different decisions, and wait for each other forever.
    """


def offer(lengths: Items[int], num_pages: int, rule: HitAgreement) -> list[int]:
    """Return the vector by which a rank tells the others which prefixes its storage can restore.

    `lengths` are the lengths in pages, from 1 to `num_pages`, of these prefixes. The vector has
    `num_pages` elements: 1 at the index `length - 1` for each length, otherwise 0. With the rule
    `min_of_maxima`, the vector has only one element: the longest length, or 0.
    """
    if rule is HitAgreement.min_of_maxima:
        return [max(lengths, default=0)]
    offered = [0] * num_pages
    for length in lengths:
        offered[length - 1] = 1
    return offered


def taken(minimum: Items[int], rule: HitAgreement) -> list[int]:
    """Return the lengths in pages, ascending, of the prefixes that all ranks can restore.

    `minimum` is the element-wise minimum of the vectors of all ranks. Its element i is 1 if the
    storage of every rank can restore the first i + 1 pages. With the rule `min_of_maxima`, its only
    element is the agreed length, or 0.
    """
    if rule is HitAgreement.min_of_maxima:
        return [length for length in minimum if length]
    return [index + 1 for index, is_common in enumerate(minimum) if is_common]


def minimum_of(offers: Items[Items[int]]) -> list[int]:
    """Return the element-wise minimum of the vectors of several ranks in one process.

    Raises:
        RanksDivergedError: the vectors have different lengths.
    """
    if len({len(each) for each in offers}) != 1:
        raise RanksDivergedError(
            f"the ranks sent vectors of different lengths: {[len(each) for each in offers]}"
        )
    if all(each == offers[0] for each in offers):  # the common case
        return list(offers[0])
    return [min(column) for column in zip(*offers, strict=True)]


class ReadProgress(NamedTuple):
    """A fact about one prefetch from storage that all tensor-parallel ranks have agreed on.

    The fact is either storage's answer or the progress of the read. For an answer, `restorable`
    holds the prefix lengths in pages that every rank can restore. For progress, `restorable` is
    None.
    """

    prefetch: Prefetch
    restorable: list[int] | None = None  # result of a query
    leading_pages: int = 0  # query: full pages that every rank's storage has without a gap
    completed_pages: int = 0  # read: pages so far
    restored_pages: int = 0  # 0 unless every rank has read the same window and state
    is_read: bool = False  # the last result of a read
    read_ns: tuple[int, int] | None = None  # start and end of this rank's read


class RankAgreement:
    """Lets one tensor-parallel rank agree with the other ranks, once per step, on finished work.

    The work is storage queries, storage reads, and copies between device and host. A rank applies a
    result only when the result has reached all ranks. So all ranks keep equal radix trees.
    """

    def __init__(
        self, cache: PrefixCache, prefetcher: Prefetcher, *, whole_digest_every: int
    ) -> None:
        """Create the agreement of the rank that owns `cache` and `prefetcher`.

        Every `whole_digest_every` steps, the ranks compare hashes of their whole radix trees. The
        time of a comparison grows with the number of nodes.
        """
        # two threads may append to these, each in the order in which the ranks agreed; which of
        # the two is ahead differs between ranks, so they are counted separately
        self.answers: deque[ReadProgress] = deque()  # results of queries
        self.progress: deque[ReadProgress] = deque()  # results of reads
        self.num_steps = 0
        self._cache = cache
        self._prefetcher = prefetcher
        self._whole_digest_every = whole_digest_every
        self._copies: dict[type, deque[Reported]] = {kind: deque() for kind in COPIES}
        self._copied: set[Reported] = set()
        self._ballot: dict[int, bool] = {}  # the last votes
        prefetcher.verdicts = {}

    def submitted(self, copy: Reported) -> None:
        self._copies[type(copy)].append(copy)

    def copied(self, copy: Reported) -> None:
        self._copied.add(copy)

    def has_copied(self, kind: type) -> bool:
        copies = self._copies[kind]
        return bool(copies) and copies[0] in self._copied

    def ballot(self, now_ns: int) -> dict[int, bool]:
        prefetcher = self._prefetcher
        return {
            each.request_id: prefetcher.can_terminate_prefetch(each, now_ns)
            for each in prefetcher.active.values()
            if not each.is_settled
        }

    def pack(self, now_ns: int) -> list[int]:
        """Return this rank's vector for the current step.

        All ranks then use the element-wise minimum of their vectors. The vector holds, in this
        order:

        - the number of storage answers, of read results, and of finished copies of each type;
        - a number for each unfinished prefetch: 1 if its request may stop waiting, otherwise 0;
        - a hash of the radix tree and its negative, whose minima show whether all hashes are equal.
        """
        counts = [len(self.answers), len(self.progress)]
        for copies in self._copies.values():
            counts.append(len(list(takewhile(self._copied.__contains__, copies))))
        self._ballot = self.ballot(now_ns)
        digest = traffic_digest(self._cache)
        if self.num_steps % self._whole_digest_every == 0:
            digest ^= tree_digest(self._cache.tree)
        self.num_steps += 1
        return [*counts, *map(int, self._ballot.values()), digest, -digest]

    def apply(self, minimum: Items[int], now_ns: int) -> None:
        """Apply what all ranks have agreed on.

        `minimum` is the element-wise minimum of the vectors of all ranks for this step.

        Raises:
            RanksDivergedError: the radix trees of the ranks differ.
        """
        if minimum[-2] != -minimum[-1]:
            raise RanksDivergedError(f"the ranks' trees differ after step {self.num_steps - 1}")
        num_answers, num_progress, *num_copied = minimum[:NUM_COUNTS]
        for copies, count in zip(self._copies.values(), num_copied, strict=True):
            for _ in range(count):
                copy = copies.popleft()
                self._copied.remove(copy)
                self._cache.complete(copy)
        if self._prefetcher.policy.waits:
            votes = map(bool, minimum[NUM_COUNTS:-2])
            self._prefetcher.verdicts = dict(zip(self._ballot, votes, strict=True))
        for _ in range(num_answers):
            self._land(self.answers.popleft(), now_ns)
        for _ in range(num_progress):
            self._land(self.progress.popleft(), now_ns)

    def _land(self, progress: ReadProgress, now_ns: int) -> None:
        prefetch = progress.prefetch
        if progress.restorable is not None:
            prefetch.restorable = progress.restorable
            prefetch.leading_pages = progress.leading_pages
            self._prefetcher.on_queried(prefetch, now_ns)
            return
        if not prefetch.is_settled:
            prefetch.completed_pages = progress.completed_pages
        if progress.is_read:
            prefetch.restored_pages = progress.restored_pages
            prefetch.read_ns = progress.read_ns
            prefetch.is_read = True
            self._prefetcher.on_read(prefetch)


class TracedAllocator(PageAllocator):
    """A page allocator that keeps a checksum of all ids that it has allocated or freed.

    The checksum is `traffic`. The ranks of an engine must make equal caching decisions. Different
    checksums show that their decisions differ.
    """

    def __init__(self, capacity: int | None, *, is_checked: bool = True) -> None:
        super().__init__(capacity, is_checked=is_checked)
        self.traffic = 0

    def allocate(self, count: int) -> PageIds | None:
        page_ids = super().allocate(count)
        self.traffic = zlib.crc32(b"-" if page_ids is None else packed(page_ids), self.traffic)
        return page_ids

    def free(self, page_ids: PageIds) -> None:
        super().free(page_ids)
        self.traffic = zlib.crc32(packed(page_ids), self.traffic ^ 1)


def packed(page_ids: PageIds) -> bytes:
    return array("i", page_ids).tobytes()


def traffic_digest(cache: PrefixCache) -> int:
    """Return a hash of the cache's page allocations and node counts so far, in constant time.

    Two ranks that did the same cache operations have the same hash.
    """
    tree = cache.tree
    traffic = [
        each.traffic for pools in cache.pools for each in pools if isinstance(each, TracedAllocator)
    ]
    held = tree.residency
    state = repr((traffic, tree.num_nodes, held.resident, held.protected))
    return _digest(blake2b(state.encode(), digest_size=8).digest())


def tree_digest(tree: RadixTree) -> int:
    """Return a hash of all contents of a radix tree: tokens, page ids on each tier, and locks.

    The time grows with the number of nodes and tokens.
    """
    hasher = blake2b(repr(sorted(tree.roots)).encode(), digest_size=8)
    stack: list[Node] = [tree.roots[namespace] for namespace in sorted(tree.roots)]
    while stack:
        node = stack.pop()
        hasher.update(node.edge)
        locks = (node.path_locks, node.locks)
        hasher.update(repr((node.start, locks, node.uses)).encode())
        for tier in TIERS:
            for page_ids in node.held[tier]:
                hasher.update(b"-" if page_ids is None else packed(page_ids))
        stack += [node.children[first] for first in sorted(node.children)]
    return _digest(hasher.digest())


def _digest(raw: bytes) -> int:
    return int.from_bytes(raw, "little") >> (64 - DIGEST_BITS)
