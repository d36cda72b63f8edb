"""A picture of all that a tree knows, to tell whether something has changed it."""

from hicache.cache.tree.radix_tree import RadixTree

LINKS = ("parent", "children")  # of nodes, told by identity


def portrait(tree: RadixTree) -> list[object]:
    """Every node with all it says of itself, where it stands in which queue, and all counts."""
    residency = tree.residency
    queues = [each for tier in residency.queues for each in tier]
    stack = list(tree.roots.values())
    picture: list[object] = [
        list(tree.roots),
        tree.num_nodes,
        residency.tick,
        repr((residency.resident, residency.protected)),
        [id(node) for node in residency.duplicates],
        [[id(node) for node in queue] for queue in queues],
    ]
    while stack:
        node = stack.pop()
        others = {name: value for name, value in vars(node).items() if name not in LINKS}
        picture.append((id(node), id(node.parent), repr(others)))
        picture.append([(first, id(child)) for first, child in node.children.items()])
        stack += node.children.values()
    return picture
