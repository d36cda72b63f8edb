"""The naive cache that tests trust: no tree, no nodes, a dictionary of prefixes.

`Held[tier][kind]` maps a prefix of whole pages to the id of the page (mamba: the slot) that stands
at its end. Every question is answered page by page from DESIGN's definition of a usable boundary.
"""

from typing import NamedTuple

from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, FULL, HOST, KINDS, MAMBA, SWA, TIERS
from hicache.cache.tree.radix_tree import RadixTree
from hicache.request import TOKEN_BYTES
from tests.cache.ghost import Held, Payload


class Answer(NamedTuple):
    """What a match must say, in tokens."""

    device_prefix_len: int
    usable_len: int
    full_len: int
    host_hit_length: int
    swa_host_hit_length: int
    mamba_host_hit_length: int


class Shape(NamedTuple):
    """What decides whether a boundary is usable."""

    page_size: int
    window_len: int
    has_states: bool


def shape_of(tree: RadixTree) -> Shape:
    """The shape a tree was built with."""
    return Shape(tree.page_size, tree.window_len, tree.has_states)


def nothing_held() -> Held:
    """An empty cache."""
    return ([{}, {}, {}], [{}, {}, {}])


def flatten(tree: RadixTree) -> Held:
    """What a tree holds, as a dictionary. O(tokens squared): for small trees."""
    held = nothing_held()
    for namespace, root in tree.roots.items():
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, above = stack.pop()
            tokens = above + node.edge
            for tier in TIERS:
                for kind in KINDS:
                    page_ids = node.held[tier][kind]
                    if page_ids is None:
                        continue
                    if kind == MAMBA:
                        held[tier][kind][Payload(namespace, tokens)] = page_ids[0]
                        continue
                    for index, page_id in enumerate(page_ids):
                        end = len(above) + (index + 1) * tree.page_bytes
                        held[tier][kind][Payload(namespace, tokens[:end])] = page_id
            stack += [(child, tokens) for child in node.children.values()]
    return held


def longest_match(held: Held, shape: Shape, tokens: bytes, max_len: int, namespace: str) -> Answer:
    """The deepest usable boundaries within the first `max_len` tokens, tried one by one."""
    page_bytes = shape.page_size * TOKEN_BYTES
    num_pages = min(max_len, len(tokens) // TOKEN_BYTES) // shape.page_size
    prefixes = [Payload(namespace, tokens[: end * page_bytes]) for end in range(num_pages + 1)]
    window_pages = -(-shape.window_len // shape.page_size)

    def usable(end: int, tiers: tuple[int, ...]) -> bool:
        def has(kind: int, at: int) -> bool:
            return any(prefixes[at] in held[tier][kind] for tier in tiers)

        window = range(max(end - window_pages, 0) + 1, end + 1)
        return (
            all(has(FULL, at) for at in range(1, end + 1))
            and (not shape.window_len or all(has(SWA, at) for at in window))
            and (not shape.has_states or end == 0 or has(MAMBA, end))
        )

    def deepest(tiers: tuple[int, ...]) -> int:
        return max(end for end in range(num_pages + 1) if usable(end, tiers))

    def host_only(kind: int, ends: range) -> int:
        return sum(
            prefixes[at] in held[HOST][kind] and prefixes[at] not in held[DEVICE][kind]
            for at in ends
        )

    device, best = deepest((DEVICE,)), deepest((DEVICE, HOST))
    full = 0
    while full < num_pages and any(prefixes[full + 1] in held[tier][FULL] for tier in TIERS):
        full += 1
    swa = host_only(SWA, range(max(best - window_pages, 0) + 1, best + 1))
    return Answer(
        device_prefix_len=device * shape.page_size,
        usable_len=best * shape.page_size,
        full_len=full * shape.page_size,
        host_hit_length=host_only(FULL, range(device + 1, best + 1)) * shape.page_size,
        swa_host_hit_length=swa * shape.page_size if shape.window_len else 0,
        mamba_host_hit_length=host_only(MAMBA, range(best, best + 1)) if shape.has_states else 0,
    )


def answer_of(match: MatchResult) -> Answer:
    """The same numbers, as the tree says them."""
    return Answer(*(getattr(match, name) for name in Answer._fields))
