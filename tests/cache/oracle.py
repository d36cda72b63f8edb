"""A naive cache, with which tests compare the tree: a dictionary of prefixes.

`Held[tier][kind]` maps a prefix of whole pages to the id of the page (or slot) that stands at its
end. A match tests all lengths, page by page, by the definition of a usable boundary in
docs/concepts.md.
"""

from typing import NamedTuple

from hicache.cache.kinds import FULL, Extent, Kind, Kinds
from hicache.cache.tree.node import DEVICE, HOST, TIERS, MatchResult
from hicache.cache.tree.radix_tree import RadixTree
from hicache.request import TOKEN_BYTES
from tests.cache.ghost import Held, Payload, nothing_held


class Answer(NamedTuple):
    """The result of a match, in tokens; `host_hits` by kind."""

    device_prefix_len: int
    usable_len: int
    full_len: int
    host_hits: tuple[int, ...]


def flatten(tree: RadixTree) -> Held:
    """The pages of a tree by prefix. O(tokens squared): for small trees."""
    held = nothing_held(tree.kinds)
    for namespace, root in tree.roots.items():
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, above = stack.pop()
            tokens = above + node.edge
            for tier in TIERS:
                for kind in tree.kinds.numbers:
                    page_ids = node.held[tier][kind] or []
                    # a state is at the end of its node, and so is the last page
                    for before_end, page_id in enumerate(reversed(page_ids)):
                        end = len(tokens) - before_end * tree.page_bytes
                        held[tier][kind][Payload(namespace, tokens[:end])] = page_id
            stack += [(child, tokens) for child in node.children.values()]
    return held


def longest_match(held: Held, kinds: Kinds, tokens: bytes, max_len: int, namespace: str) -> Answer:
    """The longest usable prefixes of the first `max_len` tokens.

    It uses only the attributes of each kind, not what `Kinds` derives from them.
    """
    page = kinds.page_size
    num_pages = min(max_len, len(tokens) // TOKEN_BYTES) // page
    prefixes = [
        Payload(namespace, tokens[: end * page * TOKEN_BYTES]) for end in range(num_pages + 1)
    ]

    def needed(kind: Kind, end: int) -> range:
        if kind.extent is Extent.path:
            return range(1, end + 1)
        if kind.extent is Extent.chunk:
            return range(end * page // kind.window_len * kind.window_len // page + 1, end + 1)
        length = page if kind.extent is Extent.point else kind.window_len
        return range(max(end - -(-length // page), 0) + 1, end + 1)

    def usable(end: int, tiers: tuple[int, ...]) -> bool:
        return all(
            any(prefixes[at] in held[tier][kind.number] for tier in tiers)
            for kind in kinds.all
            if kind.rider_of is None and not kind.is_replayed
            for at in needed(kind, end)
        )

    def deepest(tiers: tuple[int, ...]) -> int:
        return max(end for end in range(num_pages + 1) if usable(end, tiers))

    device, best = deepest((DEVICE,)), deepest((DEVICE, HOST))
    full = 0
    while full < num_pages and any(prefixes[full + 1] in held[tier][FULL] for tier in TIERS):
        full += 1
    hits = [0] * kinds.size
    for kind in kinds.all:
        if kind.rider_of is not None or kind.is_replayed:
            continue
        for at in needed(kind, best):
            is_read = kind.extent is not Extent.path or at > device
            on_device, on_host = (prefixes[at] in held[tier][kind.number] for tier in TIERS)
            if is_read and on_host and not on_device:
                hits[kind.number] += 1 if kind.extent is Extent.point else page
    return Answer(
        device_prefix_len=device * page,
        usable_len=best * page,
        full_len=full * page,
        host_hits=tuple(hits),
    )


def answer_of(match: MatchResult) -> Answer:
    """The numbers of an `Answer`, taken from a match of the tree."""
    return Answer(*(getattr(match, name) for name in Answer._fields))
