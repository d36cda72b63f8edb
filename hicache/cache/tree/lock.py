"""The receipt of a lock: what it forbids the eviction of, and what its release must undo."""

from typing import NamedTuple

from hicache.cache.tree.node import Node


class Lock(NamedTuple):
    """On one tier: full pages `[full_start, node.end)`, window pages `[swa_start, node.end)`.

    And, `with_state`, the node's state. A start is that of a node of the path, or `node.end`.
    """

    tier: int
    node: Node
    full_start: int
    swa_start: int
    with_state: bool
