"""A picture of all that a tree knows, to tell whether something has changed it."""

from hicache.cache.tree.node import Node
from hicache.cache.tree.radix_tree import RadixTree


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
        picture.append((id(node), id(node.parent), _sayings(node)))
        picture.append([(first, id(child)) for first, child in node.children.items()])
        stack += node.children.values()
    return picture


def _sayings(node: Node) -> str:
    plain = [name for name in vars(node) if name not in ("parent", "children", "held")]
    return repr(([(name, getattr(node, name)) for name in plain], node.held))
