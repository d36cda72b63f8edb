"""What the tree wants done. The tree decides; the controller executes."""

from typing import NamedTuple

from hicache.cache.node import MAMBA, Node
from hicache.cache.pages import PageIds


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
