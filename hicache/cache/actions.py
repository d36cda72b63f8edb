"""What the tree wants done. The tree decides; the controller executes."""

from typing import NamedTuple

from hicache.cache.node import Node
from hicache.cache.pages import PageIds


class FreePages(NamedTuple):
    """Give ids back to the pool of one component on one tier."""

    tier: int
    kind: int
    page_ids: PageIds


class BackUpPlan(NamedTuple):
    """Device data without a host copy, to be copied there.

    `full` runs from the top down and stops being worth anything at its first gap, so it is backed
    up in that order. `swa` and `mamba` lie on nodes that are backed up or about to be.
    """

    full: list[Node]
    swa: list[Node]
    mamba: list[Node]


class LoadBackPlan(NamedTuple):
    """Host data that a request needs on the device; all of it or none."""

    full: list[Node]
    swa: list[Node]
    mamba: list[Node]

    def num_pages(self, kind: int) -> int:
        """Pages or slots of one component."""
        if kind == 2:  # a state is one slot, however long its node
            return len(self.mamba)
        return sum(node.num_pages for node in self[kind])
