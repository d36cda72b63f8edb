"""What becomes of the pages that prefetches have read from storage: each has one fate.

*used*: loaded back to the device for a request, whichever. *duplicate*: on the host already.
*late*: read when its request had gone on, or had been given up on. *not restorable*: of a prefetch
whose window or state did not come, and never used, whether it was published or not. Of those that
could be restored and never were, *evicted unused* left the host, and *unused at end* are there yet.
"""

from collections import Counter
from collections.abc import Iterable

FATES = ("used", "unused_at_end", "evicted_unused", "duplicate", "late", "not_restorable")


class Arrivals:
    """Full pages that have come to one host; invariant: those read are those with a fate or open.

    `restorable`, `unrestorable`: host pages in the tree that have come and that nobody has used.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self.restorable: set[int] = set()
        self.unrestorable: set[int] = set()
        self._counters = counters

    @property
    def num_open(self) -> int:
        """Pages that may still be used."""
        return len(self.restorable) + len(self.unrestorable)

    def count(self, num_pages: int, fate: str) -> None:
        """So many were read, and this is what became of them."""
        self._counters["prefetch/read_pages"] += num_pages
        self._counters[f"prefetch/{fate}_pages"] += num_pages

    def publish(self, page_ids: Iterable[int], *, is_restorable: bool) -> None:
        """These were read, and are the tree's."""
        new = set(page_ids)
        self._counters["prefetch/read_pages"] += len(new)
        (self.restorable if is_restorable else self.unrestorable).update(new)

    def use(self, page_ids: Iterable[int]) -> None:
        """A request has these, of which some have come from storage. O(pages)."""
        if self.num_open:
            self._close(page_ids, "used", "used")

    def evict(self, page_ids: Iterable[int]) -> None:
        """These leave the host, of which some have come from storage. O(pages)."""
        if self.num_open:
            self._close(page_ids, "evicted_unused", "not_restorable")

    def fates_now(self) -> Counter[str]:
        """What the open ones come to if the run ends now."""
        return Counter(
            {
                "prefetch/unused_at_end_pages": len(self.restorable),
                "prefetch/not_restorable_pages": len(self.unrestorable),
            }
        )

    def _close(self, page_ids: Iterable[int], restorable: str, unrestorable: str) -> None:
        for pages, fate in ((self.restorable, restorable), (self.unrestorable, unrestorable)):
            closed = pages.intersection(page_ids)
            pages -= closed
            self._counters[f"prefetch/{fate}_pages"] += len(closed)
