"""A picture of all that a tree knows, to tell whether something has changed it."""

from hicache.cache.tree.radix_tree import RadixTree


def portrait(tree: RadixTree) -> str:
    """Every node with all it says of itself, where it stands in which queue, and all counts."""
    residency = tree.residency
    queues = [residency.duplicates, *(each for tier in residency.queues for each in tier)]
    counts = (tree.num_nodes, residency.tick, residency.resident, residency.protected)
    nodes = [(id(node), vars(node)) for node in (*tree.roots.values(), *tree.nodes())]
    return repr((counts, [[*map(id, queue)] for queue in queues], nodes))
