"""One request's read from storage: what was asked for, what has come, whose the pages are."""

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from hicache.cache.pages import NO_PAGES, PageIds
from hicache.cache.tree.keys import Key, keys
from hicache.cache.tree.lock import Lock
from hicache.cache.tree.node import FULL, MAMBA, SWA, Node
from hicache.cache.tree.sequence import Sequence


class Phase(Enum):
    """How far a prefetch is."""

    asking = "storage is asked what it has"
    reading = "a reader fills the staged pages"
    stopped = "what has come was taken over; the rest is the reader's until it lets go"
    ended = "nothing of it is held"


@dataclass(slots=True, kw_only=True, eq=False)
class Prefetch:
    """One request's read from storage: `[start_page, start_page + num_pages)` of its tokens.

    The reader (an executor) sets `completed_pages`, `restored_pages`, `read_ns` and `is_read`, and
    stops after the batch at hand once `is_settled`. The `Prefetcher` alone sets everything else.
    """

    request_id: int
    sequence: Sequence
    anchor: Node
    anchor_lock: Lock
    start_page: int
    asked_pages: int  # before any cut
    num_pages: int  # to be read: cut, then what storage has
    names: Items[Key]  # of its pages
    enqueued_ns: int
    window_pages: int  # swa pages that a restorable prefix needs; 0 without swa
    has_state: bool
    keeps_part: bool = False  # a part that can be restored is kept if not all pages come
    staged: list[PageIds] = field(default_factory=lambda: [NO_PAGES, NO_PAGES, NO_PAGES])
    first_poll_ns: int | None = None
    answered_ns: int | None = None  # when it was heard what storage has
    restorable: list[int] | None = None  # prefix lengths in pages that storage could restore
    leading_pages: int = 0  # full pages that storage has without a gap
    completed_pages: int = 0
    read_ns: tuple[int, int] | None = None  # when its reader began and let go, if that is known
    restored_pages: int = 0  # length of the prefix whose window and state were read; 0 if none
    stop_pages: int | None = None  # the reader ends with the window and state of this prefix
    is_read: bool = False  # the reader has let go; only then may sidecars be found
    phase: Phase = Phase.asking
    was_stopped: bool = False  # the request was let go, whether or not all had come
    settled_pages: int = 0  # that had been read when it was settled
    taken_pages: int = 0  # of these, the pages that can be restored: the cache keeps them
    published_pages: int = 0  # of these, those that were new

    @property
    def leading_end(self) -> int:
        """The page up to which storage has full KV and nothing that can be restored, or 0."""
        return self.start_page + self.leading_pages if self.restorable == [] else 0

    @property
    def is_reading(self) -> bool:
        """Whether a reader has the staged pages."""
        return self.phase is Phase.reading or self.phase is Phase.stopped

    @property
    def is_settled(self) -> bool:
        """Whether what came of it has been published or given back."""
        return self.phase is Phase.stopped or self.phase is Phase.ended

    @property
    def is_staged(self) -> bool:
        """Whether it has host pages to read into."""
        return len(self.staged[FULL]) > 0

    @property
    def is_complete(self) -> bool:
        """Whether all its pages are read; one whose keys are not known yet is not complete."""
        are_known = self.restorable is not None and self.is_staged
        return are_known and self.completed_pages == self.num_pages

    @property
    def has_sidecars(self) -> bool:
        """Whether state or window must be read besides the pages."""
        return self.window_pages > 0 or self.has_state

    def keys(self, kind: int, first: int, end: int) -> Items[Key]:
        """Storage keys of a component for pages `[first, end)` of the span."""
        return keys(self.names[first:end], kind)

    def usable_pages(self, completed: int) -> int:
        """Length in pages of the longest prefix that the first `completed` pages can restore.

        0 if there is none. Assumes that storage still has the window and the state at its end.
        """
        if not self.has_sidecars:
            return completed
        if not self.keeps_part:
            return completed if completed == self.num_pages else 0
        lengths = self.restorable or []
        place = bisect_right(lengths, completed)
        return lengths[place - 1] if place else 0

    def sidecar_keys(self, end: int) -> list[Key]:
        """Storage keys of the window before page `end` of the span, and of the state there."""
        windows = self.keys(SWA, self.swa_first(end), end) if self.window_pages else []
        states = self.keys(MAMBA, end - 1, end) if self.has_state else []
        return [*windows, *states]

    def swa_first(self, num_pages: int) -> int:
        """Where the window begins that a prefix of `num_pages` needs."""
        return max(num_pages - self.window_pages, 0)

    def ask(self, contains: Callable[[Items[Key]], list[bool]]) -> list[int]:
        """The prefix lengths, in pages, that storage could restore, ascending; empty if none.

        Full pages must lead without a gap; the window before the end and the state at it must be
        there as well. `contains` is asked about the full pages, and about windows and states as far
        as those lead. Sets `leading_pages`.
        """
        full = contains(self.keys(FULL, 0, self.num_pages))
        num_leading = full.index(False) if False in full else len(full)
        self.leading_pages = num_leading
        lengths = list(range(1, num_leading + 1))
        if lengths and self.window_pages:
            swa = contains(self.keys(SWA, 0, num_leading))
            lengths, gap = [], 0  # the last length whose own page is missing
            for length, is_there in enumerate(swa, 1):
                if not is_there:
                    gap = length
                elif length - gap >= min(length, self.window_pages):
                    lengths.append(length)
        if num_leading and self.has_state:
            states = contains(self.keys(MAMBA, 0, num_leading))
            lengths = [each for each in lengths if states[each - 1]]
        return lengths
