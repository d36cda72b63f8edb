"""Inserts pages and states that were computed on the device or read to the host.

The tree keeps what it lacks. It returns duplicates as `FreePages`.
"""

from collections.abc import Sequence as Items

from hicache.cache.kinds import FULL
from hicache.cache.pages import FreePages, PageIds
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


def insert(
    tree: RadixTree,
    node: Node,
    sequence: Sequence,
    end: int,
    actions: list[FreePages],
    kept: Items[int],
) -> tuple[Node, bool]:
    """Insert the device pages of a sequence from page `node.end` to page `end` into the radix tree.

    The tree takes the pages of the kinds in `kept` that the sequence owns. If it holds a page on
    the device already, the sequence uses the tree's page. The page of the sequence is then added to
    `actions`, to be freed. Return the node that ends at page `end`, and whether it is new.
    """
    residency, kinds = tree.residency, tree.kinds
    owned = {kind: sequence.own_start(kind, kinds) for kind in kept}
    tick, is_new = residency.next_tick(), False
    above = node
    while above.parent is not None:
        above.tick = tick  # the sequence has used the prefix until now
        above = above.parent
    while node.end < end:
        start = node.end
        child = tree.descend(node, sequence.tokens, end)
        is_new = child is None
        if child is None:
            cut = min([end, *(own_start for own_start in owned.values() if own_start > start)])
            for kind, window in kinds.windows:
                # a new window gets a node of its own, so that one lock covers one window
                if kind in kept and sequence.starts[kind] <= start < window.first(end):
                    cut = min(cut, window.first(end))
            child = _grow(tree, node, sequence, cut)
            cut, tick = child.end, residency.next_tick()  # later than what a split left beside it
            for kind, own_start in owned.items():
                if start >= own_start:
                    page_ids = sequence.pages[kind][start:cut]
                    residency.put(child, DEVICE, kind, page_ids)
        else:
            # the tree already has these tokens, on at least one tier
            held = child.held[DEVICE]
            if held[FULL] is None:  # before the node is split, as SGLang
                residency.put(child, DEVICE, FULL, sequence.pages[FULL][start : child.end])
                if tree.marks_cold:
                    child.is_cold = False
                owned[FULL] = child.end
            cuts = [
                own for kind, own in owned.items() if held[kind] is None and start < own < child.end
            ]
            if cuts:
                child = tree.descend(node, sequence.tokens, min(cuts)) or child
            for kind, own_start in owned.items():
                first = max(start, own_start)
                if first >= child.end:
                    continue
                page_ids, ours = sequence.pages[kind], child.held[DEVICE][kind]
                theirs = page_ids[first : child.end]
                if ours is None:
                    residency.put(child, DEVICE, kind, theirs)
                else:
                    actions.append(FreePages(DEVICE, kind, theirs))
                    page_ids[first : child.end] = ours[first - start :]
        child.uses += start >= sequence.tree_pages
        child.tick = tick
        node = child
    return node, is_new


def attach_state(tree: RadixTree, node: Node, slot: PageIds, actions: list[FreePages]) -> None:
    """Store `slot` as the Mamba state at the end of `node` on the device.

    If the node has a state already, `slot` is added to `actions`, to be freed.
    """
    (kind,) = tree.kinds.points
    if node.held[DEVICE][kind] is None:
        tree.residency.put(node, DEVICE, kind, slot)
    else:
        tree.residency.touch_states(node)
        actions.append(FreePages(DEVICE, kind, slot))


def insert_host(
    tree: RadixTree,
    anchor: Node,
    sequence: Sequence,
    pages: list[PageIds],
    actions: list[FreePages],
) -> Node:
    """Insert host pages that were read from storage into the radix tree.

    Args:
        tree: the radix tree.
        anchor: the node after which the pages follow. The host holds it, or it is a root.
        sequence: the sequence whose tokens the pages hold.
        pages: page ids by kind: all full-attention pages, the last window pages, and the last
            state.
        actions: receives the pages that the host held already, to be freed.

    Returns:
        The node at the end of the inserted pages.
    """
    kinds, start = tree.kinds, anchor.end
    end = start + len(pages[FULL])
    node = anchor
    tick = tree.residency.next_tick()
    # under write_back, SGLang gives the host no copy of what the device holds
    is_spared = tree.demotes and tree.rules.evicts_whole
    while node.end < end:
        child = tree.descend(node, sequence.tokens, end)
        is_taken = child is None or not is_spared
        child = child or _grow(tree, node, sequence, end)
        part = pages[FULL][child.start - start : child.end - start]
        if is_taken:
            _put_host(tree, child, FULL, part, actions)
        else:
            actions.append(FreePages(HOST, FULL, part))
        child.tick = tick
        node = child
    if node.held[HOST][FULL] is None:
        actions += [FreePages(HOST, kind, pages[kind]) for kind in kinds.aux if pages[kind]]
        return node
    for kind, _ in kinds.windows:
        above, first = node, end - len(pages[kind])
        while above.end > first:
            assert above.parent is not None
            if above.start < first and above.held[HOST][kind] is None:
                tree.descend(above.parent, sequence.tokens, first)  # splits the node
            begin = max(above.start, first)
            part = pages[kind][begin - first : above.end - first]
            _put_host(tree, above, kind, part, actions)
            above = above.parent
    for kind in kinds.points:
        if pages[kind]:
            _put_host(tree, node, kind, pages[kind], actions)
    return node


def _grow(tree: RadixTree, node: Node, sequence: Sequence, end: int) -> Node:
    # a new child for pages `[node.end, end)`, or those of them in the first chunk
    start, end = node.end, tree.kinds.node_end(node.end, end)
    child = tree.grow(node, sequence.tokens[start * tree.page_bytes : end * tree.page_bytes])
    child.digests = sequence.known_digests(start, end)
    return child


def _put_host(
    tree: RadixTree, node: Node, kind: int, page_ids: PageIds, actions: list[FreePages]
) -> None:
    if node.held[HOST][kind] is None:
        tree.residency.put(node, HOST, kind, page_ids)
    else:
        actions.append(FreePages(HOST, kind, page_ids))
