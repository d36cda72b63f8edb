"""The last page of a hit, which vLLM computes again for its draft model."""

from collections.abc import Sequence

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE, HOST, Node


def drop(
    path: Sequence[tuple[Node, int]], most: int, *, has_aux: bool, is_mirrored: bool
) -> tuple[int, int, int]:
    """Return the page at which a hit ends whose last page is dropped, that on the device, and how
    many pages are dropped.

    `path` has the nodes from the top, each with the page up to which it is found. A request can use
    at most `most` pages; with `has_aux` (windows or states), the page after them may be dropped.
    If `is_mirrored`, the host also holds what
    the device holds: as in vLLM, a look-up on the host then begins with the page that the device
    drops, and drops its own last page.
    """
    ready, found = 0, path[-1][1]
    for node, end in path:
        if node.held[DEVICE][FULL] is None:
            break
        ready = end if has_aux else min(end, most)
    hit = ready = max(ready - 1, 0)
    for node, end in path:
        if end > ready:
            if node.held[HOST][FULL] is None and is_mirrored:
                break
            hit = max(end - 1, ready)
    return hit, ready, max(min(found, most) - hit, 0)
