"""Looks up a prompt without a trace: the tree does not change, and nothing counts as used.

Routers ask every engine before they choose one, and a request is looked up when it arrives.
"""

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE, HOST, MatchResult, Node, make_root
from hicache.cache.tree.radix_tree import RadixTree

Path = list[tuple[Node, int]]  # nodes from the top, each with the page up to which it is equal


def usable_len(
    tree: RadixTree, tokens: bytes, max_len: int, namespace: str = "", *, on_device: bool = False
) -> int:
    """Return how many of the first `max_len` tokens are cached and can be reused.

    If `on_device` is True, only data on the device counts; otherwise data on the host counts as
    well. The result is that of `RadixTree.match`, which also changes the tree.
    """
    path, *_ = _path(tree, tokens, max_len, namespace)
    return _usable(tree, path, on_device=on_device) * tree.page_size


def look(tree: RadixTree, tokens: bytes, max_len: int, namespace: str = "") -> MatchResult:
    """Return what `RadixTree.match` would, but leave the tree as it is.

    No node is split: the two nodes of the result contain the last pages that can be reused, and may
    go on.
    """
    size = tree.page_size
    path, dropped, most = _path(tree, tokens, max_len, namespace)
    best, ready = (_usable(tree, path, on_device=on_device) for on_device in (False, True))
    hits = [0] * tree.kinds.size
    starts = {kind: window.first(best) for kind, window in tree.kinds.windows}
    for kind, edge in {FULL: ready, **starts}.items() if best > ready else ():
        for node, reached in path:
            if node.held[DEVICE][kind] is None and node.held[HOST][kind] is not None:
                hits[kind] += max(min(reached, best) - max(node.start, edge), 0) * size
    root = tree.roots.get(namespace) or make_root(namespace, tree.kinds.size)
    best_node, device_node = (
        next((node for node, reached in path if reached >= end > 0), root) for end in (best, ready)
    )
    for kind in tree.kinds.points if best > ready else ():
        hits[kind] = int(best_node.held[DEVICE][kind] is None)
    is_device = tree.rules.keeps_for_repeats
    ends = [end for node, end in path if not is_device or node.held[DEVICE][FULL] is not None]
    return MatchResult(
        device_prefix_len=ready * size,
        usable_len=best * size,
        full_len=path[-1][1] * size if path else 0,
        host_hits=tuple(hits),
        device_node=device_node,
        best_node=best_node,
        branch_end=min(max(ends, default=0), most) * size,
        dropped_len=dropped * size,
    )


def _path(tree: RadixTree, tokens: bytes, max_len: int, namespace: str) -> tuple[Path, int, int]:
    # the nodes of whole pages, of which only the last one may differ from `tokens` or go on; how
    # many pages of the prompt were dropped behind them, and where those on the device then end
    end = tree.num_pages(max_len + tree.peek)
    path = path_of(tree, tokens, end, namespace)
    if not (path and tree.drops_block):
        return path, 0, end
    hit, ready, dropped = tree.drop(path, max_len // tree.page_size)
    path = [(node, min(reached, hit)) for node, reached in path if node.start < hit]
    return path, dropped, ready


def path_of(tree: RadixTree, tokens: bytes, end: int, namespace: str) -> Path:
    """Return the nodes whose full KV is cached without a gap, of the pages of `tokens` to `end`."""
    path: Path = []
    node = tree.roots.get(namespace)
    while node is not None and node.end < end:
        first = node.end * tree.page_bytes
        child = node.children.get(tokens[first : first + tree.page_bytes])
        if child is None or not (child.held[DEVICE][FULL] or child.held[HOST][FULL]):
            break
        pages = tree.num_shared(child, tokens, end)
        path.append((child, child.start + pages))
        node = child if pages == child.num_pages else None
    return path


def _usable(tree: RadixTree, path: Path, *, on_device: bool) -> int:
    kinds, usable = tree.kinds, 0  # in pages
    held_from = [0] * kinds.size  # by kind of window; full is held from the root on
    for node, reached in path:
        if on_device and node.held[DEVICE][FULL] is None:
            break
        is_usable = True
        for kind, window in kinds.windows:
            if not _holds(node, kind, on_device=on_device):
                held_from[kind] = reached
            is_usable &= held_from[kind] <= max(window.first(reached), 0)
        for kind in kinds.points:  # a state belongs to the end of its node
            is_usable &= reached == node.end and _holds(node, kind, on_device=on_device)
        if is_usable:
            usable = reached
    return usable


def _holds(node: Node, kind: int, *, on_device: bool) -> bool:
    device, host = node.held
    return device[kind] is not None or (host[kind] is not None and not on_device)


def full_on_host(tree: RadixTree, node: Node, tokens: bytes, end: int) -> Node:
    """Return the last node, from `node` up to page `end`, to which the host holds full KV."""
    while node.end < end and (child := tree.descend(node, tokens, end)):
        if child.held[HOST][FULL] is None:
            break
        node = child
    return node
