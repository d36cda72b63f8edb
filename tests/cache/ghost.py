"""A memory in which each page holds the prefix from which a model would have computed it.

The payload of a page is its namespace and all tokens up to its last one. Copies move payloads in
the order in which they were booked, so a page that is freed, overwritten or swapped too early shows
as a wrong payload.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hicache.cache.kinds import KEY_TAGS, Extent, Kinds
from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import (
    BackUp,
    CopyState,
    LoadBack,
    StorageDelete,
    StorageWrite,
    Work,
)
from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES, TIERS
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.request import TOKEN_BYTES


class Payload(NamedTuple):
    """The prefix from which a page or a state was computed."""

    namespace: str
    tokens: bytes


def nothing_held(kinds: Kinds) -> tuple[list[dict[Any, Any]], ...]:
    """An empty cache: a dictionary by tier and kind."""
    return tuple([{} for _ in range(kinds.size)] for _ in TIERS)


class WrongPageError(AssertionError):
    """A page does not hold the prefix for which it is used."""


class GhostMemory:
    """Payloads by tier, kind and page id, and those of storage by key."""

    def __init__(self, tree: RadixTree) -> None:
        self.pages = nothing_held(tree.kinds)  # payloads by page id
        self.stored: dict[bytes, Payload] = {}
        self._tree = tree
        self._kinds = kinds = tree.kinds
        self._point = kinds.points[0] if kinds.points else -1
        self._page = tree.page_size
        # where each sequence began to compute
        self.began: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._copies: dict[object, list[tuple[int, int, int, Payload]]] = {}
        self._written: dict[object, dict[bytes, Payload]] = {}  # by key

    # -- what an executor does -----------------------------------------------------------------

    def book(self, work: Work) -> None:
        """Carry out a copy when it is booked; `settle` checks that its pages stay unchanged."""
        if isinstance(work, CopyState):
            source = self._at(DEVICE, self._point, int(work.source[0]))
            self.pages[DEVICE][self._point][int(work.target[0])] = source
            return
        if isinstance(work, StorageDelete):
            for key in work.keys:
                self.stored.pop(key, None)
            return
        watched = self._copies.setdefault(work, [])
        is_write = isinstance(work, StorageWrite)
        parts = work.parts if is_write else [(move.kind, move.targets) for move in work.moves]
        num_bytes = sum(len(page_ids) * self._kinds.page_bytes[kind] for kind, page_ids in parts)
        assert work.num_bytes == num_bytes, f"{work.num_bytes} bytes move, {num_bytes} are charged"
        if isinstance(work, StorageWrite):
            written = self._written[work] = {}
            for key, (kind, page_id) in zip(work.keys, work.pages, strict=True):
                payload = written[key] = self._at(HOST, kind, page_id)
                if key != self._key(kind, payload):
                    raise WrongPageError(f"a key of {self._kinds.names[kind]} names another prefix")
                if not work.is_given_away:
                    watched.append((HOST, kind, page_id, payload))
            return
        is_up = isinstance(work, BackUp)
        source_tier, target_tier = (DEVICE, HOST) if is_up else (HOST, DEVICE)
        for move in work.moves:
            assert len(move.sources) == len(move.targets)
            for source_id, target_id in zip(move.sources, move.targets, strict=True):
                payload = self._at(source_tier, move.kind, source_id)
                self.pages[target_tier][move.kind][target_id] = payload
                watched.append((target_tier, move.kind, target_id, payload))
                if not (is_up and work.is_fence):
                    watched.append((source_tier, move.kind, source_id, payload))

    def settle(self, work: LoadBack | BackUp | StorageWrite) -> None:
        """Check at the end of a copy that its sources and targets are unchanged."""
        for tier, kind, page_id, payload in self._copies.pop(work):
            if self.pages[tier][kind].get(page_id) != payload:
                name = self._page_name(tier, kind, page_id)
                raise WrongPageError(f"{name} changed during a copy")
        self.stored |= self._written.pop(work, {})

    def read_page(self, key: bytes, kind: int, page_id: int) -> None:
        """Read a page from storage into a staged host page."""
        self.pages[HOST][kind][page_id] = self.stored[key]

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute tokens `[start, end)` of a sequence: check the pages read, write the new ones."""
        self.check_readable(sequence, start)
        page = self._page
        first = start // page
        if first < sequence.tree_pages and not self._kinds.replayed:
            raise WrongPageError(f"page {first} of a sequence is the tree's and is written")
        for index in range(first, -(-end // page)):
            payload = self._payload(sequence, min((index + 1) * page, end))
            for kind in self._kinds.paged:
                if kind in self._kinds.kept and index < sequence.tree_pages:
                    continue  # a token that is computed again keeps its KV in the tree
                self.pages[DEVICE][kind][int(sequence.pages[kind][index])] = payload
        if self._kinds.points:
            assert sequence.working_slot is not None
            self.capture(sequence, end, sequence.working_slot)

    def capture(self, sequence: Sequence, length: int, slot: PageIds) -> None:
        """Write the state after `length` tokens into a slot."""
        self.pages[DEVICE][self._point][int(slot[0])] = self._payload(sequence, length)

    # -- what must hold ------------------------------------------------------------------------

    def check_readable(self, sequence: Sequence, length: int) -> None:
        """Check that the token after `length` would read its own prefix in all pages."""
        page = self._page
        end = -(-length // page)
        firsts = dict.fromkeys(self._kinds.paged, 0)
        for each in self._kinds.all:
            if each.extent is Extent.chunk:
                firsts[each.number] = length // each.window_len * each.window_len
            elif each.window_len:
                firsts[each.number] = max(length - each.window_len + 1, 0)
        for kind, _ in self._kinds.replayed:  # tokens that are computed again see none before
            firsts[kind] = max(firsts[kind], self.began.get(sequence, 0))
        for kind, first in firsts.items():
            for index in range(first // page, end):
                page_id = int(sequence.pages[kind][index])
                whole = self._payload(sequence, (index + 1) * page)
                if self.pages[DEVICE][kind].get(page_id) != whole:  # as a loaded last page is
                    wanted = self._payload(sequence, min((index + 1) * page, length))
                    self._expect(DEVICE, kind, page_id, wanted)
        if self._kinds.points and length:
            assert sequence.working_slot is not None
            wanted = self._payload(sequence, length)
            self._expect(DEVICE, self._point, int(sequence.working_slot[0]), wanted)

    def check_tree(self, held: "Held") -> None:
        """Check that every page of the tree holds the prefix under which a match finds it."""
        for tier in TIERS:
            for kind in self._kinds.numbers:
                for payload, page_id in held[tier][kind].items():
                    self._expect(tier, kind, page_id, payload)

    # -- inside --------------------------------------------------------------------------------

    def _payload(self, sequence: Sequence, length: int) -> Payload:
        return Payload(sequence.namespace, sequence.tokens[: length * TOKEN_BYTES])

    def _key(self, kind: int, payload: Payload) -> bytes:
        seed = chain_seed(payload.namespace)
        digest = page_digests(seed, payload.tokens, self._tree.page_bytes)[-1]
        return digest + KEY_TAGS[kind : kind + 1]

    def _page_name(self, tier: int, kind: int, page_id: int) -> str:
        return f"{TIER_NAMES[tier]} {self._kinds.names[kind]} page {page_id}"

    def _at(self, tier: int, kind: int, page_id: int) -> Payload:
        payload = self.pages[tier][kind].get(page_id)
        if payload is None:
            raise WrongPageError(f"{self._page_name(tier, kind, page_id)} is copied, never written")
        return payload

    def _expect(self, tier: int, kind: int, page_id: int, wanted: Payload) -> None:
        found = self.pages[tier][kind].get(page_id)
        if found != wanted:
            raise WrongPageError(f"{self._page_name(tier, kind, page_id)}: {found}, not {wanted}")


Held = tuple[list[dict[Payload, int]], ...]  # by tier and kind
