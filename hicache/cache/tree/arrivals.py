"""What becomes of the pages that prefetches have read from storage: each has one fate.

*used*: loaded back to the device for a request, whichever. *duplicate*: on the host already.
*late*: read when its request had gone on, or had been aborted. *not restorable*: read without the
window or state that its use takes, and freed at once. Of those that could be restored and never
were, *evicted unused* left the host, and *unused at end* are there yet.
"""

from collections import Counter
from collections.abc import Iterable

FATES = ("used", "unused_at_end", "evicted_unused", "duplicate", "late", "not_restorable")


class Arrivals:
    """Full pages that have come to one host; invariant: those read have a fate or are `unused`.

    `unused`: host pages in the tree that a prefetch has read and that no request has used.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self.unused: set[int] = set()
        self._counters = counters

    def count(self, num_pages: int, fate: str) -> None:
        """So many were read, and this is what became of them."""
        self._counters["prefetch/read_pages"] += num_pages
        self._counters[f"prefetch/{fate}_pages"] += num_pages

    def publish(self, page_ids: Iterable[int]) -> None:
        """These were read, and are the tree's."""
        new = set(page_ids)
        self._counters["prefetch/read_pages"] += len(new)
        self.unused |= new

    def use(self, page_ids: Iterable[int]) -> None:
        """A request has these, of which some have come from storage. O(pages)."""
        self._close(page_ids, "used")

    def evict(self, page_ids: Iterable[int]) -> None:
        """These leave the host, of which some have come from storage. O(pages)."""
        self._close(page_ids, "evicted_unused")

    def fates_now(self) -> Counter[str]:
        """What the unused ones come to if the run ends now."""
        return Counter({"prefetch/unused_at_end_pages": len(self.unused)})

    def _close(self, page_ids: Iterable[int], fate: str) -> None:
        if not self.unused:
            return
        closed = self.unused.intersection(page_ids)
        self.unused -= closed
        self._counters[f"prefetch/{fate}_pages"] += len(closed)
