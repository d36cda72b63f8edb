"""Looks up a prompt without a trace: the tree does not change, and nothing counts as used.

Routers ask every engine before they choose one.
"""

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE, Node
from hicache.cache.tree.radix_tree import RadixTree


def usable_len(
    tree: RadixTree, tokens: bytes, max_len: int, namespace: str = "", *, on_device: bool = False
) -> int:
    """Return how many of the first `max_len` tokens are cached and can be reused.

    If `on_device` is True, only data on the device counts; otherwise data on the host counts as
    well. The result is that of `RadixTree.match`, which also marks what it finds as used.
    """
    kinds, end = tree.kinds, max_len // tree.page_size
    node = tree.roots.get(namespace)
    usable = 0  # pages
    held_from = [0] * kinds.size  # by kind of window; full is held from the root on
    while node is not None and node.end < end:
        first = node.end * tree.page_bytes
        child = node.children.get(tokens[first : first + tree.page_bytes])
        if child is None or (on_device and child.held[DEVICE][FULL] is None):
            break
        pages = tree.num_shared(child, tokens, end)
        reached = child.start + pages
        is_usable = True
        for kind, window in kinds.windows:
            if not _holds(child, kind, on_device=on_device):
                held_from[kind] = reached
            is_usable &= held_from[kind] <= max(window.first(reached), 0)
        is_whole = pages == child.num_pages
        for kind in kinds.points:  # a state belongs to the end of its node
            is_usable &= is_whole and _holds(child, kind, on_device=on_device)
        if is_usable:
            usable = reached
        node = child if is_whole else None
    return usable * tree.page_size


def _holds(node: Node, kind: int, *, on_device: bool) -> bool:
    device, host = node.held
    return device[kind] is not None or (host[kind] is not None and not on_device)
