"""What the tree wants done. The tree decides; the controller executes."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hicache.cache.pages import PageIds, Pools
from hicache.cache.tree.arrivals import Arrivals
from hicache.cache.tree.node import FULL, HOST, KIND_NAMES, MAMBA, TIER_NAMES, Node

_EVICTED = [[f"evict/{tier}_{kind}_pages" for kind in KIND_NAMES] for tier in TIER_NAMES]


class FreePages(NamedTuple):
    """Give ids back to the pool of one component on one tier."""

    tier: int
    kind: int
    page_ids: PageIds


class Plan(NamedTuple):
    """The nodes whose data is to be copied to another tier, by component, from the top down."""

    full: list[Node]
    swa: list[Node]
    mamba: list[Node]

    def num_pages(self, kind: int) -> int:
        """Pages of one component; of mamba, slots: one a node, however long."""
        nodes = self[kind]
        return len(nodes) if kind == MAMBA else sum(node.num_pages for node in nodes)


def free(actions: Iterable[FreePages], pools: Pools) -> None:
    """Carry them out."""
    for tier, kind, page_ids in actions:
        pools[tier][kind].free(page_ids)


def free_evicted(
    actions: Iterable[FreePages], pools: Pools, counters: Counter[str], arrivals: Arrivals
) -> None:
    """Carry out and count what an eviction frees."""
    for tier, kind, page_ids in actions:
        if tier == HOST and kind == FULL:
            arrivals.evict(page_ids)
        counters[_EVICTED[tier][kind]] += len(page_ids)
        pools[tier][kind].free(page_ids)
