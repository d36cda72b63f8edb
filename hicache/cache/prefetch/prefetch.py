"""One request's read from storage: what it asks for, what has arrived, and who owns the pages."""

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum

from hicache.cache.kinds import FULL, Extents, Window, lengths_with
from hicache.cache.pages import PageIds
from hicache.cache.tree.keys import Key, keys
from hicache.cache.tree.node import Lock, Node
from hicache.cache.tree.sequence import Sequence


class Phase(Enum):
    asking = "storage is asked what it has"
    reading = "a reader fills the staged pages"
    stopped = "what has come was taken over; the rest is the reader's until it lets go"
    ended = "nothing of it is held"


@dataclass(slots=True, kw_only=True, eq=False)
class Prefetch:
    """One request's read of cached pages from storage to host.

    The read covers `num_pages` pages of the prompt from page `start_page` on. `sequence` holds the
    prompt. In the radix tree, the pages follow the node `anchor`. `staged` holds the ids of the
    host pages that the read fills, by kind of data. Once `is_settled` is True, the request no
    longer waits, and the read ends with the pages that storage is reading at the time.
    """

    request_id: int
    sequence: Sequence
    anchor: Node
    anchor_lock: Lock
    start_page: int
    asked_pages: int  # before any cut
    num_pages: int  # pages to read: after any cut, and after storage's answer only what storage has
    names: Items[Key]  # of these pages
    enqueued_ns: int
    needs: Extents  # windows and state: the last pages of each that a restorable prefix needs
    staged: list[PageIds]  # by kind
    keeps_part: bool = False  # a part that can be restored is kept if not all pages come
    source: int | None = None  # number of the engine whose host is read; None means storage
    first_poll_ns: int | None = None
    answered_ns: int | None = None  # when storage's answer arrived
    restorable: list[int] | None = None  # prefix lengths in pages that storage could restore
    leading_pages: int = 0  # full pages that storage has without a gap
    completed_pages: int = 0
    read_ns: tuple[int, int] | None = None  # start and end of the read, if known
    restored_pages: int = 0  # length of the prefix whose window and state were read; 0 if none
    stop_pages: int | None = None  # the reader ends with the window and state of this prefix
    is_read: bool = False  # the reader has finished; no window or state is read before
    phase: Phase = Phase.asking
    was_stopped: bool = False  # the request stopped waiting, whether or not all pages were read
    settled_pages: int = 0  # pages that had been read when it was settled
    taken_pages: int = 0  # of these, the restorable pages, which the cache keeps
    published_pages: int = 0  # of these, the pages that were new to the tree

    @property
    def leading_end(self) -> int:
        """Return the page of the prompt up to which KV in storage is useless without its sidecars.

        Sidecars are the sliding-window pages and Mamba states that a hit needs besides
        full-attention KV. The result is 0 if storage has sidecars for some of the prefix, or if no
        KV was found there.
        """
        return self.start_page + self.leading_pages if self.restorable == [] else 0

    @property
    def is_reading(self) -> bool:
        return self.phase is Phase.reading or self.phase is Phase.stopped

    @property
    def is_settled(self) -> bool:
        return self.phase is Phase.stopped or self.phase is Phase.ended

    @property
    def is_staged(self) -> bool:
        return len(self.staged[FULL]) > 0

    @property
    def is_complete(self) -> bool:
        are_known = self.restorable is not None and self.is_staged
        return are_known and self.completed_pages == self.num_pages

    @property
    def has_sidecars(self) -> bool:
        return len(self.needs) > 0

    def keys(self, kind: int, first: int, end: int) -> Items[Key]:
        return keys(self.names[first:end], kind)

    def usable_pages(self, completed: int) -> int:
        """Return how many leading pages a request can reuse once `completed` pages have been read.

        With full attention alone, all of these pages can be reused. With sliding windows or Mamba
        states, a request can resume only at some page boundaries. The result is 0 if the request
        cannot resume at any.
        """
        if not self.has_sidecars:
            return completed
        if not self.keeps_part:
            return completed if completed == self.num_pages else 0
        lengths = self.restorable or []
        place = bisect_right(lengths, completed)
        return lengths[place - 1] if place else 0

    def first_page(self, window: Window, end: int) -> int:
        """Return the first page of the attention window that ends at page `end` of this prefetch.

        Both pages are counted from the start of the prefetch. The result is 0 if the window begins
        earlier.
        """
        return max(window.first(self.start_page + end) - self.start_page, 0)

    def sidecar_keys(self, end: int) -> list[Key]:
        return [
            key
            for kind, window in self.needs
            for key in self.keys(kind, self.first_page(window, end), end)
        ]

    def ask(self, contains: Callable[[Items[Key]], list[bool]]) -> list[int]:
        """Return the lengths of the prefixes that storage can restore, in pages, ascending.

        A restorable prefix has all its full-attention pages in storage. Storage also has the
        sliding window and the Mamba state at the end of the prefix. `contains` returns one flag per
        storage key: True if storage has the page. The call also sets `leading_pages`, the number of
        full-attention pages before the first missing one.
        """
        full = contains(self.keys(FULL, 0, self.num_pages))
        num_leading = full.index(False) if False in full else len(full)
        self.leading_pages = num_leading
        lengths = list(range(1, num_leading + 1))
        for kind, window in self.needs if num_leading else ():
            present = contains(self.keys(kind, 0, num_leading))
            if False in present:
                usable = lengths_with(present, window, self.start_page)
                lengths = sorted({*lengths}.intersection(usable))
        return lengths
