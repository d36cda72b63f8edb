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

from collections import deque
from collections.abc import Sequence as Items
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple, get_args

from hicache.cache.pages import TracedAllocator, packed
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import Reported
from hicache.cache.tree.node import TIERS, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import HitAgreement

COPIES = get_args(Reported)  # by type, in the order of their counts in an offer
NUM_COUNTS = 2 + len(COPIES)
VOTE_SLOTS = 64  # votes are padded to multiples of this, so that the length rarely changes
DIGEST_BITS = 62  # of a signed 64-bit element, which must also hold the negation


class RanksDivergedError(RuntimeError):
    """The trees of two ranks differ: their next decisions would too, and both would hang."""


def offer(lengths: Items[int], num_pages: int, rule: HitAgreement) -> list[int]:
    """The offer of a rank that can restore these prefix lengths of a span of `num_pages`.

    A 0/1 vector over the lengths 1 to `num_pages`. Under `min_of_maxima`, only the longest length.
    """
    if rule is HitAgreement.min_of_maxima:
        return [max(lengths, default=0)]
    offered = [0] * num_pages
    for length in lengths:
        offered[length - 1] = 1
    return offered


def taken(minimum: Items[int], rule: HitAgreement) -> list[int]:
    """The prefix lengths that all ranks can restore, ascending; the last one is read."""
    if rule is HitAgreement.min_of_maxima:
        return [length for length in minimum if length]
    return [index + 1 for index, is_common in enumerate(minimum) if is_common]


def minimum_of(offers: Items[Items[int]]) -> list[int]:
    """The element-wise MIN of the offers of several ranks in one process.

    Raises:
        RanksDivergedError: the offers have different lengths.
    """
    if len({len(each) for each in offers}) != 1:
        raise RanksDivergedError(
            f"the ranks sent vectors of different lengths: {[len(each) for each in offers]}"
        )
    if all(each == offers[0] for each in offers):  # the common case
        return list(offers[0])
    return [min(column) for column in zip(*offers, strict=True)]


class ReadProgress(NamedTuple):
    """A result of a query or read that all ranks have agreed on."""

    prefetch: Prefetch
    restorable: list[int] | None = None  # result of a query
    leading_pages: int = 0  # query: full pages that every rank's storage has without a gap
    completed_pages: int = 0  # read: pages so far
    restored_pages: int = 0  # 0 unless every rank has read the same window and state
    is_read: bool = False  # the last result of a read
    read_ns: tuple[int, int] | None = None  # start and end of this rank's read


