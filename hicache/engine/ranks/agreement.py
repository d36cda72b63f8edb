"""How the ranks of an engine keep one tree, each with a part of every page and its own storage.

Ranks decide alike as long as they know alike. What only one of them knows (what its storage holds,
how far its reads and copies are, whether its clock says that a prefetch has waited long enough) is
therefore offered to all first, and what comes back is the element-wise MIN of all offers:

- a query offers the prefix lengths that this rank could restore (`offer`, `taken`);
- a read offers the pages it has read so far, batch by batch, and whether window and state came;
- once a step, whether there is anything to tell or not, `RankAgreement.pack` offers how much of
  that has arrived here, a vote on every prefetch, and a digest of the tree with its negation.

Queries and reads are agreed in the background, each on a channel of its own; only what every rank
has taken notice of by the step's own agreement is acted on. Hence law 8: equal trees after every
step.
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

COPIES = get_args(Reported)  # by sort, in the order of their counts in an offer
NUM_COUNTS = 2 + len(COPIES)
VOTE_SLOTS = 64  # votes are offered in multiples of this, so that the length rarely changes
DIGEST_BITS = 62  # of a signed 64-bit element, with room for the negation


class RanksDivergedError(RuntimeError):
    """The trees of two ranks differ: their next decisions would, and they would wait for ever."""


def offer(lengths: Items[int], num_pages: int, rule: HitAgreement) -> list[int]:
    """What a rank offers that could restore these prefix lengths of a span of `num_pages`.

    A 0/1 vector over the lengths 1 to `num_pages`, whatever the rank holds. Under
    `min_of_maxima`, the one number that a MIN of hit lengths takes.
    """
    if rule is HitAgreement.min_of_maxima:
        return [max(lengths, default=0)]
    offered = [0] * num_pages
    for length in lengths:
        offered[length - 1] = 1
    return offered


def taken(minimum: Items[int], rule: HitAgreement) -> list[int]:
    """The prefix lengths that the ranks agree on, ascending; the last is the one to read."""
    if rule is HitAgreement.min_of_maxima:
        return [length for length in minimum if length]
    return [index + 1 for index, is_common in enumerate(minimum) if is_common]


def minimum_of(offers: Items[Items[int]]) -> list[int]:
    """The element-wise MIN of offers that lie side by side: a channel inside one process.

    Raises:
        RanksDivergedError: they are not of one length.
    """
    if len({len(each) for each in offers}) != 1:
        raise RanksDivergedError(
            f"the ranks sent vectors of different lengths: {[len(each) for each in offers]}"
        )
    if all(each == offers[0] for each in offers):  # as most are
        return list(offers[0])
    return [min(column) for column in zip(*offers, strict=True)]


class ReadProgress(NamedTuple):
    """News of a prefetch that all ranks have agreed on, in the order they did."""

    prefetch: Prefetch
    restorable: list[int] | None = None  # the answer of a query
    leading_pages: int = 0  # of a query: full pages that every rank's storage has without a gap
    completed_pages: int = 0  # of a read so far
    restored_pages: int = 0  # 0 unless every rank has read the same window and state
    is_read: bool = False  # the last of a read
    read_ns: tuple[int, int] | None = None  # when this rank's reader began and let go


class RankAgreement:
    """One rank's part in the agreement of each step.

    Invariant: ranks that submitted and applied the same offer vectors of one shape. `answers` and
    `progress` may each be appended to from a thread of their own, in the order in which the ranks
    agreed; which of the two is ahead differs from rank to rank, so they are counted apart.
    """

    def __init__(
        self, cache: PrefixCache, prefetcher: Prefetcher, *, whole_digest_every: int
    ) -> None:
        """`whole_digest_every`: steps between digests of the whole tree, which cost O(nodes)."""
        self.answers: deque[ReadProgress] = deque()  # of queries
        self.progress: deque[ReadProgress] = deque()  # of reads
        self.num_steps = 0
        self._cache = cache
        self._prefetcher = prefetcher
        self._whole_digest_every = whole_digest_every
        self._copies: dict[type, deque[Reported]] = {kind: deque() for kind in COPIES}
        self._copied: set[Reported] = set()
        self._to_abort: set[int] = set()
        self._ballot: dict[int, bool] = {}  # as last offered
        prefetcher.verdicts = {}

    def submitted(self, copy: Reported) -> None:
        """A copy begins; ranks begin the same ones in the same order."""
        self._copies[type(copy)].append(copy)

    def copied(self, copy: Reported) -> None:
        """This rank has made its part of a copy."""
        self._copied.add(copy)

    def has_copied(self, kind: type) -> bool:
        """Whether this rank has made its part of the copy of this sort that is taken in next."""
        copies = self._copies[kind]
        return bool(copies) and copies[0] in self._copied

    def ask_abort(self, request_id: int) -> None:
        """This rank has learned that a request is gone; all drop it when all know."""
        self._to_abort.add(request_id)

    def ballot(self, now_ns: int) -> dict[int, bool]:
        """This rank's votes: whether each request whose prefetch is undecided may go on."""
        prefetcher = self._prefetcher
        return {
            each.request_id: prefetcher.can_terminate_prefetch(each, now_ns)
            for each in prefetcher.active.values()
            if not each.is_settled
        }

    def pack(self, now_ns: int) -> list[int]:
        """This rank's offer for the step.

        `[answers, news of reads, copies of each sort] + [can stop, 1 − is gone] for each prefetch
        that is undecided + [digest, −digest]`. A policy that never waits needs no vote.
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
        """Act on the MIN of all offers; returns requests that are gone, for the scheduler to drop.

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
        if self._prefetcher.stop.waits:
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
    """A digest of what a cache has done so far: O(1), from its counts and its pools' traffic."""
    tree = cache.tree
    traffic = [
        each.traffic for pools in cache.pools for each in pools if isinstance(each, TracedAllocator)
    ]
    held = tree.residency
    state = repr((traffic, tree.num_nodes, held.resident, held.protected))
    return _digest(blake2b(state.encode(), digest_size=8).digest())


def tree_digest(tree: RadixTree) -> int:
    """A digest of all that a tree holds, where, and under how many locks. O(nodes + tokens)."""
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
