"""Pages and states that are published in the tree: computed on the device, or read to the host.

The tree takes what it lacks. What it holds already comes back as `FreePages`.
"""

from hicache.cache.pages import PageIds
from hicache.cache.tree.actions import FreePages
from hicache.cache.tree.node import DEVICE, FULL, HOST, MAMBA, SWA, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


def insert(
    tree: RadixTree, node: Node, sequence: Sequence, end: int, actions: list[FreePages]
) -> Node:
    """Publish the device pages `[node.end, end)` of a sequence below `node`.

    What the tree already holds is freed and the sequence takes the tree's pages instead; a
    tombstone takes the sequence's. `sequence.swa_start` must not lie inside the interval.
    Returns the node that ends at `end`.
    """
    residency, has_swa = tree.residency, tree.has_swa
    tick = residency.next_tick()
    above = node
    while above.parent is not None:
        above.tick = tick  # whoever publishes has used the prefix until now
        above = above.parent
    edge = end - tree.window_pages
    while node.end < end:
        start = node.end
        child = tree.descend(node, sequence.tokens, end)
        if child is None:
            # a new window is a node by itself, so that one lock pins one window
            is_cut = has_swa and sequence.swa_start <= start < edge
            child = _grow(tree, node, sequence, edge if is_cut else end)
            residency.put(child, DEVICE, FULL, sequence.full_pages[start : child.end])
            if has_swa and sequence.swa_start <= start:
                residency.put(child, DEVICE, SWA, sequence.swa_pages[start : child.end])
        else:
            _merge(tree, child, FULL, sequence.full_pages, actions)
            if has_swa and sequence.swa_start <= start:
                _merge(tree, child, SWA, sequence.swa_pages, actions)
        child.hit_count += 1
        child.tick = tick
        node = child
    return node


def attach_state(tree: RadixTree, node: Node, slot: PageIds) -> bool:
    """Keep the state after `node` on the device; False if one is kept there already, and used."""
    if node.held[DEVICE][MAMBA] is not None:
        tree.residency.touch_state(node)
        return False
    tree.residency.put(node, DEVICE, MAMBA, slot)
    return True


def insert_host(
    tree: RadixTree,
    anchor: Node,
    sequence: Sequence,
    pages: tuple[PageIds, PageIds, PageIds],
    actions: list[FreePages],
) -> Node:
    """Publish host pages of a sequence, read from storage, below `anchor`.

    Args:
        tree: takes them.
        anchor: where they continue; on the host itself, or a root.
        sequence: whose tokens they hold.
        pages: by component: full pages of all of it, swa pages of its end, the last state.
        actions: what was on the host already is freed through these.

    Returns:
        The node that ends where the pages do.
    """
    full, swa, state = pages
    first, end = anchor.end, anchor.end + len(full)
    swa_first = end - len(swa)
    node = anchor
    tick = tree.residency.next_tick()
    for cut in sorted({swa_first, end} - {first}):
        while node.end < cut:
            start = node.end
            child = tree.descend(node, sequence.tokens, cut)
            if child is None:
                child = _grow(tree, node, sequence, cut)
            _put_host(tree, child, FULL, full[start - first : child.end - first], actions)
            if tree.has_swa and start >= swa_first:
                part = swa[start - swa_first : child.end - swa_first]
                _put_host(tree, child, SWA, part, actions)
            child.tick = tick
            node = child
    if len(state):
        _put_host(tree, node, MAMBA, state, actions)
    return node


def _grow(tree: RadixTree, node: Node, sequence: Sequence, end: int) -> Node:
    # a new child for pages `[node.end, end)`
    start = node.end
    child = tree.grow(node, sequence.tokens[start * tree.page_bytes : end * tree.page_bytes])
    child.digests = sequence.known_digests(start, end)
    if sequence.chain is not None:
        child.numbers = sequence.chain.numbers[start:end]
    return child


def _merge(
    tree: RadixTree, node: Node, kind: int, page_ids: PageIds, actions: list[FreePages]
) -> None:
    # the sequence computed pages that the tree knows already, at least on one tier
    theirs = page_ids[node.start : node.end]
    ours = node.held[DEVICE][kind]
    if ours is None:
        tree.residency.put(node, DEVICE, kind, theirs)
    else:
        actions.append(FreePages(DEVICE, kind, theirs))
        page_ids[node.start : node.end] = ours


def _put_host(
    tree: RadixTree, node: Node, kind: int, page_ids: PageIds, actions: list[FreePages]
) -> None:
    if node.held[HOST][kind] is None:
        tree.residency.put(node, HOST, kind, page_ids)
    else:
        actions.append(FreePages(HOST, kind, page_ids))