class RankAgreement:
    """One rank's part in the agreement of each step.

    Invariant: ranks that submitted and applied the same have offer vectors of one shape. Two
    threads may append to `answers` and `progress`, each in the order in which the ranks agreed.
    Which of the two is ahead differs between ranks, so they are counted separately.
    """

    def __init__(
        self, cache: PrefixCache, prefetcher: Prefetcher, *, whole_digest_every: int
    ) -> None:
        """`whole_digest_every`: steps between digests of the whole tree, which cost O(nodes)."""
        self.answers: deque[ReadProgress] = deque()  # results of queries
        self.progress: deque[ReadProgress] = deque()  # results of reads
        self.num_steps = 0
        self._cache = cache
        self._prefetcher = prefetcher
        self._whole_digest_every = whole_digest_every
        self._copies: dict[type, deque[Reported]] = {kind: deque() for kind in COPIES}
        self._copied: set[Reported] = set()
        self._to_abort: set[int] = set()
        self._ballot: dict[int, bool] = {}  # the last votes
        prefetcher.verdicts = {}

    def submitted(self, copy: Reported) -> None:
        self._copies[type(copy)].append(copy)

    def copied(self, copy: Reported) -> None:
        self._copied.add(copy)

    def has_copied(self, kind: type) -> bool:
        copies = self._copies[kind]
        return bool(copies) and copies[0] in self._copied

    def ask_abort(self, request_id: int) -> None:
        self._to_abort.add(request_id)

    def ballot(self, now_ns: int) -> dict[int, bool]:
        prefetcher = self._prefetcher
        return {
            each.request_id: prefetcher.can_terminate_prefetch(each, now_ns)
            for each in prefetcher.active.values()
            if not each.is_settled
        }

    def pack(self, now_ns: int) -> list[int]:
        """This rank's offer for the step.

        The vector is `[queries, reads, copies of each type] + [can stop, 1 − is gone] for each
        undecided prefetch + [digest, −digest]`. A policy that never waits ignores the votes.
        """
        counts = [len(self.answers), len(self.progress)]
        for copies in self._copies.values():
            counts.append(len(list(takewhile(self._copied.__contains__, copies))))
        self._ballot = self.ballot(now_ns)
        votes = []
        for request_id, can_stop in self._ballot.items():
            votes += [int(can_stop), 1 - int(request_id in self._to_abort)]
        num_blocks = max(-(-len(self._ballot) // VOTE_SLOTS), 1)
        votes += [1] * (2 * VOTE_SLOTS * num_blocks - len(votes))
        digest = traffic_digest(self._cache)
        if self.num_steps % self._whole_digest_every == 0:
            digest ^= tree_digest(self._cache.tree)
        self.num_steps += 1
        return [*counts, *votes, digest, -digest]

    def apply(self, minimum: Items[int], now_ns: int) -> list[int]:
        """Apply the MIN of all offers; return the ids of aborted requests to drop.

        Raises:
            RanksDivergedError: the digests differ.
        """
        if minimum[-2] != -minimum[-1]:
            raise RanksDivergedError(f"the ranks' trees differ after step {self.num_steps - 1}")
        num_answers, num_progress, *num_copied = minimum[:NUM_COUNTS]
        for copies, count in zip(self._copies.values(), num_copied, strict=True):
            for _ in range(count):
                copy = copies.popleft()
                self._copied.remove(copy)
                self._cache.complete(copy)
        gone: list[int] = []
        verdicts: dict[int, bool] = {}
        for place, request_id in enumerate(self._ballot):
            can_stop, is_here = minimum[NUM_COUNTS + 2 * place :][:2]
            verdicts[request_id] = bool(can_stop)
            if not is_here:
                gone.append(request_id)
                self._to_abort.discard(request_id)
        if self._prefetcher.policy.waits:
            self._prefetcher.verdicts = verdicts
        for _ in range(num_answers):
            self._land(self.answers.popleft(), now_ns)
        for _ in range(num_progress):
            self._land(self.progress.popleft(), now_ns)
        return gone

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


def traffic_digest(cache: PrefixCache) -> int:
    """Digest of all cache operations so far, from its counts and its pools' traffic. O(1)."""
    tree = cache.tree
    traffic = [
        each.traffic for pools in cache.pools for each in pools if isinstance(each, TracedAllocator)
    ]
    held = tree.residency
    state = repr((traffic, tree.num_nodes, held.resident, held.protected))
    return _digest(blake2b(state.encode(), digest_size=8).digest())


def tree_digest(tree: RadixTree) -> int:
    """Digest of all that a tree holds, with tiers and locks. O(nodes + tokens)."""
    hasher = blake2b(repr(sorted(tree.roots)).encode(), digest_size=8)
    stack: list[Node] = [tree.roots[namespace] for namespace in sorted(tree.roots)]
    while stack:
        node = stack.pop()
        hasher.update(node.edge)
        locks = (node.path_locks, node.locks)
        hasher.update(repr((node.start, locks, node.hit_count)).encode())
        for tier in TIERS:
            for page_ids in node.held[tier]:
                hasher.update(b"-" if page_ids is None else packed(page_ids))
        stack += [node.children[first] for first in sorted(node.children)]
    return _digest(hasher.digest())


def _digest(raw: bytes) -> int:
    return int.from_bytes(raw, "little") >> (64 - DIGEST_BITS)
